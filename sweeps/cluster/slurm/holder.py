"""Hold an allocation: this process runs on its first node and starts the trials that are ordered by files.

An order is a command. The orchestrator writes it into the allocation's directory, and this process runs it.
So a trial lives as long as the allocation, whatever becomes of the orchestrator and its host.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from sweeps.cluster.node.steps import Part, Step
from sweeps.cluster.slurm.queries import ask, clean_environment
from train_entry.contract import ContractError, dump, read_document, write_atomic

LOOK_S = 0.2
PATIENCE_S = 15.0  # for supervisors to write how their ranks ended, before srun kills them


@dataclass(frozen=True, kw_only=True, slots=True)
class Hold:
    """hold.json: an allocation that was requested."""

    job_id: str
    index: int  # among the allocations that are held at once
    asked_at: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """holder.json: the holder runs, on the first of these hosts."""

    job_id: str
    host: str
    hosts: tuple[str, ...]
    started_at: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """A step to run."""

    command: tuple[str, ...]
    log: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StepEnd:
    returncode: int


@dataclass(frozen=True, slots=True)
class HoldDir:
    """An allocation's files. The orchestrator writes record, orders and requests; the holder the others."""

    path: Path

    @property
    def record(self) -> Path:
        return self.path / "hold.json"

    @property
    def holder(self) -> Path:
        return self.path / "holder.json"

    @property
    def release(self) -> Path:
        """A request to end the allocation now."""
        return self.path / "release"

    @property
    def over(self) -> Path:
        """Exists once the holder takes no further order."""
        return self.path / "over"

    def order(self, step: str) -> Path:
        return self.path / f"{step}.order"

    def cancel(self, step: str) -> Path:
        """A request to end this step."""
        return self.path / f"{step}.cancel"

    def begun(self, step: str) -> Path:
        return self.path / f"{step}.begun"

    def ended(self, step: str) -> Path:
        return self.path / f"{step}.ended"

    def names(self) -> set[str]:
        """The names of all files there: one listing, which NFS answers afresh."""
        try:
            return set(os.listdir(self.path))
        except FileNotFoundError:
            return set()


@dataclass
class _Holding:
    """One allocation while it is held."""

    directory: HoldDir
    idle_s: float
    steps: dict[str, Step] = field(default_factory=dict)
    busy_at: float = field(default_factory=time.monotonic)
    is_told: bool = False

    def tell(self, _signal: int, _frame: FrameType | None) -> None:
        self.is_told = True

    def run(self) -> None:
        """Run the ordered steps until we are told to end, or idle for too long."""
        while not self._is_to_end():
            self._turn(self.directory.names())
            time.sleep(LOOK_S)
        self.directory.over.touch()
        if not self.is_told and self.directory.release.name not in self.directory.names():
            self._turn(self.directory.names())  # an order that came at the last moment
        while self.steps:
            for step in self.steps.values():
                step.end()
            self._reap()
            time.sleep(LOOK_S)

    def _is_to_end(self) -> bool:
        if self.steps:
            self.busy_at = time.monotonic()
        is_idle = time.monotonic() - self.busy_at > self.idle_s
        return self.is_told or is_idle or self.directory.release.exists()

    def _turn(self, names: set[str]) -> None:
        for order in sorted(name for name in names if name.endswith(".order")):
            step = order.removesuffix(".order")
            if self.directory.begun(step).name not in names and step not in self.steps:
                self._start(step)
        for name, running in self.steps.items():
            if self.directory.cancel(name).name in names:
                running.end()
        self._reap()

    def _start(self, step: str) -> None:
        if self.directory.cancel(step).exists():
            return
        try:
            order = read_document(self.directory.order(step), Order)
        except ContractError:  # the file is not complete here yet
            return
        if order is None:
            return
        self.directory.begun(step).touch()
        srun = Part(
            command=order.command,
            log=Path(order.log),
            environment=clean_environment(),  # our own job's variables would alter its steps
            last_word=signal.SIGQUIT,  # srun passes SIGTERM on; SIGQUIT makes it kill its step
        )
        self.steps[step] = Step.start([srun], PATIENCE_S)

    def _reap(self) -> None:
        for name, step in list(self.steps.items()):
            if step.reap():
                end = StepEnd(returncode=step.parts[0].status or 0)
                write_atomic(self.directory.ended(name), dump(end))
                del self.steps[name]


def hold(path: str, idle_s: str) -> None:
    """Hold the allocation of this job. submitit calls this once in each."""
    directory = HoldDir(Path(path))
    holding = _Holding(directory, float(idle_s))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
        signal.signal(number, holding.tell)
    hosts = ask("scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]).split()
    record = Holder(
        job_id=os.environ["SLURM_JOB_ID"],
        host=socket.gethostname(),
        hosts=tuple(hosts),
        started_at=time.time(),
    )
    write_atomic(directory.holder, dump(record))
    holding.run()
