"""What a study came to: the gain over the best baseline, the winner's interval, how it scales. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from analysis.load import Study
from analysis.ranking import best, best_baseline, confirmed, winner
from analysis.row import TrialRow
from train_entry.contract import Goal, Standing, Winner
from train_entry.contract.study.goal_text import goal_number, goal_text


def headline(study: Study) -> list[str]:
    """Best against the best baseline first; nothing of a study without baselines and confirmation."""
    return [*_gain(study), *_confirmation(study), *_scaling(study)]


def _gain(study: Study) -> Iterator[str]:
    first = winner(study)
    said = study.winner if confirmed(study) else None
    baseline = _row(study, said.baseline) if said and said.baseline is not None else best_baseline(study.rows)
    if first is None or baseline is None:
        return
    once = "" if said else " (each measured once, not confirmed)"
    if baseline.number == first.number:
        yield f"best against the best baseline: none is better than that baseline, {baseline.name}{once}"
    elif said and said.gain is not None:
        interval = ""
        if said.gain_low is not None and said.gain_high is not None:
            interval = f" ({said.confidence:.0%}: {said.gain_low:.2f} to {said.gain_high:.2f})"
        yield f"best against the best baseline: {_times(study.goal, said.gain)} {baseline.name}{interval}"
    elif first.objective and baseline.objective:
        gain = study.goal.gain(first.objective, baseline.objective)
        alone = once or " (not measured again together)"
        yield f"best against the best baseline: {_times(study.goal, gain)} {baseline.name}{alone}"


def _times(goal: Goal, gain: float) -> str:
    return f"{gain:.2f} times" if goal.is_maximized else f"{gain:.2f} times better than"


def _confirmation(study: Study) -> Iterator[str]:
    first, said = confirmed(study), study.winner
    if first is None or said is None:
        return
    for standing in said.standings:
        if standing.trial == first.number:
            yield _interval(study.goal, said, standing)
    if others := _tied(said):
        rival = f"trial {_numbers(others)}"
        yield f"cannot be told apart from {rival}: the one that needs less memory was preferred"
    if said.noise is not None:
        yield f"noise: one measurement in fresh processes varies by {said.noise:.2%} (standard deviation)"
    ahead = best(row for row in study.rows if row.number not in {s.trial for s in said.standings})
    if ahead is not None and first.score is not None and (ahead.score or first.score) > first.score:
        yield f"not confirmed: {ahead.name}, which was ahead of trial {first.number:04d}, each measured once"


def _interval(goal: Goal, said: Winner, standing: Standing) -> str:
    low, high = sorted((standing.low, standing.high))
    within = f"{said.confidence:.0%}: {goal_number(goal, low)} to {goal_number(goal, high)}"
    again = "1 repeat" if standing.repeats == 1 else f"{standing.repeats} repeats"
    return f"confirmed: trial {standing.trial:04d} at {goal_text(goal, standing.value)} ({within}; {again})"


def _tied(said: Winner) -> list[int]:
    """Trials that are as good as the winner, as far as one can tell."""
    leader = [said.standings[0].trial] if said.standings else []
    return [number for number in dict.fromkeys((*leader, *said.tied)) if number != said.trial]


def _scaling(study: Study) -> Iterator[str]:
    """Of the winner, against a plan on fewer ranks."""
    first = winner(study)
    single_gpu = _single_gpu_baseline(study.rows)
    speed = _speed(first)
    alone = _speed(single_gpu)
    if first is None or single_gpu is None or not speed or not alone or first.ranks == single_gpu.ranks:
        return
    ranks = "1 rank" if single_gpu.ranks == 1 else f"{single_gpu.ranks} ranks"
    yield (
        f"scaling efficiency: {speed / alone:.1%}, the tokens/s/GPU of trial {first.number:04d} "
        f"on {first.ranks} ranks over those of {single_gpu.name} on {ranks}"
    )


def _single_gpu_baseline(rows: Iterable[TrialRow]) -> TrialRow | None:
    """The fastest of those on the fewest ranks."""
    found = [row for row in rows if row.is_single_gpu and row.tokens_per_s_per_gpu]
    return min(found, key=lambda row: (row.ranks or 0, -(_speed(row) or 0.0)), default=None)


def _speed(row: TrialRow | None) -> float | None:
    """tokens/s/GPU on the machine as it was at first."""
    speed = row.tokens_per_s_per_gpu if row else None
    return speed / row.drift if row and speed else None


def _row(study: Study, number: int) -> TrialRow | None:
    return next((row for row in study.rows if row.number == number and row.can_win), None)


def _numbers(numbers: Iterable[int]) -> str:
    return ", ".join(f"{number:04d}" for number in numbers)
