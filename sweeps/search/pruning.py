"""End trials whose loss falls behind that of others at the same step, as optuna's pruners judge it.

A file asks the job to end. The job looks for it between steps, ends in order, and leaves its measurement.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from sweeps.cluster.base import JobHandle
from sweeps.search.sampler import Proposal, Sampler
from train_entry.contract import Goal, StepMetrics, read_lines


class Pruning:
    """A watch on the losses of running trials."""

    def __init__(self, sampler: Sampler, goal: Goal) -> None:
        self._sampler = sampler
        self._goal = goal
        self._reported: defaultdict[int, int] = defaultdict(int)  # number of steps, by trial

    def look(self, running: Mapping[int, JobHandle], proposals: Mapping[int, Proposal]) -> list[int]:
        """Report new losses, and ask jobs that have fallen behind to end; return their trials' numbers."""
        ended = []
        for number, handle in running.items():
            proposal = proposals.get(number)
            if proposal is None or handle.attempt.stop.exists():
                continue
            if self._falls_behind(number, handle, proposal):
                handle.attempt.stop.touch()
                ended.append(number)
        return ended

    def _falls_behind(self, number: int, handle: JobHandle, proposal: Proposal) -> bool:
        steps = list(read_lines(handle.attempt.metrics, StepMetrics))
        behind = False
        for found in steps[self._reported[number] :]:
            score = self._goal.score(found.loss)
            behind = self._sampler.falls_behind(proposal, found.step, score)
        self._reported[number] = len(steps)
        return behind
