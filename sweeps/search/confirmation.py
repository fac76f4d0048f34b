"""The last word: the best trials measured again by turns, and who of them is the winner. Pure.

Of many noisy values the largest is too large. So the winner and its interval come from repeats alone: each
turn measures every trial that is still in question once, in a fresh process, alone on the machine. What a
turn has in common (a warmer machine) does not count, since trials are compared within it.

How much repeats scatter is often known better with the first measurements beside them: so an interval is the
narrower of two, with them and without, each of which may be wrong half as often. That the first ones were
chosen for being large does no harm: it makes them scatter more, as does whatever has changed since then.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from sweeps.config.schema import ConfirmConfig
from sweeps.search.ranking import best_rung, contenders, value_of
from sweeps.search.students_t import quantile
from train_entry.contract import Goal, Measurement, Purpose, Repeat, Standing, State, Trial, Winner

LEAST_NOISE = 1e-4  # of a repeat: two that happen to agree do not make the interval vanish


@dataclass(frozen=True, kw_only=True, slots=True)
class Turns:
    """Logarithms of the goal's gain, a row for each trial, a column for each turn that all of them took."""

    trials: tuple[Trial, ...]
    rows: tuple[tuple[float, ...], ...]
    firsts: tuple[float, ...]  # of each trial what was measured before all turns

    @property
    def count(self) -> int:
        return len(self.rows[0]) if self.rows else 0

    @property
    def means(self) -> list[float]:
        return [fmean(row) for row in self.rows]

    @property
    def noise(self) -> float:
        """Standard deviation of one repeat, its turn's common part taken out."""
        return _noise_of(self.rows)

    def reach(self, tail: float) -> float:
        """Half-width of a mean's interval that leaves out the truth so often on either side."""
        with_firsts = [(first, *row) for first, row in zip(self.firsts, self.rows, strict=True)]
        tables = (self.rows, with_firsts) if self.count > 1 else (with_firsts,)
        widths = [quantile(1 - tail / len(tables), _freedom(rows)) * _noise_of(rows) for rows in tables]
        return min(widths) / math.sqrt(self.count)


def _freedom(rows: Sequence[Sequence[float]]) -> int:
    """Degrees of freedom of the noise: two-way analysis of variance without repetition."""
    return (max(2, len(rows)) - 1) * (len(rows[0]) - 1)


def _noise_of(rows: Sequence[Sequence[float]]) -> float:
    """Standard deviation of one value, what its trial and its turn have in common taken out."""
    if not rows or len(rows[0]) < 2:
        return math.nan
    turns = [fmean(column) if len(rows) > 1 else 0.0 for column in zip(*rows, strict=True)]
    squares = 0.0
    for row in rows:
        left = [value - turn for value, turn in zip(row, turns, strict=True)]
        squares += sum((value - fmean(left)) ** 2 for value in left)
    return max(LEAST_NOISE, math.sqrt(squares / _freedom(rows)))


def to_confirm(trials: Iterable[Trial], goal: Goal, config: ConfirmConfig) -> list[Trial]:
    """The best that are close to the best, and the best rung; none where confirming says nothing new."""
    if config.best == 0 or not goal.is_speed:
        return []
    known = list(trials)
    ranked = contenders(known, goal)
    if not ranked:
        return []
    first, leader = ranked[0]
    near = 1 - max(config.within, 2 * _noise(leader))  # on a noisy machine the next may as well be better
    chosen = [trial for value, trial in ranked[: config.best] if goal.gain(value, first) >= near]
    rung = best_rung(known, goal)
    if rung is not None and rung.number not in {trial.number for trial in chosen}:
        chosen.append(rung)
    return chosen


def next_repeat(trials: Iterable[Trial], goal: Goal, config: ConfirmConfig) -> tuple[Trial, int] | None:
    """The trial to measure again and the turn it belongs to; None: the confirmation is over."""
    known = list(trials)
    chosen = _sound(to_confirm(known, goal, config))
    for turn in range(1, config.rounds + 1):
        if turn > 2:
            chosen = _in_question(chosen, goal, config, turn - 1)
        waiting = [trial for trial in chosen if _of_turn(trial, turn) is None]
        if waiting:
            return waiting[0], turn
    return None


def _noise(trial: Trial) -> float:
    """Of its own measurement, as a share; 0 where it does not say."""
    seen = trial.outcome
    return (seen.relative_error or 0.0) if isinstance(seen, Measurement) else 0.0


def _in_question(chosen: Sequence[Trial], goal: Goal, config: ConfirmConfig, turns: int) -> list[Trial]:
    """Who may still be the best after so many turns; nobody where that is known.

    Whoever is alone goes on while its value is known less exactly than to `within`.
    """
    table = turns_of(chosen, goal, turns)
    if table.count < turns:
        return []
    left = _tied(table, config)
    is_vague = len(chosen) == 1 and _reach(table, config) > config.within
    return left if len(left) > 1 or is_vague else []


