"""What a dry run lists: every plan of a space, legal or not and why."""

from __future__ import annotations

import io
from collections.abc import Mapping

import pytest

from sweeps import listing as listing_module
from sweeps.config.compose import Composer
from sweeps.config.grammar import read_request, without_idle
from sweeps.listing import Listing, list_plans, show_listing
from sweeps.machine import Machine
from sweeps.models import model_shape
from sweeps.planner import Planned, Planner
from tests.conftest import CommandLine
from train_entry.contract import Scalar

CPU = Machine(device="cpu", nodes=1, ranks_per_node=2, cores=2)
MIXED = ("strategy=ddp,zero3", "micro_batch=1,3", "zero.prefetch_bucket_size=1e7,5e7")
BUCKET = "zero.reduce_bucket_size=tag(log,interval(5e7,1e9))"


def listed(composer: Composer, *arguments: str, seed: int = 0) -> Listing:
    request = read_request(arguments, composer)
    planner = Planner(request.composer, model_shape(request.composer.compose().model), CPU, "study")
    space = without_idle(request, planner.matters).space
    return list_plans(space, planner.plan, planner.matters, seed)


def shown(listing: Listing) -> list[str]:
    stream = io.StringIO()
    show_listing(listing, stream)
    return stream.getvalue().splitlines()


def test_every_point_of_a_finite_space_is_looked_at(composer: Composer) -> None:
    found = listed(composer, *MIXED)
    assert (found.looked_at, found.points, len(found.legal), found.distinct) == (6, 6, 3, 3)


def test_legal_points_are_numbered_and_hold_their_plans(composer: Composer) -> None:
    found = listed(composer, *MIXED)
    assert [(one.number, one.plan.strategy, one.plan.micro_batch) for one in found.legal] == [
        (1, "ddp", 1),
        (2, "zero3", 1),
        (3, "zero3", 1),
    ]


def test_a_rule_is_counted_with_one_example(composer: Composer) -> None:
    (rule,) = listed(composer, *MIXED).broken
    assert (rule.count, rule.example.rule) == (3, "batches_divide")
    assert "micro_batch=3" in rule.example.text


def test_rules_stand_by_how_many_points_break_them(composer: Composer) -> None:
    found = listed(composer, "strategy=zero1", "micro_batch=3,5,1", "seq_len=128,99999")
    assert [(rule.example.rule, rule.count) for rule in found.broken] == [
        ("batches_divide", 4),
        ("sequence_fits_the_model", 3),
    ]


def test_a_plan_that_would_run_the_same_job_says_of_which(composer: Composer) -> None:
    found = listed(composer, "strategy=zero1,zero2", "zero.stage=1,2")
    assert [one.same_as for one in found.legal] == [None, None, 1, 2]
    assert [line.split()[-2:] for line in shown(found) if "same as" in line] == [["as", "#1"], ["as", "#2"]]


def test_an_infinite_space_shows_corners_and_random_points(composer: Composer) -> None:
    found = listed(composer, "strategy=zero1,zero2", BUCKET)
    buckets = {one.point["zero.reduce_bucket_size"] for one in found.legal}
    assert {50_000_000, 1_000_000_000} < buckets
    assert found.points is None
    assert "the space is infinite" in shown(found)[-1]


def test_a_large_space_is_sampled_by_the_seed(composer: Composer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing_module, "MAX_LISTED", 5)
    space = ("strategy=zero1", f"seed={','.join(map(str, range(40)))}")
    first, again, other = (listed(composer, *space, seed=seed) for seed in (7, 7, 8))
    assert first == again
    assert [one.point for one in first.legal] != [one.point for one in other.legal]
    assert shown(first)[-1] == (
        f"a sample, by search.seed=7: the space has {40 - first.looked_at} more points"
    )


def test_a_knob_that_does_not_apply_is_blank(composer: Composer) -> None:
    lines = shown(listed(composer, *MIXED))
    at = next(line for line in lines if line.startswith("#")).index("accumulation")
    rows = [line[:at].split() for line in lines if line.lstrip()[:2] in ("1 ", "2 ", "3 ")]
    assert rows == [["1", "ddp", "1"], ["2", "zero3", "1", "1e7"], ["3", "zero3", "1", "5e7"]]


def test_totals_and_reasons_stand_below(composer: Composer) -> None:
    *_, reason, total = shown(listed(composer, *MIXED))
    assert reason.startswith("rejected (3) by batches_divide, for example: global_batch=16 is not a multiple")
    assert reason.endswith("]")
    assert total == "6 points: 3 legal, 3 rejected"


def test_without_a_legal_plan_there_is_no_table(composer: Composer) -> None:
    found = listed(composer, "strategy=zero1", "micro_batch=3,5")
    assert found.legal == ()
    assert [line.partition(" ")[0] for line in shown(found)] == ["rejected", "2"]


def test_each_point_is_planned_once(composer: Composer) -> None:
    request = read_request(MIXED, composer)
    planner = Planner(request.composer, model_shape(request.composer.compose().model), CPU, "study")
    asked: list[tuple[tuple[str, Scalar], ...]] = []

    def plan(point: Mapping[str, Scalar]) -> Planned:
        asked.append(tuple(point.items()))
        return planner.plan(point)

    list_plans(request.space, plan, planner.matters, seed=0)
    assert len(asked) == len(set(asked)) == 6


# ---------------------------------------------------------------- the command line

ON_TWO_CORES = ("cluster.device=cpu", "cluster.gpus_per_node=2")


@pytest.mark.slow
def test_the_full_space_is_listed_and_nothing_else_happens(command_line: CommandLine) -> None:
    done = command_line.run("-m", "dry_run=true", "space=full", *ON_TWO_CORES)
    assert (done.returncode, done.stderr) == (0, "")
    strategies = {line.split()[1] for line in done.stdout.splitlines() if line.lstrip()[:1].isdigit()}
    assert {"ddp", "zero0", "zero1", "zero2", "zero3"} < strategies
    assert "by batches_divide, for example: global_batch=16" in done.stdout
    assert "legal" in done.stdout.splitlines()[-2]
    assert list(command_line.directory.iterdir()) == []


@pytest.mark.slow
def test_one_configuration_is_listed_alone(command_line: CommandLine) -> None:
    done = command_line.run("dry_run=true", "strategy=zero2", "micro_batch=4", *ON_TWO_CORES)
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "1 point: 1 legal, 0 rejected"
    assert list(command_line.directory.iterdir()) == []


@pytest.mark.slow
def test_a_space_without_a_legal_plan_is_status_3(command_line: CommandLine) -> None:
    done = command_line.run("-m", "dry_run=true", "micro_batch=3,5", *ON_TWO_CORES)
    assert done.returncode == 3
    assert done.stdout.splitlines()[-1] == "2 points: 0 legal, 2 rejected"
    assert list(command_line.directory.iterdir()) == []


@pytest.mark.slow
def test_a_dry_run_of_a_wrong_command_line_is_refused_like_any_other(command_line: CommandLine) -> None:
    done = command_line.run("-m", "dry_run=true", "strategy=zero1", "ddp.bucket_cap_mb=5,25", *ON_TWO_CORES)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == ("ddp.bucket_cap_mb: changes nothing in this space: matters only with engine=ddp\n")
