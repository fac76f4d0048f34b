"""Estimate the machine's drift in speed from one trial that is measured again now and then. Pure."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence

from train_entry.contract.job.results import Measurement
from train_entry.contract.shared.words import Origin, Purpose, State
from train_entry.contract.study.goals import Goal
from train_entry.contract.study.trial import Attempt, Trial

NOISE = 0.005  # assumed relative error of a measurement that reports none
BEYOND = 3.0  # a change counts as drift if it exceeds this many times the noise
Mark = tuple[float, float]  # time of day, and the machine's speed at that time over its initial speed


def drifts_of(trials: Iterable[Trial], goal: Goal, reference: Trial | None) -> Mapping[int, float]:
    """Map each measured trial's number to the machine's speed at that time over its initial speed.

    The ratio is 1 while all changes are within noise. `reference` is the best baseline: it is used if no
    trial has a drift repeat yet.
    """
    known = list(trials)
    found = reference_of(known, reference)
    marks = _marks(found) if found is not None and goal.is_speed else []
    if found is None or not _is_beyond_noise(marks, _noise(found)):
        marks = []
    measured = (trial for trial in known if isinstance(trial.outcome, Measurement) and trial.closed_at)
    return {trial.number: round(_at(marks, trial.closed_at or 0.0), 4) for trial in measured}


def due(trials: Iterable[Trial], goal: Goal, best_baseline: Trial | None, every: int) -> Trial | None:
    """Return the trial to measure again now to detect drift, or None if that is not due yet.

    It is due when `every` trials were launched and closed since the reference trial was last measured.
    """
    known = list(trials)
    reference = reference_of(known, best_baseline)
    if not every or reference is None or not goal.is_speed:
        return None
    if any(repeat.is_running for repeat in reference.repeats):
        return None
    since = max((look.ended_at or 0.0 for look in looks_of(reference)), default=reference.closed_at or 0.0)
    later = [
        trial
        for trial in known
        if trial.is_launched and trial.origin is not Origin.USER and (trial.closed_at or 0.0) > since
    ]
    return reference if len(later) >= every else None


def reference_of(trials: Iterable[Trial], best_baseline: Trial | None) -> Trial | None:
    """The trial that already has drift repeats, or else the best baseline."""
    before = (trial for trial in trials if looks_of(trial) and trial.state is State.MEASURED)
    return next(before, None) or best_baseline


def looks_of(trial: Trial) -> list[Attempt]:
    return [repeat for repeat in trial.repeats if repeat.purpose is Purpose.DRIFT]


def _marks(reference: Trial) -> list[Mark]:
    first = reference.outcome
    if not isinstance(first, Measurement) or reference.closed_at is None:
        return []
    marks = [(reference.closed_at, 1.0)]
    for look in looks_of(reference):
        if isinstance(look.outcome, Measurement) and look.ended_at is not None:
            marks.append((look.ended_at, first.step_s / look.outcome.step_s))
    return sorted(marks)


def _noise(reference: Trial) -> float:
    """The relative error of one measurement: the largest that any measurement of the reference reports."""
    outcomes = [reference.outcome, *(look.outcome for look in looks_of(reference))]
    errors = [seen.relative_error for seen in outcomes if isinstance(seen, Measurement)]
    return max((error if error is not None else NOISE for error in errors), default=NOISE)


def _is_beyond_noise(marks: Sequence[Mark], noise: float) -> bool:
    return any(abs(speed - 1) > BEYOND * noise for _, speed in marks)


def _at(marks: Sequence[Mark], when: float) -> float:
    """Interpolate the speed linearly between marks. Before the first and after the last it is constant."""
    if not marks:
        return 1.0
    index = bisect.bisect(marks, (when, float("inf")))
    if index in (0, len(marks)):
        return marks[min(index, len(marks) - 1)][1]
    (begin, before), (end, after) = marks[index - 1], marks[index]
    return before + (after - before) * (when - begin) / max(end - begin, 1e-9)
