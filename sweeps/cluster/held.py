"""Held allocations of Slurm: trials run inside one after another, and side by side where they fit.

One wait in the queue for a whole study. A trial is a step of the allocation, with the same supervisors and
the same files as a job of its own; who starts it, on the allocation's first node, is `holder`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from sweeps.cluster.base import JobHandle, JobState
from sweeps.cluster.held_request import (
    hold_name,
    hold_parameters,
    hold_word,
    holds_of,
    needed_s,
    nodes_of,
    step_command,
    step_name,
)
from sweeps.cluster.holder import Hold, HoldDir, Holder, Order, hold
from sweeps.cluster.slurm import Executor, SlurmCluster, cancel_job, rank_exits
from sweeps.cluster.slurm_queries import JobFacts, JobWatch, ask
from sweeps.cluster.slurm_request import Layout, Site
from sweeps.errors import SweepError
from sweeps.machine import Machine
from train_entry.contract import (
    AttemptDir,
    ContractError,
    ExitReason,
    StudyDir,
    Submission,
    TrialSpec,
    dump,
    read_document,
    write_atomic,
)

NAME = "held"
LOOK_S = 0.4  # between two looks at a trial's files, which lie on a file system that many share
FILES_S = 10.0  # for files of another node to be seen here
LEAVING_S = 15.0  # for a step whose ranks have all ended
OVER_S = 90.0  # for an allocation to be over, whose end its steps have felt
CANCEL_S = 60.0
MAX_VAIN = 3  # allocations in a row that end before a trial began in them


@dataclass
class _Allocation:
    """One that was asked for, as far as this orchestrator knows."""

    directory: HoldDir
    job_id: str
    index: int
    holder: Holder | None = None
    ordered: int = 0  # steps


@dataclass
class _Trial:
    handle: JobHandle
    spec: TrialSpec
    allocation: _Allocation | None = None  # None: waits for one
    state: JobState = JobState.QUEUED
    looked_at: float = float("-inf")
    ended_at: float | None = None  # when all of its ranks, or its step, had ended
    over_at: float | None = None  # when its allocation was seen to be over

    @property
    def step(self) -> str:
        return step_name(self.handle.attempt)


@dataclass
class HeldCluster:
    """Runs trials in allocations of its own, at most `parallel` at once."""

    site: Site
    parallel: int
    study: StudyDir
    watch: JobWatch = field(default_factory=JobWatch)
    _trials: dict[Path, _Trial] = field(default_factory=dict)
    _allocations: dict[int, _Allocation] = field(default_factory=dict)
    _jobs: SlurmCluster = field(init=False)  # trials that an earlier start submitted as jobs of their own
    _longest_s: float = 0.0  # that a trial took so far
    _vain: int = 0

    def __post_init__(self) -> None:
        self._jobs = SlurmCluster(self.site, self.parallel, self.watch)
        for found in self._known():
            if not found.directory.over.exists():
                self._allocations[found.index] = found

    @property
    def machine(self) -> Machine:
        return self.site.machine

    def free_ranks(self) -> int:
        if len(self._trials) + len(self._jobs._jobs) >= self.parallel:
            return 0
        per_node = self.machine.ranks_per_node
        holds = [[len(slots) for slots in nodes.values()] for nodes in self._free().values()]
        return max(max([sum(free for free in nodes if free == per_node), *nodes]) for nodes in holds)

    def reserve(self, ranks: int) -> tuple[str, ...] | None:
        if len(self._trials) + len(self._jobs._jobs) >= self.parallel:
            return None
        layout = Layout.of(ranks, self.machine.ranks_per_node)
        wanted = self.machine.ranks_per_node if layout.nodes > 1 else ranks
        for nodes in self._free().values():
            found = [slots[:wanted] for slots in nodes.values() if len(slots) >= wanted][: layout.nodes]
            if len(found) == layout.nodes:
                return tuple(slot for slots in found for slot in slots)
        return None

    def has_neighbours(self, slots: tuple[str, ...]) -> bool:
        """Nobody else's: an allocation's nodes are ours, and the loop knows of our own."""
        return False

    def submit(self, attempt: AttemptDir, spec: TrialSpec, slots: tuple[str, ...]) -> JobHandle:
        attempt.submitit.mkdir(parents=True, exist_ok=True)
        trial = self._take(attempt, spec, slots)
        self._look(trial)
        return trial.handle

    def attach(self, attempt: AttemptDir, ranks: int, slots: tuple[str, ...]) -> JobHandle:
        spec = read_document(attempt.spec, TrialSpec)
        submission = read_document(attempt.submission, Submission)
        if spec is None or (submission is not None and submission.cluster != NAME):
            return self._jobs.attach(attempt, ranks, slots)
        trial = self._take(attempt, spec, slots)
        for found in self._known():
            if found.directory.order(trial.step).exists():
                mine = self._allocations.get(found.index)
                trial.allocation = mine if mine and mine.directory == found.directory else found
        if trial.allocation is None and _index(slots) not in range(holds_of(self.site)):
            del self._trials[attempt.path]  # of a start without hold, or with more of them
            return self._jobs.attach(attempt, ranks, slots)
        return trial.handle

    def poll(self, handle: JobHandle) -> JobState:
        trial = self._trials.get(handle.attempt.path)
        if trial is None:
            return self._jobs.poll(handle)
        if time.monotonic() - trial.looked_at >= LOOK_S:
            self._look(trial)
        if trial.state in (JobState.ENDED, JobState.LOST):
            del self._trials[handle.attempt.path]
        return trial.state

    def cancel(self, handle: JobHandle) -> None:
        trial = self._trials.pop(handle.attempt.path, None)
        if trial is None:
            self._jobs.cancel(handle)
        elif trial.allocation is not None:
            _cancel_step(trial.allocation.directory, trial.step, trial.allocation.job_id, self.watch)

    def give_back(self) -> None:
        """End the allocations, unless trials are left to run on in them."""
        for found in self._allocations.values():
            if any(trial.allocation is found for trial in self._trials.values()):
                continue
            self._release(found)

    # ------------------------------------------------------------------ states

    def _look(self, trial: _Trial) -> None:
        trial.looked_at = time.monotonic()
        if trial.allocation is None:
            self._place(trial)
        trial.state = self._state(trial, trial.allocation) if trial.allocation else JobState.QUEUED

    def _state(self, trial: _Trial, allocation: _Allocation) -> JobState:
        facts = self.watch.facts(allocation.job_id)  # asked first: what ranks write, they write before
        attempt, ranks = trial.handle.attempt, trial.handle.ranks
        exits = rank_exits(attempt, ranks)
        names = allocation.directory.names()
        has_ended = allocation.directory.ended(trial.step).name in names
        is_over = facts is not None and facts.is_over
        was_told = any(found.reason is ExitReason.CANCELLED for found in exits)
        if len(exits) == ranks and not was_told:
            return self._leaves(
                trial, allocation, exits_s=max(found.seconds for found in exits), gone=is_over or has_ended
            )
        if is_over and allocation.directory.begun(trial.step).name not in names:
            trial.allocation = None  # it never began: it waits for the next one
            return JobState.QUEUED
        if facts is not None and is_over:
            return self._ended_with(trial, facts, len(exits) == ranks)
        if has_ended:  # and its ranks do not say why: the allocation may be about to end
            trial.ended_at = trial.ended_at or time.monotonic()
            if time.monotonic() - trial.ended_at > OVER_S:
                return JobState.ENDED if len(exits) == ranks else JobState.LOST
        return JobState.RUNNING if attempt.job.exists() else JobState.STARTING

    def _leaves(self, trial: _Trial, allocation: _Allocation, exits_s: float, gone: bool) -> JobState:
        """All ranks have ended in order; their slots are free once their step is gone."""
        trial.ended_at = trial.ended_at or time.monotonic()
        self._longest_s = max(self._longest_s, exits_s)
        self._vain = 0
        if not gone and time.monotonic() - trial.ended_at > LEAVING_S:
            allocation.directory.cancel(trial.step).touch()
        return JobState.ENDED if gone else JobState.RUNNING

    def _ended_with(self, trial: _Trial, facts: JobFacts, is_complete: bool) -> JobState:
        """The allocation has ended, and the trial with it."""
        trial.over_at = trial.over_at or time.monotonic()
        waited_s = time.monotonic() - trial.over_at
        if not is_complete and waited_s < FILES_S:
            return JobState.RUNNING
        final = self.watch.final(facts.job_id)
        if final is None and waited_s < OVER_S:
            return JobState.RUNNING
        ran_s = max(
            (found.seconds for found in rank_exits(trial.handle.attempt, trial.handle.ranks)), default=0.0
        )
        had_its_time = ran_s >= needed_s(self.site, trial.spec, self._longest_s)
        write_atomic(trial.handle.attempt.scheduler, dump(hold_word(final or facts, had_its_time)))
        return JobState.ENDED if is_complete else JobState.LOST

    # ------------------------------------------------------------------ allocations

    def _place(self, trial: _Trial) -> None:
        """Order the trial's step, where its allocation is there and lasts long enough."""
        index = _index(trial.handle.slots)
        allocation = self._allocations.get(index)
        if allocation is None:
            self._allocations[index] = self._ask(index)
            return
        facts = self.watch.facts(allocation.job_id)
        if facts is not None and (facts.is_over or allocation.directory.over.exists()):
            self._forget(allocation)
        elif facts is not None and not facts.is_waiting:
            allocation.holder = allocation.holder or _holder(allocation.directory)
            if allocation.holder is not None and self._lasts(allocation, facts, trial):
                self._order(trial, allocation, allocation.holder)

    def _lasts(self, allocation: _Allocation, facts: JobFacts, trial: _Trial) -> bool:
        """Whether a trial may begin in it. One in which nothing ran yet takes any: none would last longer."""
        if facts.limit_s is None or allocation.ordered == 0:
            return True
        if facts.limit_s - facts.used_s >= needed_s(self.site, trial.spec, self._longest_s):
            return True
        if not any(other.allocation is allocation for other in self._trials.values()):
            self._release(allocation)
            del self._allocations[allocation.index]
        return False

    def _order(self, trial: _Trial, allocation: _Allocation, holder: Holder) -> None:
        attempt = trial.handle.attempt
        hosts = [holder.hosts[node] for node in nodes_of(trial.handle.slots)]
        command = step_command(self.site, trial.spec, attempt, holder.job_id, hosts)
        asked_at = time.time() - (time.monotonic() - trial.handle.submitted_at)
        submission = Submission(cluster=NAME, job_id=allocation.job_id, submitted_at=asked_at)
        write_atomic(attempt.submission, dump(submission))
        order = Order(command=command, log=str(attempt.submitit.resolve() / "srun.log"))
        write_atomic(allocation.directory.order(trial.step), dump(order))
        trial.allocation = allocation
        allocation.ordered += 1

    def _ask(self, index: int) -> _Allocation:
        """Submit a job that holds nodes. Raises SweepError where Slurm refuses it."""
        if self._vain >= MAX_VAIN:
            raise SweepError(
                f"{MAX_VAIN} allocations in a row ended before a trial began in them; "
                f"their logs are in {self._root}"
            )
        number = 1 + max((int(path.name) for path in self._root.glob("[0-9]*")), default=0)
        directory = HoldDir(self._root / f"{number:04d}")
        directory.path.mkdir(parents=True)
        executor = Executor(directory.path / "submitit")
        executor.update_parameters(**hold_parameters(self.site, hold_name(self.study, index), directory.path))
        job_id = executor.send(hold, str(directory.path.resolve()), str(self.site.cluster.hold_idle_s))
        write_atomic(directory.record, dump(Hold(job_id=job_id, index=index, asked_at=time.time())))
        return _Allocation(directory, job_id, index)

    def _release(self, allocation: _Allocation) -> None:
        """Let it end. Its own holder does that best; while it waits for nodes there is none."""
        facts = self.watch.facts(allocation.job_id)
        if facts is not None and facts.is_over:
            return
        allocation.directory.release.touch()
        if _holder(allocation.directory) is None:
            ask("scancel", allocation.job_id)

    def _forget(self, allocation: _Allocation) -> None:
        self._vain = 0 if allocation.ordered else self._vain + 1
        self._allocations.pop(allocation.index, None)

    @property
    def _root(self) -> Path:
        return self.study.path / "holds"

    def _known(self) -> Iterator[_Allocation]:
        """Those of earlier starts too, in the order in which they were asked for."""
        for path in sorted(self._root.glob("[0-9]*")):
            directory = HoldDir(path)
            ordered = sum(name.endswith(".order") for name in directory.names())
            if record := _record(directory):
                yield _Allocation(directory, record.job_id, record.index, ordered=ordered)
            elif found := self._find(directory):
                yield found

    def _find(self, directory: HoldDir) -> _Allocation | None:
        """By its name, where an orchestrator died between sbatch and writing down the job's id."""
        for index in range(holds_of(self.site)):
            if found := self.watch.named(hold_name(self.study, index), str(directory.path.resolve())):
                record = Hold(job_id=found.job_id, index=index, asked_at=time.time())
                write_atomic(directory.record, dump(record))
                return _Allocation(directory, found.job_id, index)
        return None

    # ------------------------------------------------------------------ slots

    def _free(self) -> dict[int, dict[int, list[str]]]:
        """Names of free slots, by allocation and node."""
        taken = {slot for trial in self._trials.values() for slot in trial.handle.slots}
        holds = holds_of(self.site)
        return {
            index: {
                node: [
                    name
                    for slot in range(self.machine.ranks_per_node)
                    if (name := f"hold-{index}.node-{node}/{slot}") not in taken
                ]
                for node in range(self.site.cluster.nodes // holds)
            }
            for index in range(holds)
        }

    def _take(self, attempt: AttemptDir, spec: TrialSpec, slots: tuple[str, ...]) -> _Trial:
        handle = JobHandle(attempt=attempt, ranks=spec.plan.ranks, slots=slots, submitted_at=time.monotonic())
        self._trials[attempt.path] = _Trial(handle, spec)
        return self._trials[attempt.path]


def cancel_attempt(attempt: AttemptDir) -> None:
    """End an attempt's step, whoever ordered it; its allocation goes on."""
    study, step = attempt.path.resolve().parents[2], step_name(attempt)
    for path in sorted((study / "holds").glob("[0-9]*")):
        directory = HoldDir(path)
        record = _record(directory)
        if record is not None and directory.order(step).exists():
            _cancel_step(directory, step, record.job_id, JobWatch())


def _cancel_step(directory: HoldDir, step: str, job_id: str, watch: JobWatch) -> None:
    """Wait until it is gone; where its holder does not end it, end the allocation."""
    directory.cancel(step).touch()
    deadline = time.monotonic() + CANCEL_S
    while time.monotonic() < deadline:
        names = directory.names()
        never_begins = directory.over.name in names and directory.begun(step).name not in names
        if directory.ended(step).name in names or never_begins:
            return
        facts = watch.facts(job_id)
        if facts is not None and (facts.is_over or facts.is_waiting):
            return
        time.sleep(0.2)
    cancel_job(job_id, watch)


def _index(slots: tuple[str, ...]) -> int:
    """Which of the allocations that are held at once: `hold-INDEX.node-NODE/SLOT`."""
    head = slots[0].partition(".")[0] if slots else ""
    number = head.removeprefix("hold-")
    return int(number) if number.isdigit() else -1


def _holder(directory: HoldDir) -> Holder | None:
    os.listdir(directory.path)  # makes NFS look again
    try:
        return read_document(directory.holder, Holder)
    except ContractError:
        return None


def _record(directory: HoldDir) -> Hold | None:
    try:
        return read_document(directory.record, Hold)
    except ContractError:
        return None
