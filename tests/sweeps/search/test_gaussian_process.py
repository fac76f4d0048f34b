"""Predictions of errors from the errors of other plans."""

from __future__ import annotations

import math
import random

import pytest

from sweeps.search.features import Features
from sweeps.search.gaussian_process import LARGEST, SIZES, GaussianProcess

DOUBT = 0.06


def at(*counts: float, kind: object = "", parts: tuple[float, ...] = (), width: float = 1.0) -> Features:
    return Features(counts=counts, kinds=(kind,), parts=parts, width=width)


def test_before_any_error_is_seen_what_is_taken_for_granted_holds() -> None:
    found = GaussianProcess([], [], DOUBT).at(at(0.0))
    assert found.mean == 0.0
    assert DOUBT < found.deviation < max(SIZES) * DOUBT  # a mean over all sizes that are plausible


def test_it_believes_what_it_sees_there_more_than_nearby_and_more_than_far_away() -> None:
    found = GaussianProcess([at(0.0)], [0.1], DOUBT)
    beliefs = [found.at(at(distance)) for distance in (0.0, 1.0, 50.0)]
    means = [belief.mean for belief in beliefs]
    deviations = [belief.deviation for belief in beliefs]
    assert 0.1 > means[0] > means[1] > means[2] >= 0
    assert deviations == sorted(deviations)


def test_another_kind_is_as_far_as_a_doubling() -> None:
    found = GaussianProcess([at(0.0, kind="a")], [0.1], DOUBT)
    assert found.at(at(0.0, kind="b")) == found.at(at(1.0, kind="a"))
    assert found.at(at(0.0, kind="b")) == found.at(at(0.0, kind="c"))


def test_a_part_that_is_wrong_is_wrong_wherever_it_is_found() -> None:
    half, none = at(90.0, parts=(0.1,)), at(90.0, parts=(0.0,))
    found = GaussianProcess([at(float(place) * 30, parts=(0.2,)) for place in range(3)], [0.2] * 3, DOUBT)
    assert found.at(half).mean == pytest.approx(0.1, abs=0.03)
    assert abs(found.at(none).mean) < 0.01


def test_wide_errors_say_less_and_are_believed_less() -> None:
    narrow, wide = (GaussianProcess([at(0.0, width=width)], [0.1], DOUBT) for width in (1.0, 3.0))
    assert wide.at(at(0.0)).mean < narrow.at(at(0.0)).mean
    assert narrow.at(at(0.0, width=3.0)).deviation > 2 * narrow.at(at(0.0)).deviation


@pytest.mark.parametrize("reach", [0.01, 3.0])
def test_of_errors_like_those_assumed_its_intervals_hold_as_often_as_they_say(reach: float) -> None:
    """Independent errors, and errors that neighbours share: 95 in 100 lie within 1.96 deviations."""
    source = random.Random(1)
    inside, count = 0, 400
    for _ in range(count):
        errors = [source.gauss(0, DOUBT)]
        decay = math.exp(-1 / reach)
        while len(errors) < 9:
            errors.append(decay * errors[-1] + math.sqrt(1 - decay**2) * source.gauss(0, DOUBT))
        places = [at(float(place)) for place in range(9)]
        belief = GaussianProcess(places[:8], errors[:8], DOUBT).at(places[8])
        inside += abs(errors[8] - belief.mean) <= 1.96 * belief.deviation
    assert 0.92 <= inside / count <= 0.99


def test_one_error_that_is_out_of_all_proportion_counts_as_a_large_one() -> None:
    places = [at(0.0), at(1.0), at(2.0), at(30.0)]
    large, huge = (GaussianProcess(places, [0.01, -0.01, 0.0, odd], DOUBT) for odd in (LARGEST * DOUBT, 10.0))
    assert huge.at(at(3.0)) == large.at(at(3.0))
