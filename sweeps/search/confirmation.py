"""Confirm the best trials: measure them again, round by round, and name the winner. Pure.

The largest of many noisy values is too large. So the winner and its interval come from repeats alone: each
round measures every trial that may still win once, in a fresh process, alone on the machine. Trials are
compared within a round, so an effect that a whole round shares (a warmer machine) cancels.

The first measurements often help to tell how much repeats scatter. So an interval is the narrower of two, one
with the first measurements and one without, each at half of the permitted error. First measurements were
selected for being large, and the machine may have changed since; both only make them scatter more.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from sweeps.config.schema import ConfirmConfig
from sweeps.search.students_t import quantile
from train_entry.contract import Attempt, Goal, Measurement, Purpose, Ranking, Standing, State, Trial, Winner

LEAST_NOISE = 1e-4  # of one repeat: the interval does not vanish where two repeats happen to agree


@dataclass(frozen=True, kw_only=True, slots=True)
class Rounds:
    """Logarithms of the goal's gain: one row per trial, one column per round that all of them took."""

    trials: tuple[Trial, ...]
    rows: tuple[tuple[float, ...], ...]
    firsts: tuple[float, ...]  # the first measurement of each trial

    @property
    def count(self) -> int:
        return len(self.rows[0]) if self.rows else 0

    @property
    def means(self) -> list[float]:
        return [fmean(row) for row in self.rows]

    @property
    def noise(self) -> float:
        """Standard deviation of one repeat, without the effect that its round shares."""
        return _noise_of(self.rows)

    def reach(self, tail: float) -> float:
        """Half-width of a mean's interval that misses the truth with probability `tail` on either side."""
        with_firsts = [(first, *row) for first, row in zip(self.firsts, self.rows, strict=True)]
        tables = (self.rows, with_firsts) if self.count > 1 else (with_firsts,)
        widths = [quantile(1 - tail / len(tables), _freedom(rows)) * _noise_of(rows) for rows in tables]
        return min(widths) / math.sqrt(self.count)


def _freedom(rows: Sequence[Sequence[float]]) -> int:
    """Degrees of freedom of the noise: two-way analysis of variance without replication."""
    return (max(2, len(rows)) - 1) * (len(rows[0]) - 1)


def _noise_of(rows: Sequence[Sequence[float]]) -> float:
    """Standard deviation of one value, without the effects of its trial and of its round."""
    if not rows or len(rows[0]) < 2:
        return math.nan
    rounds = [fmean(column) if len(rows) > 1 else 0.0 for column in zip(*rows, strict=True)]
    squares = 0.0
    for row in rows:
        left = [value - common for value, common in zip(row, rounds, strict=True)]
        squares += sum((value - fmean(left)) ** 2 for value in left)
    return max(LEAST_NOISE, math.sqrt(squares / _freedom(rows)))


def to_confirm(trials: Iterable[Trial], goal: Goal, config: ConfirmConfig) -> list[Trial]:
    """Return the trials close to the best, and the best baseline.

    There are none where confirmation is off, or where the goal is not a speed.
    """
    if config.best == 0 or not goal.is_speed:
        return []
    ranking = Ranking(trials, goal)
    ranked = ranking.contenders
    if not ranked:
        return []
    first, leader = ranked[0]
    near = 1 - max(config.within, 2 * _noise(leader))  # on a noisy machine the runner-up may be better
    chosen = [trial for value, trial in ranked[: config.best] if goal.gain(value, first) >= near]
    baseline = ranking.best_baseline
    if baseline is not None and baseline.number not in {trial.number for trial in chosen}:
        chosen.append(baseline)
    return chosen


def next_repeat(trials: Iterable[Trial], goal: Goal, config: ConfirmConfig) -> tuple[Trial, int] | None:
    """Return the trial to measure again and the round it belongs to; None: the confirmation is over."""
    known = list(trials)
    ranking = Ranking(known, goal)
    chosen = _sound(to_confirm(known, goal, config))
    for number in range(1, config.rounds + 1):
        if number > 2:
            chosen = _in_question(chosen, ranking, config, number - 1)
        waiting = [trial for trial in chosen if _of_round(trial, number) is None]
        if waiting:
            return waiting[0], number
    return None


def _noise(trial: Trial) -> float:
    """Return the relative error of the trial's own measurement; 0 where it states none."""
    seen = trial.outcome
    return (seen.relative_error or 0.0) if isinstance(seen, Measurement) else 0.0


def _in_question(
    chosen: Sequence[Trial], ranking: Ranking, config: ConfirmConfig, rounds: int
) -> list[Trial]:
    """Return the trials that may still be the best after so many rounds; none where the best is known.

    A trial that is the only one goes on until its value is known as exactly as `within`.
    """
    table = rounds_of(chosen, ranking, rounds)
    if table.count < rounds:
        return []
    left = _tied(table, config)
    is_vague = len(chosen) == 1 and _reach(table, config) > config.within
    return left if len(left) > 1 or is_vague else []


