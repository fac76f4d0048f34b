"""The running jobs of a study: submit an attempt, find it again, or cancel it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from sweeps.cluster.base import Cluster, JobHandle, JobState, share_a_node
from sweeps.plan.ds_config import ds_config_text
from sweeps.plan.planner import Planner
from sweeps.search.gate import Gate
from sweeps.study.ledger import Ledger
from train_entry.contract import Attempt, Trial


@dataclass(kw_only=True)
class Jobs:
    """The running jobs, at most one per trial."""

    cluster: Cluster
    ledger: Ledger
    planner: Planner
    gate: Gate
    running: dict[int, JobHandle] = field(default_factory=dict)  # by trial number

    def submit(self, trial: Trial, attempt: Attempt, beat_step_s: float | None) -> None:
        """Launch an attempt that is on record.

        Its timing ends once its steps are known to be slower than `beat_step_s`.
        """
        spec = self.planner.spec(trial, attempt.number, attempt.kind)
        spec = dataclasses.replace(
            spec,
            measure=dataclasses.replace(spec.measure, beat_step_s=beat_step_s),
            memory_limit_bytes=self.gate.memory_limit_bytes(trial),
        )
        directory = self.ledger.open_attempt(spec, ds_config_text(spec.plan))
        self.running[trial.number] = self.cluster.submit(directory, spec, attempt.slots)

    def was_submitted(self, trial: Trial, attempt: Attempt) -> bool:
        """True if a job may exist: submitit writes to its folder before it starts a job."""
        directory = self.ledger.attempt(trial.number, attempt.number)
        return directory.spec.exists() and directory.submitit.exists()

    def attach(self, trial: Trial, attempt: Attempt) -> None:
        """Watch a job that an earlier start submitted."""
        directory = self.ledger.attempt(trial.number, attempt.number)
        ranks = trial.plan.ranks if trial.plan else 1
        self.running[trial.number] = self.cluster.attach(directory, ranks, attempt.slots)

    def ended(self) -> list[tuple[int, JobHandle]]:
        """Return the jobs that have ended since the last call, with their trials' numbers."""
        over = [
            (number, handle)
            for number, handle in self.running.items()
            if self.cluster.poll(handle) in (JobState.ENDED, JobState.LOST)
        ]
        for number, _ in over:
            del self.running[number]
        return over

    def cancel_all(self) -> tuple[list[tuple[int, JobHandle]], list[str]]:
        """Cancel all jobs. Return them, and a line for each that may still exist."""
        over = list(self.running.items())
        problems = self.cluster.cancel(*self.running.values())
        self.running.clear()
        return over, problems

    def beside(self, slots: tuple[str, ...]) -> list[int]:
        """Return this study's trials that run on a node of these slots."""
        return [number for number, job in self.running.items() if share_a_node(job.slots, slots)]
