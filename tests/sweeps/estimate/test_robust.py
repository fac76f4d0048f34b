"""The fit behind all learned estimates: least squares with a prior, robust to outliers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from sweeps.estimate.robust import Unknown, robust_fit
from tests.support.learned_estimates import LearnedEstimates, learned_estimates
from tests.support.paths import DATA
from train_entry.contract import load

FREE = Unknown(default=0.0, deviation=1e6, lowest=-math.inf, highest=math.inf)  # almost no prior


def mean(seen: Sequence[float], unknown: Unknown = FREE, threshold: float = math.inf) -> float:
    (found,) = robust_fit(lambda at: [at[0] - value for value in seen], [threshold] * len(seen), [unknown])
    return found


def test_linear_equations_are_solved() -> None:
    """2x + y = 5, x + 3y = 10."""
    found = robust_fit(lambda at: [2 * at[0] + at[1] - 5, at[0] + 3 * at[1] - 10], [math.inf] * 2, [FREE] * 2)
    assert found == pytest.approx((1, 3))


def test_without_a_belief_the_mean_is_found() -> None:
    assert mean([1.0, 2.0, 6.0]) == pytest.approx(3)


def test_the_default_weighs_as_one_observation_of_its_deviation() -> None:
    belief = Unknown(default=1.0, deviation=0.5, lowest=-10, highest=10)
    assert mean([3.0], belief) == pytest.approx((3 + 1 / 0.5**2) / (1 + 1 / 0.5**2))


def test_an_odd_observation_pulls_no_harder_than_the_threshold() -> None:
    """Huber: two errors of -x balance one error that counts as the threshold, 1."""
    assert mean([0.0, 0.0, 100.0], threshold=1.0) == pytest.approx(0.5, abs=1e-6)


@pytest.mark.parametrize(("seen", "found"), [(5.0, 2.0), (-5.0, 0.0)])
def test_bounds_hold_also_where_the_search_starts_on_one(seen: float, found: float) -> None:
    assert mean([seen], Unknown(default=0.0, deviation=10.0, lowest=0.0, highest=2.0)) == pytest.approx(found)


def test_estimates_of_recorded_trials_are_those_of_the_solver_before_to_a_thousandth() -> None:
    """The golden was made by a Gauss-Newton method and by coordinate descent, each run to its end."""
    lines = (DATA / "goldens" / "estimates.jsonl").read_text().splitlines()
    golden = [load(LearnedEstimates, line) for line in lines]
    found = list(learned_estimates())
    assert [(each.table, each.learned, each.seed) for each in found] == [
        (each.table, each.learned, each.seed) for each in golden
    ]
    for new, old in zip(found, golden, strict=True):
        assert new.peak_bytes == pytest.approx(old.peak_bytes, rel=1e-3)
        assert new.step_s == pytest.approx(old.step_s, rel=1e-3)
