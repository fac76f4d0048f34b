"""Decide when a running trial is known to be slower than the best, and is ended. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from sweeps.study.limits import NOISE
from train_entry.contract import Goal, Origin, Ranking, Trial

MARGIN = 2 * NOISE  # a trial that is slower by less goes on: the confirmation may find it the best


def step_to_beat_s(trial: Trial, trials: Sequence[Trial], goals: Sequence[Goal]) -> float | None:
    """Return the step time above which the trial cannot win; None: it is measured to its end.

    It is None with several goals, since a slower plan may win by another goal, and for a trial that cannot
    win: one that a user asked for, or that is measured for comparison only.
    """
    best = Ranking(trials, goals[0]).best_value
    is_compared = len(goals) == 1 and trial.origin is not Origin.USER and not trial.is_single_gpu
    if not is_compared or best is None or best <= 0 or trial.plan is None:
        return None
    step_s = goals[0].slowest_step_s(best, trial.plan.tokens_per_step, trial.plan.ranks)
    return None if step_s is None else step_s * (1 + MARGIN)