def conclude(trials: Iterable[Trial], goal: Goal, config: ConfirmConfig) -> Winner | None:
    """Return the winner and by how much it won; None: there are too few repeats to tell."""
    ranking = Ranking(trials, goal)
    chosen = _sound(to_confirm(ranking.trials, goal, config))
    taken = [len(_values(trial, goal)) for trial in chosen]
    if min(taken, default=0) < 2:
        return None
    full, longest = rounds_of(chosen, ranking, min(taken)), max(taken)
    last = [trial for trial in chosen if len(_values(trial, goal)) == longest]
    table = rounds_of(last, ranking, longest) if len(last) > 1 else full
    tied = _tied(table, config)
    leader = table.trials[max(range(len(table.rows)), key=lambda index: table.means[index])]
    winner = min(tied, key=lambda trial: (_peak_bytes(trial), trial.number)) if len(tied) > 1 else leader
    standings = [_standing(trial, goal, full, config) for trial in chosen]
    baseline = ranking.best_baseline
    gain, low, high = _gain(winner, baseline, goal, full, config)
    return Winner(
        goal=goal.name,
        trial=winner.number,
        confidence=config.confidence,
        standings=tuple(sorted(standings, key=lambda found: -goal.score(found.value))),
        tied=tuple(trial.number for trial in tied if trial.number != winner.number),
        noise=full.noise,
        baseline=baseline.number if baseline else None,
        gain=gain,
        gain_low=low,
        gain_high=high,
    )


def rounds_of(chosen: Sequence[Trial], ranking: Ranking, rounds: int) -> Rounds:
    """Return the table of the first `rounds` rounds; empty where a trial has not taken all of them."""
    goal = ranking.goal
    values = [_values(trial, goal)[:rounds] for trial in chosen]
    if not values or any(len(row) < rounds for row in values):
        return Rounds(trials=(), rows=(), firsts=())
    return Rounds(
        trials=tuple(chosen),
        rows=tuple(tuple(math.log(goal.gain(value, 1.0)) for value in row) for row in values),
        firsts=tuple(math.log(goal.gain(ranking.value(trial) or 1.0, 1.0)) for trial in chosen),
    )


def _tied(table: Rounds, config: ConfirmConfig) -> list[Trial]:
    """Return the trials that cannot be told apart from the best.

    Each comparison gets an equal share of the permitted error.
    """
    comparisons = max(1, len(table.rows) - 1) * max(1, config.rounds - 1)
    reach = _reach(table, config, comparisons) * math.sqrt(2)
    best = max(table.means)
    return [trial for trial, mean in zip(table.trials, table.means, strict=True) if best - mean <= reach]


def _reach(table: Rounds, config: ConfirmConfig, comparisons: int = 1) -> float:
    """Half-width of a mean's interval."""
    return table.reach((1 - config.confidence) / comparisons / 2)


def _standing(trial: Trial, goal: Goal, table: Rounds, config: ConfirmConfig) -> Standing:
    values = _values(trial, goal)
    mean = fmean(math.log(goal.gain(value, 1.0)) for value in values)
    reach = _reach(table, config) * math.sqrt(table.count / len(values))
    ends = sorted(_back(goal, mean + end) for end in (-reach, reach))
    return Standing(
        trial=trial.number, value=_back(goal, mean), low=ends[0], high=ends[1], repeats=len(values)
    )


def _back(goal: Goal, logarithm: float) -> float:
    """Return the goal's value whose gain over 1 has this logarithm."""
    return math.exp(logarithm if goal.is_maximized else -logarithm)


def _gain(
    winner: Trial, baseline: Trial | None, goal: Goal, table: Rounds, config: ConfirmConfig
) -> tuple[float | None, float | None, float | None]:
    """Return the winner's gain over the best baseline and its interval; None where they share no round."""
    numbers = [trial.number for trial in table.trials]
    if baseline is None or baseline.number not in numbers or winner.number not in numbers:
        return None, None, None
    if baseline.number == winner.number:
        return 1.0, 1.0, 1.0
    gain = table.means[numbers.index(winner.number)] - table.means[numbers.index(baseline.number)]
    reach = _reach(table, config) * math.sqrt(2)
    return math.exp(gain), math.exp(gain - reach), math.exp(gain + reach)


def _sound(chosen: Sequence[Trial]) -> list[Trial]:
    """Leave out trials with a failed repeat: a plan that runs only sometimes cannot win."""
    return [
        trial
        for trial in chosen
        if trial.state is State.MEASURED
        and not any(
            repeat.outcome is not None and not isinstance(repeat.outcome, Measurement)
            for repeat in _repeats(trial)
        )
    ]


def _repeats(trial: Trial) -> list[Attempt]:
    return [repeat for repeat in trial.repeats if repeat.purpose is Purpose.CONFIRM]


def _of_round(trial: Trial, number: int) -> Attempt | None:
    return next((repeat for repeat in _repeats(trial) if repeat.round == number), None)


def _values(trial: Trial, goal: Goal) -> list[float]:
    """Return the goal's values of the trial's repeats, in the order of their rounds."""
    repeats = sorted(_repeats(trial), key=lambda repeat: repeat.round)
    found = [goal.value(repeat.outcome) for repeat in repeats if isinstance(repeat.outcome, Measurement)]
    return [value for value in found if value is not None and value > 0]


def _peak_bytes(trial: Trial) -> int:
    return trial.outcome.peak_bytes if isinstance(trial.outcome, Measurement) else 0
