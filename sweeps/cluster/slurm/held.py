"""Held allocations of Slurm: trials run in them one after another, and side by side where they fit.

A whole study waits in the queue only once. A trial is a step of the allocation, with the same supervisors and
the same files as a job of its own. `holder`, on the allocation's first node, starts it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

from sweeps.cluster.base import JobHandle, JobState
from sweeps.cluster.node.exits import rank_exits
from sweeps.cluster.slots import SlotTable
from sweeps.cluster.slurm.allocations import Allocation, Allocations
from sweeps.cluster.slurm.held_request import (
    hold_of,
    hold_word,
    needed_s,
    never_started,
    nodes_of,
    step_command,
    step_name,
)
from sweeps.cluster.slurm.held_steps import cancel_steps
from sweeps.cluster.slurm.holder import Holder, Order
from sweeps.cluster.slurm.jobs import SlurmCluster
from sweeps.cluster.slurm.queries import JobFacts, JobWatch
from sweeps.cluster.slurm.request import Site
from sweeps.machine import Machine
from train_entry.contract import (
    AttemptDir,
    ExitReason,
    StudyDir,
    Submission,
    TrialSpec,
    dump,
    read_document,
    write_atomic,
)

NAME = "held"
LOOK_S = 0.4  # between two looks at a trial's files, which lie on a shared file system
FILES_S = 10.0  # for files of another node to become visible here
LEAVING_S = 15.0  # for a step to end after all its ranks have
OVER_S = 90.0  # for Slurm to report the end of an allocation whose steps have ended


@dataclass
class _Trial:
    handle: JobHandle
    spec: TrialSpec
    allocation: Allocation | None = None  # None: waits for one
    state: JobState = JobState.QUEUED
    looked_at: float = float("-inf")
    ordered_at: float | None = None
    ended_at: float | None = None  # when all of its ranks, or its step, were seen to have ended
    over_at: float | None = None  # when its allocation was seen to be over

    @property
    def step(self) -> str:
        return step_name(self.handle.attempt)


@dataclass
class HeldCluster:
    """A cluster of held allocations. It runs at most `parallel` trials at once."""

    site: Site
    parallel: int
    study: StudyDir
    watch: JobWatch = field(default_factory=JobWatch)
    say: Callable[[str], None] = print
    _trials: dict[Path, _Trial] = field(default_factory=dict)
    _allocations: Allocations = field(init=False)
    _jobs: SlurmCluster = field(init=False)  # trials that an earlier start submitted as jobs of their own
    _slots: SlotTable = field(init=False)
    _longest_s: float = 0.0  # the longest that a trial took so far

    def __post_init__(self) -> None:
        self._jobs = SlurmCluster(self.site, self.parallel, self.watch, say=self.say)
        self._allocations = Allocations(self.site, self.study, self.watch, self.say)
        holds = self.site.cluster.holds
        self._slots = SlotTable(
            groups=tuple(f"hold-{index}." for index in range(holds)),
            nodes=self.site.cluster.nodes // holds,
            per_node=self.machine.ranks_per_node,
        )

    @property
    def machine(self) -> Machine:
        return self.site.machine

    def free_ranks(self) -> int:
        return 0 if self._is_full() else self._slots.free_ranks(self._taken())

    def reserve(self, ranks: int) -> tuple[str, ...] | None:
        return None if self._is_full() else self._slots.reserve(ranks, self._taken())

    def has_neighbours(self, slots: tuple[str, ...]) -> bool:
        """True if the allocation is only part of a node, so that others' jobs may run beside it."""
        return not self.site.cluster.exclusive and self.machine.ranks_per_node < self.site.slots_on_node

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
        trial.allocation = self._allocations.with_order(trial.step)
        if trial.allocation is None and hold_of(slots) not in range(self.site.cluster.holds):
            del self._trials[attempt.path]  # from a start without cluster.hold, or with more holds
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

    def cancel(self, *handles: JobHandle) -> list[str]:
        mine = [trial for handle in handles if (trial := self._trials.pop(handle.attempt.path, None))]
        steps = [
            (trial.allocation.directory, trial.step, trial.allocation.job_id)
            for trial in mine
            if trial.allocation is not None
        ]
        return cancel_steps(steps, self.watch) + self._jobs.cancel(*handles)

    def give_back(self) -> list[str]:
        """Release the allocations except those whose trials run on. Return a line for each that may stay."""
        return self._allocations.give_back(
            {trial.allocation.job_id for trial in self._trials.values() if trial.allocation is not None}
        )

    # ------------------------------------------------------------------ states

    def _look(self, trial: _Trial) -> None:
        trial.looked_at = time.monotonic()
        if trial.allocation is None:
            self._place(trial)
        trial.state = self._state(trial, trial.allocation) if trial.allocation else JobState.QUEUED

    def _state(self, trial: _Trial, allocation: Allocation) -> JobState:
        facts = self.watch.facts(allocation.job_id)  # checked first: ranks write their files before it ends
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
            trial.allocation = trial.ordered_at = None  # the step never began: wait for the next allocation
            return JobState.QUEUED
        if facts is not None and is_over:
            return self._ended_with(trial, facts, len(exits) == ranks)
        if has_ended:  # but its ranks do not say why: the allocation may be about to end
            trial.ended_at = trial.ended_at or time.monotonic()
            if time.monotonic() - trial.ended_at > OVER_S:
                return JobState.ENDED if len(exits) == ranks else JobState.LOST
        if attempt.job.exists():
            return JobState.RUNNING
        return self._starts(trial, allocation, has_ended)

    def _starts(self, trial: _Trial, allocation: Allocation, has_ended: bool) -> JobState:
        """Limit the start of a step: its supervisors do not run yet, and srun may hang forever."""
        trial.ordered_at = trial.ordered_at or time.monotonic()
        waited_s, limit_s = time.monotonic() - trial.ordered_at, trial.spec.limits.startup_s
        if waited_s < limit_s:
            return JobState.STARTING
        allocation.directory.cancel(trial.step).touch()
        if not has_ended and waited_s < limit_s + OVER_S:
            return JobState.STARTING
        write_atomic(trial.handle.attempt.scheduler, dump(never_started(allocation.job_id, limit_s)))
        return JobState.LOST

    def _leaves(self, trial: _Trial, allocation: Allocation, exits_s: float, gone: bool) -> JobState:
        """Handle a trial whose ranks have all ended in order. Its slots are free once its step is gone."""
        trial.ended_at = trial.ended_at or time.monotonic()
        self._longest_s = max(self._longest_s, exits_s)
        self._allocations.has_served()
        if not gone and time.monotonic() - trial.ended_at > LEAVING_S:
            allocation.directory.cancel(trial.step).touch()
        return JobState.ENDED if gone else JobState.RUNNING

    def _ended_with(self, trial: _Trial, facts: JobFacts, is_complete: bool) -> JobState:
        """Return the state of a trial that ended with its allocation, and record why."""
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

    # ------------------------------------------------------------------ placing trials in allocations

    def _place(self, trial: _Trial) -> None:
        """Order the trial's step if its allocation runs, is large enough, and lasts long enough."""
        ready = self._allocations.ready(hold_of(trial.handle.slots))
        if ready is None:
            return
        allocation, holder, facts = ready
        if self._suits(trial, allocation, holder, facts):
            self._order(trial, allocation, holder)
        elif not any(other.allocation is allocation for other in self._trials.values()):
            self._allocations.release(allocation)  # if that fails, the next look tries again

    def _suits(self, trial: _Trial, allocation: Allocation, holder: Holder, facts: JobFacts) -> bool:
        """True if the trial fits into the allocation's nodes and its remaining time.

        An allocation in which nothing ran yet lasts long enough for any trial: no other would last longer.
        """
        if max(nodes_of(trial.handle.slots)) >= len(holder.hosts):  # from a start with more, smaller ones
            return False
        if facts.limit_s is None or allocation.ordered == 0:
            return True
        return facts.limit_s - facts.used_s >= needed_s(self.site, trial.spec, self._longest_s)

    def _order(self, trial: _Trial, allocation: Allocation, holder: Holder) -> None:
        attempt = trial.handle.attempt
        hosts = [holder.hosts[node] for node in nodes_of(trial.handle.slots)]
        command = step_command(self.site, trial.spec, attempt, holder.job_id, hosts)
        asked_at = time.time() - (time.monotonic() - trial.handle.submitted_at)
        submission = Submission(cluster=NAME, job_id=allocation.job_id, submitted_at=asked_at)
        write_atomic(attempt.submission, dump(submission))
        order = Order(command=command, log=str(attempt.submitit.resolve() / "srun.log"))
        write_atomic(allocation.directory.order(trial.step), dump(order))
        trial.allocation, trial.ordered_at = allocation, time.monotonic()
        allocation.ordered += 1

    # ------------------------------------------------------------------ slots

    def _is_full(self) -> bool:
        return len(self._trials) + self._jobs.running >= self.parallel

    def _taken(self) -> Collection[str]:
        return {slot for trial in self._trials.values() for slot in trial.handle.slots}

    def _take(self, attempt: AttemptDir, spec: TrialSpec, slots: tuple[str, ...]) -> _Trial:
        handle = JobHandle(attempt=attempt, ranks=spec.plan.ranks, slots=slots, submitted_at=time.monotonic())
        self._trials[attempt.path] = _Trial(handle, spec)
        return self._trials[attempt.path]
