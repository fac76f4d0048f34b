"""Request the allocations that a study holds, find them again after a restart, and give them back."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from sweeps.cluster.slurm.held_request import hold_name, hold_parameters
from sweeps.cluster.slurm.held_steps import read_hold, read_holder
from sweeps.cluster.slurm.holder import Hold, HoldDir, Holder, hold
from sweeps.cluster.slurm.queries import JobFacts, JobWatch
from sweeps.cluster.slurm.request import Site
from sweeps.cluster.slurm.states import Waits
from sweeps.cluster.slurm.submit import Executor, Sending, scancel
from sweeps.errors import SweepError
from train_entry.contract import StudyDir, dump, write_atomic

MAX_VAIN = 3  # allocations in a row that may end before a trial began in them


@dataclass
class Allocation:
    """An allocation that was requested, as this orchestrator knows it."""

    directory: HoldDir
    job_id: str
    index: int
    holder: Holder | None = None
    ordered: int = 0  # number of steps ordered in it
    known_at: float = field(default_factory=time.monotonic)


@dataclass
class Allocations:
    """The allocations of one study: `cluster.holds` of them at once, each with its index."""

    site: Site
    study: StudyDir
    watch: JobWatch
    say: Callable[[str], None]
    _held: dict[int, Allocation] = field(default_factory=dict)
    _asked: dict[int, tuple[HoldDir, Sending]] = field(default_factory=dict)  # not accepted by Slurm yet
    _vain: int = 0
    _waits: Waits = field(init=False)

    def __post_init__(self) -> None:
        self._waits = Waits(self.say)
        for found in self._known():
            if not found.directory.over.exists():
                self._held[found.index] = found

    def ready(self, index: int) -> tuple[Allocation, Holder, JobFacts] | None:
        """Return the allocation of this index once it runs; request it if there is none.

        Raises SweepError if Slurm keeps refusing it.
        """
        allocation = self._held.get(index)
        if allocation is None:
            self._ask(index)
            return None
        facts = self.watch.facts(allocation.job_id)
        if facts is None:
            return None
        if facts.is_over or allocation.directory.over.exists():
            self._vain = 0 if allocation.ordered else self._vain + 1
            del self._held[index]
        elif facts.is_waiting:
            self._waits.look("the allocation", facts, time.monotonic() - allocation.known_at)
        else:
            allocation.holder = allocation.holder or read_holder(allocation.directory)
            return (allocation, allocation.holder, facts) if allocation.holder is not None else None
        return None

    def with_order(self, step: str) -> Allocation | None:
        """The allocation, of this or an earlier start, in which this step was ordered."""
        found = [known for known in self._known() if known.directory.order(step).exists()]
        if not found:
            return None
        mine = self._held.get(found[-1].index)
        return mine if mine is not None and mine.directory == found[-1].directory else found[-1]

    def has_served(self) -> None:
        """Note that a trial has ended in an allocation."""
        self._vain = 0

    def release(self, allocation: Allocation) -> str | None:
        """Let an allocation end. Its holder does that best; while it waits for nodes, it has none.

        Return the reason if it may not end.
        """
        facts = self.watch.facts(allocation.job_id)
        if facts is not None and facts.is_over:
            return None
        allocation.directory.release.touch()
        if read_holder(allocation.directory) is None:
            _, refusal = scancel([allocation.job_id])
            if refusal:
                name = f"job {allocation.job_id}, which holds nodes,"
                return f"{name} may not end: {refusal}; `scancel {allocation.job_id}` ends it"
        self._held.pop(allocation.index, None)
        return None

    def give_back(self, busy: Collection[str]) -> list[str]:
        """Release all allocations except the jobs in `busy`. Return a line for each that may stay."""
        for index, (directory, sending) in list(self._asked.items()):  # sbatch's answer may have been lost
            if job_id := sending.find():
                self._held[index] = Allocation(directory, job_id, index)
        idle = [found for found in self._held.values() if found.job_id not in busy]
        return [problem for found in idle if (problem := self.release(found))]

    def _ask(self, index: int) -> None:
        """Submit a job that holds nodes."""
        if self._vain >= MAX_VAIN:
            raise SweepError(
                f"{MAX_VAIN} allocations in a row ended before a trial began in them; "
                f"their logs are in {self._root}"
            )
        if index not in self._asked:
            self._asked[index] = self._new(index)
        directory, sending = self._asked[index]
        job_id = sending.job_id()
        if job_id is not None:
            del self._asked[index]
            write_atomic(directory.record, dump(Hold(job_id=job_id, index=index, asked_at=time.time())))
            self._held[index] = Allocation(directory, job_id, index)

    def _new(self, index: int) -> tuple[HoldDir, Sending]:
        number = 1 + max((int(path.name) for path in self._root.glob("[0-9]*")), default=0)
        directory = HoldDir(self._root / f"{number:04d}")
        directory.path.mkdir(parents=True)
        name = hold_name(self.study, index)

        def send() -> str:
            executor = Executor(directory.path / "submitit")
            executor.update_parameters(**hold_parameters(self.site, name, directory.path))
            return executor.send(hold, str(directory.path.resolve()), str(self.site.cluster.hold_idle_s))

        def find() -> str | None:
            found = self.watch.named(name, str(directory.path.resolve()))
            return found.job_id if found else None

        return directory, Sending(send=send, find=find, watch=self.watch, say=self.say)

    # ------------------------------------------------------------------ earlier starts

    @property
    def _root(self) -> Path:
        return self.study.path / "holds"

    def _known(self) -> Iterator[Allocation]:
        """All allocations, those of earlier starts too, in the order in which they were requested."""
        for path in sorted(self._root.glob("[0-9]*")):
            directory = HoldDir(path)
            ordered = sum(name.endswith(".order") for name in directory.names())
            if record := read_hold(directory):
                yield Allocation(directory, record.job_id, record.index, ordered=ordered)
            elif found := self._find(directory):
                yield found

    def _find(self, directory: HoldDir) -> Allocation | None:
        """Find an allocation by its name, if an orchestrator died between sbatch and writing the job's id."""
        for index in range(self.site.cluster.holds):
            if found := self.watch.named(hold_name(self.study, index), str(directory.path.resolve())):
                record = Hold(job_id=found.job_id, index=index, asked_at=time.time())
                write_atomic(directory.record, dump(record))
                return Allocation(directory, found.job_id, index)
        return None
