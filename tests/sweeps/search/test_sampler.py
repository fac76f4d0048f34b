"""The sampler: it proposes no point twice and none that is known, and hears of results."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import optuna
import pytest

from sweeps.config.schema import SearchConfig
from sweeps.errors import ConfigError
from sweeps.search.sampler import Proposal, Sampler
from sweeps.search.verdicts import BROKEN, HOLDS, Lesson
from sweeps.space.dimensions import Choices, Dimension, Interval, Point, SearchSpace
from train_entry.contract import Scalar


def choices(key: str, *values: Scalar) -> Dimension:
    return Dimension(key=key, text=",".join(map(str, values)), range=Choices(values=values))


FINITE = SearchSpace(
    dimensions=(choices("strategy", "ddp", "zero1", "zero2"), choices("micro_batch", 1, 2, 4))
)
BUCKETS = SearchSpace(
    dimensions=(
        Dimension(
            key="bucket", text="", range=Interval(low=5e7, high=1e9, log=True, integral=True, digits=2)
        ),
        choices("overlap", True, False),
    )
)
SAMPLERS = ["tpe", "random", "grid", "nsga2", pytest.param("gp", marks=pytest.mark.slow)]  # gp imports torch
MODELS = ["tpe", "random", "nsga2", pytest.param("gp", marks=pytest.mark.slow)]


def a_sampler(space: SearchSpace = FINITE, told: int = 0, **search: Any) -> Sampler:
    return Sampler(space, SearchConfig(**{"startup_trials": 2, **search}), told=told)


def good(point: Point, value: float = 100.0) -> Lesson:
    return Lesson(point=point, scores=(value,), legal=HOLDS, memory=HOLDS, trained=HOLDS)


def too_large(point: Point) -> Lesson:
    return Lesson(point=point, scores=None, legal=HOLDS, memory=BROKEN, trained=HOLDS)


def ask(found: Sampler) -> Proposal:
    proposal = found.ask()
    assert proposal is not None
    return proposal


def told(found: Sampler) -> list[optuna.trial.FrozenTrial]:
    """Return the finished trials as optuna has them."""
    trials = found._study.get_trials(deepcopy=False)
    return [trial for trial in trials if trial.state is optuna.trial.TrialState.COMPLETE]


def key(point: Point) -> tuple[Scalar, ...]:
    return tuple(point.values())


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_finite_space_is_proposed_whole_and_no_point_twice(sampler: str) -> None:
    found = a_sampler(sampler=sampler)
    points = []
    while proposal := found.ask():
        points.append(key(proposal.point))
        found.tell(proposal, good(proposal.point, value=float(len(points))))
    assert sorted(points, key=str) == sorted((key(point) for point in FINITE.points()), key=str)


def test_points_that_are_being_tried_are_not_proposed_again() -> None:
    found = a_sampler()
    points = {key(ask(found).point) for _ in range(9)}
    assert len(points) == 9
    assert found.ask() is None


def test_a_grid_goes_in_the_order_written() -> None:
    found = a_sampler(sampler="grid")
    assert [ask(found).point for _ in range(9)] == list(FINITE.points())


def test_a_grid_needs_a_finite_space() -> None:
    with pytest.raises(ConfigError, match="grid needs a finite space"):
        a_sampler(BUCKETS, sampler="grid")


def test_a_space_of_one_point_is_proposed_once() -> None:
    found = a_sampler(SearchSpace(dimensions=()))
    assert ask(found).point == {}
    assert found.ask() is None


@pytest.mark.parametrize("sampler", MODELS)
def test_an_infinite_space_gives_new_points_with_snapped_values(sampler: str) -> None:
    found = a_sampler(BUCKETS, sampler=sampler)
    points = []
    for _ in range(12):
        proposal = ask(found)
        points.append(proposal.point)
        found.tell(proposal, good(proposal.point, value=float(str(proposal.point["bucket"])[:2])))
    assert len({key(point) for point in points}) == 12
    assert [point for point in points if BUCKETS.reduce(point) != point] == []


@pytest.mark.parametrize("sampler", MODELS)
def test_every_sampler_hears_of_out_of_memory(sampler: str) -> None:
    found = a_sampler(sampler=sampler)
    for teach in (good, too_large, good, too_large, good):
        proposal = ask(found)
        found.tell(proposal, teach(proposal.point))
    broken = [trial for trial in told(found) if trial.constraints["memory"] > 0]
    assert len(told(found)) == 5
    assert [(trial.value, trial.constraints["legal"]) for trial in broken] == [(100.0, HOLDS)] * 2


def test_a_bad_point_counts_as_the_worst_value_seen() -> None:
    found = a_sampler()
    for value in (50.0, 80.0):
        proposal = ask(found)
        found.tell(proposal, good(proposal.point, value))
    proposal = ask(found)
    found.tell(proposal, too_large(proposal.point))
    assert [trial.value for trial in told(found)] == [50.0, 80.0, 50.0]


def test_a_bad_point_before_any_good_one_counts_as_nothing() -> None:
    found = a_sampler()
    proposal = ask(found)
    found.tell(proposal, too_large(proposal.point))
    assert [trial.value for trial in told(found)] == [0.0]


def test_what_taught_nothing_is_not_told_and_not_proposed_again() -> None:
    found = a_sampler()
    first = ask(found)
    found.tell(first, None)
    others = [key(ask(found).point) for _ in range(8)]
    assert told(found) == []
    assert key(first.point) not in others


def test_ordinal_choices_are_told_by_position_and_others_by_name() -> None:
    found = a_sampler()
    found.remember(good({"strategy": "zero1", "micro_batch": 4}))
    (trial,) = told(found)
    assert trial.params == {"strategy": "zero1", "micro_batch": 2}


def test_an_unordered_list_of_numbers_is_told_as_categories() -> None:
    space = SearchSpace(dimensions=(choices("micro_batch", 4, 1, 2),))
    found = a_sampler(space)
    found.remember(good({"micro_batch": 1}))
    assert told(found)[0].params == {"micro_batch": 1}


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_rebuilt_from_lessons_it_proposes_no_known_point(sampler: str) -> None:
    points = list(FINITE.points())
    found = a_sampler(sampler=sampler, told=7)
    for point in points[:4]:
        found.remember(good(point))
    found.remember(too_large(points[4]))
    found.skip(points[5])
    found.resume(points[6])
    assert {key(ask(found).point) for _ in range(2)} == {key(point) for point in points[7:]}
    assert found.ask() is None


def test_a_resumed_point_is_told_like_any_other() -> None:
    found = a_sampler()
    point: Point = {"strategy": "zero2", "micro_batch": 2}
    proposal = found.resume(point)
    found.tell(proposal, good(point, 70.0))
    assert proposal.point == point
    assert [(trial.params, trial.value) for trial in told(found)] == [
        ({"strategy": "zero2", "micro_batch": 1}, 70.0)
    ]


def test_a_resumed_point_of_an_interval_keeps_its_value() -> None:
    found = a_sampler(BUCKETS)
    point: Point = {"bucket": 120_000_000, "overlap": False}
    found.tell(found.resume(point), good(point))
    assert told(found)[0].params == point


def test_another_start_asks_with_another_seed() -> None:
    first, second, again = (a_sampler(BUCKETS, told=count) for count in (0, 5, 0))
    points = [key(ask(found).point) for found in (first, second, again)]
    assert points[0] == points[2]
    assert points[0] != points[1]


def test_a_sampler_that_repeats_itself_does_not_end_a_large_space() -> None:
    """The sampler soon proposes known values only, but some 140 snapped values exist."""
    interval = Interval(low=5e7, high=1e9, log=True, integral=True, digits=2)
    buckets = Dimension(key="zero.reduce_bucket_size", text="", range=interval)
    sampler = Sampler(SearchSpace(dimensions=(buckets,)), SearchConfig(sampler="tpe"))
    asked = [sampler.ask() for _ in range(40)]
    points = [proposal.point["zero.reduce_bucket_size"] for proposal in asked if proposal is not None]
    assert len(set(points)) == 40


def test_a_space_of_few_snapped_values_ends() -> None:
    interval = Interval(low=10, high=14, log=False, integral=True)
    few = Dimension(key="ranks", text="", range=interval)
    sampler = Sampler(SearchSpace(dimensions=(few,)), SearchConfig(sampler="random"))
    asked = [sampler.ask() for _ in range(7)]
    assert {proposal.point["ranks"] for proposal in asked if proposal is not None} == {10, 11, 12, 13, 14}
    assert asked[5:] == [None, None]


# ---------------------------------------------------------------- conditional knobs


def is_active(key: str, point: Mapping[str, Scalar]) -> bool:
    """True except for zero3's prefetching under another strategy."""
    return key != "zero.prefetch_bucket_size" or point["strategy"] == "zero3"


