"""Compute what MLflow shows of a trial's part in the search: values of the goals, and the winner. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from train_entry.contract import Goal, Measurement, Scalar, StudyRecord, Trial, Winner, undrifted
from train_entry.contract.study.goals import MAXIMIZED

SPEED = "tokens_per_s_per_gpu"
# The metrics that hold the values of these goals; other goals have a metric of their own name.
_METRICS = {"time_to_tokens": "time_to_tokens_s", "peak_bytes": "peak_gib"}
_OF_THEIR_OWN = ("time_to_tokens", "cost")  # goals whose values no other metric holds


def goal_metric(goal: Goal) -> str:
    """Return the metric that holds a goal's values."""
    return _METRICS.get(goal.name, goal.name)


def lead_metrics(study: StudyRecord) -> tuple[str, ...]:
    """Return the first columns: the goals, the most important first, and in any case the speed."""
    found = dict.fromkeys(goal_metric(goal) for goal in study.goals)
    speeds = {} if any(name in found for name in MAXIMIZED) else {SPEED: None}
    return tuple(found | speeds)


def search_metrics(
    trial: Trial, goals: Sequence[Goal], winner: Winner | None, drift: float
) -> Iterator[tuple[str, float]]:
    """Yield drift-corrected goals, the state of the GPUs, confirmed values, and the winner's gain."""
    for goal in goals:
        if goal.name in _OF_THEIR_OWN and isinstance(trial.outcome, Measurement):
            value = undrifted(goal, goal.value(trial.outcome), drift)
            yield from () if value is None else ((goal_metric(goal), value),)
    if isinstance(trial.outcome, Measurement):
        yield from _machine(trial.outcome, drift)
    for standing in winner.standings if winner else ():
        if standing.trial == trial.number:
            yield "confirmed", standing.value
            yield "confirmed_low", standing.low
            yield "confirmed_high", standing.high
    if winner is not None and winner.trial == trial.number:
        gains = {"gain": winner.gain, "gain_low": winner.gain_low, "gain_high": winner.gain_high}
        yield from ((f"{name}_over_best_baseline", gain) for name, gain in gains.items() if gain is not None)


def _machine(seen: Measurement, drift: float) -> Iterator[tuple[str, float]]:
    if drift != 1.0:
        yield "drift", drift
    if seen.spared_steps:
        yield "spared_steps", seen.spared_steps
    cards = [rank.health for rank in seen.ranks if rank.health is not None]
    if cards:
        yield "clock_mhz", min(card.clock_mhz for card in cards)
        yield "temperature_c", max(card.temperature_c for card in cards)


def search_tags(trial: Trial, winner: Winner | None) -> dict[str, Scalar]:
    """Return the tags of a trial's part in the search; a tag that is None is not set."""
    seen = trial.outcome if isinstance(trial.outcome, Measurement) else None
    cards = [rank.health for rank in seen.ranks if rank.health is not None] if seen else []
    throttled = sorted({reason for card in cards for reason in card.throttled})
    has_won = winner is not None and winner.trial == trial.number
    return {
        "baseline": trial.baseline,
        "single_gpu": "for comparison only" if trial.is_single_gpu else None,
        "ended": seen.ended.value if seen else None,
        "throttled": " ".join(throttled) or None,
        "winner": "confirmed" if has_won else None,
        "headline": _headline(winner) if has_won and winner is not None else None,
    }


def _headline(winner: Winner) -> str | None:
    if winner.baseline == winner.trial:
        return "no configuration beat this one, the best baseline"
    if winner.gain is None or winner.baseline is None:
        return None
    interval = ""
    if winner.gain_low is not None and winner.gain_high is not None:
        interval = f" ({winner.confidence:.0%}: {winner.gain_low:.2f} to {winner.gain_high:.2f})"
    better = "" if winner.goal in MAXIMIZED else " better than"
    return f"{winner.gain:.2f} times{better} the best baseline, trial {winner.baseline:04d}{interval}"
