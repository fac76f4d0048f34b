"""The result of a study in a few lines: gain over the best baseline, confirmation, scaling. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from analysis.load import Study
from analysis.ranking import best, best_baseline, confirmed, winner
from analysis.row import TrialRow
from train_entry.contract import Goal, Standing, Winner
from train_entry.contract.study.goal_text import goal_number, goal_text


def headline(study: Study) -> list[str]:
    """Return the lines; a study without baselines and confirmation has none."""
    return [*_gain(study), *_confirmation(study), *_scaling(study)]


def _gain(study: Study) -> Iterator[str]:
    first = winner(study)
    said = study.winner if confirmed(study) else None
    baseline = _row(study, said.baseline) if said and said.baseline is not None else best_baseline(study.rows)
    if first is None or baseline is None:
        return
    once = "" if said else " (each measured once, not confirmed)"
    if baseline.number == first.number:
        yield f"no configuration beat the best baseline, {baseline.name}{once}"
    elif said and said.gain is not None:
        interval = ""
        if said.gain_low is not None and said.gain_high is not None:
            interval = f" ({said.confidence:.0%} interval: {said.gain_low:.2f} to {said.gain_high:.2f})"
        yield f"{_compared(study.goal, first, said.gain, baseline)}{interval}"
    elif first.objective and baseline.objective:
        gain = study.goal.gain(first.objective, baseline.objective)
        alone = once or " (the two were not repeated together)"
        yield f"{_compared(study.goal, first, gain, baseline)}{alone}"


def _compared(goal: Goal, first: TrialRow, gain: float, baseline: TrialRow) -> str:
    quality = "fast" if goal.is_maximized or goal.name == "time_to_tokens" else "good"
    times = f"{gain:.2f} times as {quality} as"
    return f"the best configuration, {first.name}, is {times} the best baseline, {baseline.name}"


def _confirmation(study: Study) -> Iterator[str]:
    first, said = confirmed(study), study.winner
    if first is None or said is None:
        return
    for standing in said.standings:
        if standing.trial == first.number:
            yield _interval(study.goal, said, standing)
    if others := _tied(said):
        rivals = f"trial{'s' if len(others) > 1 else ''} {_numbers(others)}"
        yield f"tied with {rivals} within measurement error; the winner needs less memory"
    if said.noise is not None:
        yield f"noise: repeats of one configuration vary by {said.noise:.2%} (standard deviation)"
    ahead = best(row for row in study.rows if row.number not in {s.trial for s in said.standings})
    if ahead is not None and first.score is not None and (ahead.score or first.score) > first.score:
        rival = f"trial {first.number:04d}"
        yield f"not confirmed: {ahead.name} beat {rival} when each was measured once, but was not repeated"


def _interval(goal: Goal, said: Winner, standing: Standing) -> str:
    low, high = sorted((standing.low, standing.high))
    within = f"{said.confidence:.0%} interval: {goal_number(goal, low)} to {goal_number(goal, high)}"
    source = "1 repeat" if standing.repeats == 1 else f"mean of {standing.repeats} repeats"
    reached = goal_text(goal, standing.value)
    return f"confirmed: trial {standing.trial:04d} reaches {reached} ({source}; {within})"


def _tied(said: Winner) -> list[int]:
    """Return the trials that the measurements cannot tell apart from the winner."""
    leader = [said.standings[0].trial] if said.standings else []
    return [number for number in dict.fromkeys((*leader, *said.tied)) if number != said.trial]


def _scaling(study: Study) -> Iterator[str]:
    """Compare the winner's speed per GPU with that of a plan on fewer ranks."""
    first = winner(study)
    single_gpu = _single_gpu_baseline(study.rows)
    speed = _speed(first)
    alone = _speed(single_gpu)
    if first is None or single_gpu is None or not speed or not alone or first.ranks == single_gpu.ranks:
        return
    ranks = "1 rank" if single_gpu.ranks == 1 else f"{single_gpu.ranks} ranks"
    yield (
        f"scaling efficiency: {speed / alone:.1%} (tokens/s/GPU of trial {first.number:04d} on "
        f"{first.ranks} ranks / that of {single_gpu.name} on {ranks})"
    )


def _single_gpu_baseline(rows: Iterable[TrialRow]) -> TrialRow | None:
    """Return the fastest of the single-GPU baselines on the fewest ranks."""
    found = [row for row in rows if row.is_single_gpu and row.tokens_per_s_per_gpu]
    return min(found, key=lambda row: (row.ranks or 0, -(_speed(row) or 0.0)), default=None)


def _speed(row: TrialRow | None) -> float | None:
    """Return tokens/s/GPU, corrected for the machine's drift."""
    speed = row.tokens_per_s_per_gpu if row else None
    return speed / row.drift if row and speed else None


def _row(study: Study, number: int) -> TrialRow | None:
    return next((row for row in study.rows if row.number == number and row.can_win), None)


def _numbers(numbers: Iterable[int]) -> str:
    return ", ".join(f"{number:04d}" for number in numbers)