# Written in the wrong order: the knob that decides comes last.
CONDITIONAL = SearchSpace(
    dimensions=(choices("zero.prefetch_bucket_size", 1, 2, 3), choices("strategy", "ddp", "zero1", "zero3"))
)
CONDITIONAL_INTERVAL = SearchSpace(
    dimensions=(
        choices("strategy", "ddp", "zero3"),
        choices("micro_batch", 1, 2, 4, 8),
        Dimension(
            key="zero.prefetch_bucket_size",
            text="",
            range=Interval(low=1e6, high=1e9, log=True, integral=True, digits=2),
        ),
    )
)


def conditional(space: SearchSpace = CONDITIONAL, **search: Any) -> Sampler:
    return Sampler(space, SearchConfig(**{"startup_trials": 2, **search}), is_active=is_active)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_conditional_space_is_proposed_whole_and_then_ends(sampler: str) -> None:
    found, points = conditional(sampler=sampler), []
    while proposal := found.ask():
        points.append(tuple(proposal.point.items()))
        found.tell(proposal, good(proposal.point, value=float(len(points))))
    expected = [tuple(point.items()) for point in CONDITIONAL.points(is_active)]
    assert sorted(points, key=str) == sorted(expected, key=str)
    assert len(points) == 5


@pytest.mark.parametrize("sampler", MODELS)
def test_a_sampler_hears_of_the_knobs_that_matter_only(sampler: str) -> None:
    found = conditional(CONDITIONAL_INTERVAL, sampler=sampler)
    for number in range(12):
        proposal = ask(found)
        found.tell(proposal, good(proposal.point, value=float(number)))
    heard = [("zero.prefetch_bucket_size" in trial.params, trial.params["strategy"]) for trial in told(found)]
    assert set(heard) == {(False, "ddp"), (True, "zero3")}