def conclude(trials: Iterable[Trial], goal: Goal, config: ConfirmConfig) -> Winner | None:
    """Who has won, and by how much; None: too few repeats to say."""
    known = list(trials)
    chosen = _sound(to_confirm(known, goal, config))
    taken = [len(_values(trial, goal)) for trial in chosen]
    if min(taken, default=0) < 2:
        return None
    full, longest = turns_of(chosen, goal, min(taken)), max(taken)
    last = [trial for trial in chosen if len(_values(trial, goal)) == longest]
    table = turns_of(last, goal, longest) if len(last) > 1 else full
    tied = _tied(table, config)
    leader = table.trials[max(range(len(table.rows)), key=lambda index: table.means[index])]
    winner = min(tied, key=lambda trial: (_peak_bytes(trial), trial.number)) if len(tied) > 1 else leader
    standings = [_standing(trial, goal, full, config) for trial in chosen]
    rung = best_rung(known, goal)
    gain, low, high = _gain(winner, rung, goal, full, config)
    return Winner(
        goal=goal.name,
        trial=winner.number,
        confidence=config.confidence,
        standings=tuple(sorted(standings, key=lambda found: -goal.score(found.value))),
        tied=tuple(trial.number for trial in tied if trial.number != winner.number),
        noise=full.noise,
        rung=rung.number if rung else None,
        gain=gain,
        gain_low=low,
        gain_high=high,
    )


def turns_of(chosen: Sequence[Trial], goal: Goal, turns: int) -> Turns:
    """The table of the first turns; empty where a trial has not taken them all."""
    values = [_values(trial, goal)[:turns] for trial in chosen]
    if not values or any(len(row) < turns for row in values):
        return Turns(trials=(), rows=(), firsts=())
    return Turns(
        trials=tuple(chosen),
        rows=tuple(tuple(math.log(goal.gain(value, 1.0)) for value in row) for row in values),
        firsts=tuple(math.log(goal.gain(value_of(trial, goal) or 1.0, 1.0)) for trial in chosen),
    )


def _tied(table: Turns, config: ConfirmConfig) -> list[Trial]:
    """Those that cannot be told apart from the best; each comparison at a share of the error allowed."""
    comparisons = max(1, len(table.rows) - 1) * max(1, config.rounds - 1)
    reach = _reach(table, config, comparisons) * math.sqrt(2)
    best = max(table.means)
    return [trial for trial, mean in zip(table.trials, table.means, strict=True) if best - mean <= reach]


def _reach(table: Turns, config: ConfirmConfig, comparisons: int = 1) -> float:
    """Half-width of a mean's interval."""
    return table.reach((1 - config.confidence) / comparisons / 2)


def _standing(trial: Trial, goal: Goal, table: Turns, config: ConfirmConfig) -> Standing:
    values = _values(trial, goal)
    mean = fmean(math.log(goal.gain(value, 1.0)) for value in values)
    reach = _reach(table, config) * math.sqrt(table.count / len(values))
    ends = sorted(_back(goal, mean + end) for end in (-reach, reach))
    return Standing(
        trial=trial.number, value=_back(goal, mean), low=ends[0], high=ends[1], repeats=len(values)
    )


def _back(goal: Goal, logarithm: float) -> float:
    """The value of which this is the logarithm of the gain over one."""
    return math.exp(logarithm if goal.is_maximized else -logarithm)


def _gain(
    winner: Trial, rung: Trial | None, goal: Goal, table: Turns, config: ConfirmConfig
) -> tuple[float | None, float | None, float | None]:
    """The winner's value over the best rung's, with its interval; nothing where they did not take turns."""
    numbers = [trial.number for trial in table.trials]
    if rung is None or rung.number not in numbers or winner.number not in numbers:
        return None, None, None
    if rung.number == winner.number:
        return 1.0, 1.0, 1.0
    gain = table.means[numbers.index(winner.number)] - table.means[numbers.index(rung.number)]
    reach = _reach(table, config) * math.sqrt(2)
    return math.exp(gain), math.exp(gain - reach), math.exp(gain + reach)


def _sound(chosen: Sequence[Trial]) -> list[Trial]:
    """Without those of which a repeat failed: a plan that runs only sometimes is no winner."""
    return [
        trial
        for trial in chosen
        if trial.state is State.MEASURED
        and not any(
            repeat.outcome is not None and not isinstance(repeat.outcome, Measurement)
            for repeat in _repeats(trial)
        )
    ]


def _repeats(trial: Trial) -> list[Repeat]:
    return [repeat for repeat in trial.repeats if repeat.purpose is Purpose.CONFIRM]


def _of_turn(trial: Trial, turn: int) -> Repeat | None:
    return next((repeat for repeat in _repeats(trial) if repeat.turn == turn), None)


def _values(trial: Trial, goal: Goal) -> list[float]:
    """Of the trial's repeats, in the order of their turns."""
    repeats = sorted(_repeats(trial), key=lambda repeat: repeat.turn)
    found = [goal.value(repeat.outcome) for repeat in repeats if isinstance(repeat.outcome, Measurement)]
    return [value for value in found if value is not None and value > 0]


def _peak_bytes(trial: Trial) -> int:
    return trial.outcome.peak_bytes if isinstance(trial.outcome, Measurement) else 0
