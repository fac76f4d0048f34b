"""The listing of a dry run: the legal plans of a space, and the rules that others break."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from sweeps.config.compose import Composer
from sweeps.config.models import model_shape
from sweeps.plan.planner import Planner
from sweeps.plan.resolve import Planned
from sweeps.show import dry_run as listing_module
from sweeps.show.dry_run import list_plans
from sweeps.space.grammar import read_request
from tests.conftest import CommandLine
from tests.support.dry_runs import CPU, GIB, TWO_H200, an_estimate, listed, too_large
from train_entry.contract import Estimate, Fit, Goal, Scalar

MIXED = ("strategy=ddp,zero3", "micro_batch=1,3", "zero.prefetch_bucket_size=1e7,5e7")
BUCKET = "zero.reduce_bucket_size=tag(log,interval(5e7,1e9))"


def test_every_point_of_a_finite_space_is_looked_at(composer: Composer) -> None:
    found = listed(composer, *MIXED)
    assert (found.looked_at, found.points, len(found.legal), found.distinct) == (6, 6, 3, 3)


def test_legal_points_are_numbered_and_hold_their_plans_and_commands(composer: Composer) -> None:
    first, *others = listed(composer, *MIXED).legal
    assert (first.number, first.plan.strategy, first.plan.micro_batch) == (1, "ddp", 1)
    assert first.overrides == ("strategy=ddp", "micro_batch=1")
    assert [(one.number, one.plan.strategy) for one in others] == [(2, "zero3"), (3, "zero3")]


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
    assert [one.same_as for one in found.legal] == [None, 1, None, 3]
    assert [one.plan.zero.stage for one in found.legal] == [1, 1, 2, 2]


def test_an_infinite_space_shows_corners_and_random_points(composer: Composer) -> None:
    found = listed(composer, "strategy=zero1,zero2", BUCKET)
    buckets = {one.point["zero.reduce_bucket_size"] for one in found.legal}
    assert {50_000_000, 1_000_000_000} < buckets
    assert found.points is None


def test_a_large_space_is_sampled_by_the_seed(composer: Composer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing_module, "MAX_LISTED", 5)
    space = ("strategy=zero1", f"seed={','.join(map(str, range(40)))}")
    first, again, other = (listed(composer, *space, seed=seed) for seed in (7, 7, 8))
    assert first == again
    assert [one.point for one in first.legal] != [one.point for one in other.legal]
    assert (first.points, first.seed) == (40, 7)


def test_without_a_pipeline_nothing_is_wasteful(composer: Composer) -> None:
    assert listed(composer, *MIXED).wasteful == ()


def test_each_point_is_planned_once(composer: Composer) -> None:
    request = read_request(MIXED, composer)
    planner = Planner(request.composer, model_shape(request.composer.compose().model), CPU, "study")
    asked: list[tuple[tuple[str, Scalar], ...]] = []

    def plan(point: Mapping[str, Scalar]) -> Planned:
        asked.append(tuple(point.items()))
        return planner.plan(point)

    list_plans(request.space, plan, planner.is_active, 0, lambda _: an_estimate(), Goal(name="tokens_per_s"))
    assert len(asked) == len(set(asked)) == 6


# ---------------------------------------------------------------- the best first


def order(composer: Composer, estimates: Mapping[int, Estimate], goal: str) -> list[int]:
    sizes = f"micro_batch={','.join(map(str, estimates))}"
    found = listed(
        composer,
        "strategy=zero1",
        sizes,
        estimate=lambda plan: estimates[plan.micro_batch],
        goal=Goal(name=goal, tokens=1e9),
    )
    return [one.plan.micro_batch for one in found.legal]


def test_plans_that_fit_come_first_then_borderline_ones_then_those_too_large(composer: Composer) -> None:
    estimates = {
        1: too_large(12.0, tokens_per_s=9000.0),
        2: an_estimate(fit=Fit.BORDERLINE, tokens_per_s=8000.0),
        4: an_estimate(tokens_per_s=1000.0),
        8: an_estimate(tokens_per_s=2000.0),
    }
    assert order(composer, estimates, "tokens_per_s") == [8, 4, 2, 1]


def test_those_that_fit_are_ordered_by_the_objective(composer: Composer) -> None:
    estimates = {
        1: an_estimate(tokens_per_s=3000.0, tokens_per_s_per_gpu=10.0),
        2: an_estimate(tokens_per_s=2000.0, tokens_per_s_per_gpu=30.0),
        4: an_estimate(tokens_per_s=1000.0, tokens_per_s_per_gpu=20.0),
    }
    assert order(composer, estimates, "tokens_per_s") == [1, 2, 4]
    assert order(composer, estimates, "tokens_per_s_per_gpu") == [2, 4, 1]


def test_a_time_or_a_size_is_the_better_the_less_it_is(composer: Composer) -> None:
    estimates = {
        1: an_estimate(tokens_per_s=3000.0, peak_bytes=2 * GIB),
        2: an_estimate(tokens_per_s=2000.0, peak_bytes=1 * GIB),
        4: an_estimate(tokens_per_s=4000.0, peak_bytes=3 * GIB),
    }
    assert order(composer, estimates, "time_to_tokens") == [4, 1, 2]
    assert order(composer, estimates, "peak_bytes") == [2, 1, 4]


def test_a_loss_that_nobody_can_estimate_leaves_the_order_to_the_speed(composer: Composer) -> None:
    estimates = {1: an_estimate(tokens_per_s_per_gpu=10.0), 2: an_estimate(tokens_per_s_per_gpu=30.0)}
    assert order(composer, estimates, "loss") == [2, 1]


def test_of_those_too_large_the_least_comes_first(composer: Composer) -> None:
    estimates = {1: too_large(30.0), 2: too_large(11.0), 4: too_large(20.0)}
    assert order(composer, estimates, "tokens_per_s") == [2, 4, 1]


def test_too_much_host_memory_counts_as_much_as_too_much_of_a_card(composer: Composer) -> None:
    host = an_estimate(fit=Fit.TOO_LARGE, why="host", host_bytes=128 * GIB)  # twice the host memory
    estimates = {1: host, 2: too_large(15.0), 4: too_large(25.0)}
    assert order(composer, estimates, "tokens_per_s") == [2, 1, 4]


def test_the_estimate_of_a_larger_micro_batch_needs_more(composer: Composer) -> None:
    found = listed(composer, "model=llama_1b3", "strategy=zero1", "micro_batch=1,2,4,8", machine=TWO_H200)
    needed = {one.plan.micro_batch: one.estimate.needed_bytes for one in found.legal}
    assert needed[1] < needed[2] < needed[4] < needed[8]


def test_verdicts_are_counted(composer: Composer) -> None:
    cap = "cluster.memory_limit_gib=24"
    found = listed(
        composer, "model=llama_1b3", cap, "strategy=ddp,zero1", "micro_batch=1,8", machine=TWO_H200
    )
    fits = [one.estimate.fit for one in found.legal]
    assert [found.count(fit) for fit in Fit] == [fits.count(fit) for fit in Fit]
    assert found.count(Fit.TOO_LARGE) == 3
    assert fits[0] is Fit.FITS


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
    why = "changes nothing in this space: it has an effect only with engine=ddp"
    assert done.stderr == f"ddp.bucket_cap_mb: {why}\n"


@pytest.mark.slow
def test_the_list_is_written_to_a_file_as_well(command_line: CommandLine) -> None:
    to = command_line.directory / "plans.csv"
    done = command_line.run(
        "-m", "dry_run=true", f"dry_run_to={to}", "strategy=ddp,zero3", "micro_batch=1,3", *ON_TWO_CORES
    )
    assert (done.returncode, done.stderr) == (0, "")
    head, *rows = to.read_text().splitlines()
    assert head.startswith("number,verdict,why,strategy,micro_batch,")
    assert len(rows) == 2
    assert "dry_run" not in rows[0]  # the command that runs one trial leaves it out
    assert list(command_line.directory.iterdir()) == [to]


@pytest.mark.slow
def test_a_file_that_cannot_be_written_is_one_line_and_status_2(command_line: CommandLine) -> None:
    done = command_line.run("-m", "dry_run=true", "dry_run_to=plans.txt", "micro_batch=1,2", *ON_TWO_CORES)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert "plans.txt" in line
    assert ".csv" in line
    assert ".json" in line


@pytest.mark.slow
def test_a_folder_that_is_not_there_is_one_line_before_the_list(command_line: CommandLine) -> None:
    done = command_line.run("-m", "dry_run=true", "dry_run_to=gone/a.csv", "micro_batch=1,2", *ON_TWO_CORES)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("dry_run_to=gone/a.csv: there is no folder ")
