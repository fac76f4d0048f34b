"""Whether the machine has become faster or slower, by one trial that is measured now and then. Pure."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence

from sweeps.search.ranking import best_rung
from train_entry.contract import Goal, Measurement, Origin, Purpose, Repeat, State, Trial

NOISE = 0.005  # of a measurement that does not say how exact it is, as a share
BEYOND = 3.0  # times the noise: less than that is none
Mark = tuple[float, float]  # time of day, and how fast the machine was then, over how fast at first


def due(trials: Iterable[Trial], goal: Goal, every: int) -> Trial | None:
    """The trial to measure again by now, to see drift; None: not yet."""
    known = list(trials)
    reference = reference_of(known, goal)
    if not every or reference is None or not goal.is_speed:
        return None
    if any(repeat.outcome is None for repeat in reference.repeats):
        return None
    since = max((repeat.ended_at or 0.0 for repeat in _seen(reference)), default=reference.closed_at or 0.0)
    later = [
        trial
        for trial in known
        if trial.attempts and trial.origin is not Origin.USER and (trial.closed_at or 0.0) > since
    ]
    return reference if len(later) >= every else None


def reference_of(trials: Iterable[Trial], goal: Goal) -> Trial | None:
    """The one that was measured for this before; else the best rung."""
    known = list(trials)
    before = (trial for trial in known if _seen(trial) and trial.state is State.MEASURED)
    return next(before, None) or best_rung(known, goal)


def drifts(trials: Iterable[Trial], goal: Goal) -> dict[int, float]:
    """Of each measured trial: the machine's speed then, over that at first; 1 where that is noise."""
    known = list(trials)
    reference = reference_of(known, goal)
    marks = _marks(reference) if reference is not None else []
    if reference is None or not _is_beyond_noise(marks, _noise(reference)):
        marks = []
    measured = (trial for trial in known if isinstance(trial.outcome, Measurement) and trial.closed_at)
    return {trial.number: round(_at(marks, trial.closed_at or 0.0), 4) for trial in measured}


def _marks(reference: Trial) -> list[Mark]:
    first = reference.outcome
    if not isinstance(first, Measurement) or reference.closed_at is None:
        return []
    marks = [(reference.closed_at, 1.0)]
    for repeat in _seen(reference):
        if isinstance(repeat.outcome, Measurement) and repeat.ended_at is not None:
            marks.append((repeat.ended_at, first.step_s / repeat.outcome.step_s))
    return sorted(marks)


def _seen(trial: Trial) -> list[Repeat]:
    return [repeat for repeat in trial.repeats if repeat.purpose is Purpose.DRIFT]


def _noise(reference: Trial) -> float:
    """Of one measurement: the most that any of the reference's says of itself."""
    outcomes = [reference.outcome, *(repeat.outcome for repeat in _seen(reference))]
    errors = [seen.relative_error for seen in outcomes if isinstance(seen, Measurement)]
    return max((error if error is not None else NOISE for error in errors), default=NOISE)


def _is_beyond_noise(marks: Sequence[Mark], noise: float) -> bool:
    return any(abs(speed - 1) > BEYOND * noise for _, speed in marks)


def _at(marks: Sequence[Mark], when: float) -> float:
    """Between two marks on a straight line; before the first and after the last as there."""
    if not marks:
        return 1.0
    index = bisect.bisect(marks, (when, float("inf")))
    if index in (0, len(marks)):
        return marks[min(index, len(marks) - 1)][1]
    (begin, before), (end, after) = marks[index - 1], marks[index]
    return before + (after - before) * (when - begin) / max(end - begin, 1e-9)
