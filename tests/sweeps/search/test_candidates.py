"""The legal plans of a space, each listed once."""

from __future__ import annotations

from collections.abc import Mapping

from sweeps.plan.resolve import Planned, Rejection
from sweeps.search.candidates import MOST, Candidates, candidate_of
from sweeps.space.dimensions import Choices, Dimension, Interval, SearchSpace, always
from tests.support.examples import a_plan
from train_entry.contract import Scalar


def plan(point: Mapping[str, Scalar]) -> Planned:
    """Return the plan of a point. A micro-batch of 3 is not legal; the depth changes nothing."""
    size = int(str(point["micro_batch"]))
    if size == 3:
        return Planned(plan=Rejection(reasons=()), fingerprint=None, overrides=())
    return Planned(plan=a_plan(micro_batch=size), fingerprint=f"size {size}", overrides=())


def space(sizes: Choices | Interval, depths: int = 1) -> SearchSpace:
    return SearchSpace(
        dimensions=(
            Dimension(key="micro_batch", text="", range=sizes),
            Dimension(key="depth", text="", range=Choices(values=tuple(range(depths)))),
        )
    )


FEW = Choices(values=(1, 2, 3, 4))
MANY = Interval(low=1, high=1e9, log=False, integral=True)


def sizes_of(found: Candidates) -> list[int]:
    return [candidate.plan.micro_batch for candidate in found]


def test_a_point_without_a_legal_plan_is_no_candidate() -> None:
    assert candidate_of(plan, {"micro_batch": 3}) is None
    found = candidate_of(plan, {"micro_batch": 4})
    assert found is not None
    assert (found.point, found.plan.micro_batch, found.fingerprint) == ({"micro_batch": 4}, 4, "size 4")


def test_each_legal_plan_of_a_small_space_is_listed_once_by_its_first_point() -> None:
    found = Candidates(space(FEW, depths=3), plan, always, seed=0)
    found.complete()
    assert found.covers_space
    assert sizes_of(found) == [1, 2, 4]
    assert [candidate.point["depth"] for candidate in found] == [0, 0, 0]


def test_it_grows_by_as_many_points_as_are_asked_for() -> None:
    found = Candidates(space(FEW), plan, always, seed=0)
    steps = []
    for _ in range(3):
        found.grow(2)
        steps.append((sizes_of(found), found.is_complete))
    assert steps == [([1, 2], False), ([1, 2, 4], False), ([1, 2, 4], True)]


def test_of_an_infinite_space_so_many_points_are_drawn_and_no_more() -> None:
    found = Candidates(space(MANY), plan, always, seed=0)
    found.complete()
    assert not found.covers_space
    assert MOST - 5 < len(sizes_of(found)) <= MOST  # some points may be drawn twice


def test_a_space_that_is_finite_but_large_is_drawn_from_as_well() -> None:
    found = Candidates(space(FEW, depths=MOST), plan, always, seed=0)
    found.complete()
    assert not found.covers_space
    assert sorted(sizes_of(found)) == [1, 2, 4]


def test_the_seed_decides_what_is_drawn() -> None:
    drawn = []
    for seed in (1, 1, 2):
        found = Candidates(space(MANY), plan, always, seed=seed)
        found.grow(5)
        drawn.append(sizes_of(found))
    assert drawn[0] == drawn[1] != drawn[2]