def test_tpe_learns_a_knob_that_only_some_trials_have() -> None:
    """Prefetching little is best by far: later proposals prefetch less than the first ones."""
    found = conditional(CONDITIONAL_INTERVAL, startup_trials=10)
    sizes = []
    for _ in range(50):
        proposal = ask(found)
        size = proposal.point.get("zero.prefetch_bucket_size")
        found.tell(proposal, good(proposal.point, 0.0 if size is None else 1e9 / float(size)))
        sizes += [] if size is None else [float(size)]
    assert sorted(sizes[-10:])[5] < sorted(sizes[:10])[5]


def test_a_point_with_an_idle_knob_is_known_without_it() -> None:
    found = conditional()
    found.remember(good({"strategy": "ddp", "zero.prefetch_bucket_size": 2}))
    found.skip({"strategy": "zero1", "zero.prefetch_bucket_size": 3})
    assert [trial.params for trial in told(found)] == [{"strategy": "ddp"}]
    assert {ask(found).point["strategy"] for _ in range(3)} == {"zero3"}
    assert found.ask() is None


@pytest.mark.parametrize(
    "point", [{"strategy": "ddp"}, {"zero.prefetch_bucket_size": 2, "strategy": "zero3"}]
)
def test_a_conditional_point_is_resumed_as_it_was(point: Point) -> None:
    found = conditional()
    proposal = found.resume(point)
    found.tell(proposal, good(point))
    assert proposal.point == point
    assert set(told(found)[0].params) == set(point)


def test_an_idle_knob_of_a_resumed_point_stays_on_record() -> None:
    idle: Point = {"strategy": "ddp", "zero.prefetch_bucket_size": 2}
    assert conditional().resume(idle).point == idle


