"""When a study ends."""

from __future__ import annotations

import pytest

from sweeps.limits import Limits, Spent, StopReason, active_seconds
from tests.examples import a_measured_trial


@pytest.mark.parametrize(
    ("trials", "hours", "launched", "active_s", "reason"),
    [
        (3, None, 2, 1e9, None),
        (3, None, 3, 0.0, StopReason.TRIALS),
        (3, None, 4, 0.0, StopReason.TRIALS),
        (None, 2.0, 10**6, 7199.0, None),
        (None, 2.0, 0, 7200.0, StopReason.HOURS),
        (None, None, 10**6, 1e9, None),
    ],
)
def test_a_study_ends_at_the_first_limit(
    trials: int | None, hours: float | None, launched: int, active_s: float, reason: StopReason | None
) -> None:
    spent = Spent(launched=launched, active_s=active_s, gpu_s=0.0)
    assert Limits(trials=trials, hours=hours, retries=0).reached(spent) is reason


@pytest.mark.parametrize(
    ("spans", "active_s"),
    [
        ([], 0.0),
        ([(10, 20)], 10.0),
        ([(10, 20), (15, 30)], 20.0),
        ([(10, 40), (15, 30)], 30.0),
        ([(10, 20), (1000, 1010)], 20.0),
        ([(15, 30), (10, 20)], 20.0),
        ([(90, None)], 10.0),
        ([(10, 20), (90, None), (95, 97)], 20.0),
    ],
)
def test_time_counts_while_a_trial_is_open_and_once_for_all_open_ones(
    spans: list[tuple[float, float | None]], active_s: float
) -> None:
    trials = [a_measured_trial(created_at=begin, closed_at=end) for begin, end in spans]
    assert active_seconds(trials, now=100.0) == active_s
