"""Decide what a closed trial means, for its retry and for the sampler. Pure; covers every kind of failure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from sweeps.space.dimensions import Point
from train_entry.contract import (
    INFEASIBLE,
    Failure,
    FailureKind,
    Goal,
    Measurement,
    State,
    TimingEnd,
    Trial,
)


class Verdict(StrEnum):
    """The reaction to a failure."""

    LEARN = "learn"  # the failure tells about the plan: the sampler hears of it
    RETRY = "retry"  # it tells nothing about the plan: a new attempt while retries are left; then drop
    DROP = "drop"  # the plan may be at fault or not: kept on record, not told to the sampler


VERDICTS: dict[FailureKind, Verdict] = {
    FailureKind.INFEASIBLE: Verdict.LEARN,
    FailureKind.GPU_OOM: Verdict.LEARN,
    FailureKind.HOST_OOM: Verdict.LEARN,
    FailureKind.DIVERGED: Verdict.LEARN,
    FailureKind.TIMED_OUT: Verdict.LEARN,
    FailureKind.BAD_CONFIG: Verdict.DROP,
    FailureKind.HUNG: Verdict.DROP,
    FailureKind.CRASHED: Verdict.DROP,
    FailureKind.PEER_LOST: Verdict.RETRY,
    FailureKind.PREEMPTED: Verdict.RETRY,
    FailureKind.NODE_LOST: Verdict.RETRY,
    FailureKind.COMMS: Verdict.RETRY,
    FailureKind.CANCELLED: Verdict.RETRY,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Lesson:
    """A point and its result, as the sampler hears of them.

    A constraint holds where it is zero or less. Each lesson carries all constraints: samplers compare trials
    constraint by constraint, and refuse differing sets.
    """

    point: Point
    scores: tuple[float, ...] | None  # one per goal, larger is better; None: as bad as the worst seen
    legal: float
    memory: float
    trained: float  # holds if it ran, in time, to a finite loss
    is_pruned: bool = False  # it fell behind others at the same step, and was ended


HOLDS, BROKEN = -1.0, 1.0
LEAST = 0.01  # least size of a constraint that a run has decided, whatever the estimate says


def lesson(trial: Trial, goals: Sequence[Goal]) -> Lesson | None:
    """Return what a closed trial teaches; None: the sampler must not hear of it."""
    point, outcome = dict(trial.values), trial.outcome
    if trial.state is State.REJECTED:
        return Lesson(point=point, scores=None, legal=BROKEN, memory=HOLDS, trained=HOLDS)
    if isinstance(outcome, Measurement):
        return Lesson(
            point=point,
            scores=_scores(outcome, goals),
            legal=HOLDS,
            memory=min(-LEAST, _excess(trial, HOLDS)),
            trained=HOLDS,
            is_pruned=outcome.ended is TimingEnd.ASKED,
        )
    if not isinstance(outcome, Failure) or VERDICTS[outcome.kind] is not Verdict.LEARN:
        return None
    fits = outcome.kind not in INFEASIBLE
    return Lesson(
        point=point,
        scores=None,
        legal=HOLDS,
        memory=min(-LEAST, _excess(trial, HOLDS)) if fits else max(LEAST, _excess(trial, BROKEN)),
        trained=BROKEN if fits else HOLDS,
    )


def _scores(seen: Measurement, goals: Sequence[Goal]) -> tuple[float, ...] | None:
    values = [goal.value(seen) for goal in goals]
    scores = [goal.score(value) for goal, value in zip(goals, values, strict=True) if value is not None]
    return tuple(scores) if len(scores) == len(goals) else None


def _excess(trial: Trial, otherwise: float) -> float:
    """Return the share by which the plan needs more than there is; `otherwise` without an estimate."""
    return trial.estimate.excess if trial.estimate else otherwise