def test_a_space_is_finite_where_an_interval_is_not_in_it() -> None:
    assert conditional().is_finite
    assert not conditional(CONDITIONAL_INTERVAL).is_finite


# ---------------------------------------------------------------- choosing among proposals


def test_of_several_proposals_the_one_of_most_merit_is_tried_and_the_others_stay_new() -> None:
    found = a_sampler()
    best: Point = {"strategy": "zero2", "micro_batch": 4}
    proposal = found.ask(lambda point: float(point == best), among=9)
    assert proposal is not None
    assert proposal.point == best
    others = [point for point in FINITE.points() if point != best]
    assert all(found.is_new(point) for point in others)
    assert not found.is_new(best)
    found.tell(proposal, good(best))
    assert {key(ask(found).point) for _ in range(8)} == {key(point) for point in others}
    assert found.ask(lambda point: 1.0, among=9) is None


def test_where_fewer_are_left_than_are_compared_the_best_of_them_is_tried() -> None:
    found = a_sampler()
    for point in list(FINITE.points())[:7]:
        found.skip(point)
    proposal = found.ask(lambda point: float(str(point["micro_batch"])), among=8)
    assert proposal is not None
    assert proposal.point == {"strategy": "zero2", "micro_batch": 4}


# ---------------------------------------------------------------- several goals


@pytest.mark.parametrize("sampler", ["tpe", "nsga2", "random", pytest.param("gp", marks=pytest.mark.slow)])
def test_of_two_goals_a_bad_point_counts_as_the_worst_of_each(sampler: str) -> None:
    found = Sampler(FINITE, SearchConfig(sampler=sampler, startup_trials=2), goals=2)
    for scores in ((100.0, -9.0), (50.0, -3.0)):
        proposal = ask(found)
        lesson = Lesson(point=proposal.point, scores=scores, legal=HOLDS, memory=HOLDS, trained=HOLDS)
        found.tell(proposal, lesson)
    proposal = ask(found)
    found.tell(proposal, too_large(proposal.point))
    while proposal := found.ask():  # type: ignore[assignment]
        found.tell(proposal, None)
    assert [trial.values for trial in told(found)] == [[100.0, -9.0], [50.0, -3.0], [50.0, -9.0]]


def test_of_two_goals_nothing_falls_behind() -> None:
    found = Sampler(FINITE, SearchConfig(pruner="median", startup_trials=0), goals=2)
    assert not found.falls_behind(ask(found), step=1, score=-1e9)


# ---------------------------------------------------------------- pruners


@pytest.mark.parametrize(("pruner", "expected"), [("median", True), ("percentile", True), ("none", False)])
def test_a_pruner_compares_a_trial_with_others_at_the_same_step(pruner: str, expected: bool) -> None:
    found = a_sampler(pruner=pruner, startup_trials=1)
    for loss in (1.0, 2.0, 3.0):
        proposal = ask(found)
        assert not found.falls_behind(proposal, step=1, score=loss)
        found.tell(proposal, good(proposal.point, loss))
    assert found.falls_behind(ask(found), step=1, score=0.5) is expected
    assert not found.falls_behind(Proposal(point={}, number=-1), step=1, score=0.5)


@pytest.mark.parametrize("pruner", ["hyperband", "wilcoxon"])
def test_every_pruner_takes_reports(pruner: str) -> None:
    found = a_sampler(pruner=pruner)
    first, second = ask(found), ask(found)
    for step in range(1, 4):
        assert not found.falls_behind(first, step, -1.0)
    found.tell(first, good(first.point, -1.0))
    assert isinstance(found.falls_behind(second, 1, -2.0), bool)


def test_a_pruned_trial_is_known_by_its_steps_and_not_by_a_value() -> None:
    found = a_sampler(pruner="median")
    proposal = ask(found)
    found.falls_behind(proposal, step=1, score=-9.0)
    found.tell(proposal, dataclasses.replace(good(proposal.point, -9.0), is_pruned=True))
    (trial,) = found._study.get_trials(deepcopy=False)
    assert (trial.state, trial.intermediate_values) == (optuna.trial.TrialState.PRUNED, {1: -9.0})
    assert not found.is_new(proposal.point)
