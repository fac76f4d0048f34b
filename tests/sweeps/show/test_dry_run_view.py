"""The print of a dry run: a table of legal plans, the best first, and the rules that others break."""

from __future__ import annotations

import io

import pytest

from sweeps.config.compose import Composer
from sweeps.config.schema import ClusterConfig, GateConfig
from sweeps.estimate.estimator import hardware_for
from sweeps.estimate.fit import room_of
from sweeps.machine import Gpu, Machine
from sweeps.show import dry_run as listing_module
from sweeps.show.dry_run import Listing
from sweeps.show.dry_run_view import show_listing
from sweeps.show.estimates import GROUPS, basis, biggest, by_group, shortfall
from tests.support.dry_runs import CPU, GIB, TWO_H200, an_estimate, listed, too_large
from train_entry.contract import Estimate, Fit, Goal, Plan

MIXED = ("strategy=ddp,zero3", "micro_batch=1,3", "zero.prefetch_bucket_size=1e7,5e7")
ONE = ("strategy=zero1", "micro_batch=4")


def shown(listing: Listing) -> list[str]:
    stream = io.StringIO()
    show_listing(listing, stream)
    return stream.getvalue().splitlines()


def row(listing: Listing, number: int = 1) -> list[str]:
    return next(line.split() for line in shown(listing) if line.split()[:1] == [str(number)])


def test_a_row_has_speed_time_memory_its_parts_and_the_verdict(composer: Composer) -> None:
    found = listed(composer, "strategy=zero1", "micro_batch=4,8", estimate=lambda _: an_estimate())
    assert row(found) == [
        *("1", "zero1", "4", "2", "2,000", "250", "8.50", "9.00", "1.50", "1.00", "6.00", "fits")
    ]


def test_the_head_names_units_and_the_limit(composer: Composer) -> None:
    lines = shown(listed(composer, "micro_batch=4,8", estimate=lambda _: an_estimate()))
    head = " ".join(lines[:3])
    assert "tokens/s" in head
    assert "/GPU" in head
    assert "of 10.00" in head
    assert head.count("GiB") == 2


def test_limits_that_differ_have_a_column(composer: Composer) -> None:
    def shared(plan: Plan) -> Estimate:
        return an_estimate(limit_bytes=40 * GIB // plan.ranks)

    found = listed(composer, "ranks=1,2", "objective=tokens_per_s", estimate=shared)
    head = " ".join(shown(found)[:3])
    assert "limit" in head
    assert "of 40.00" not in head
    assert {"40.00", "20.00"} <= {cell for number in (1, 2) for cell in row(found, number)}


def test_the_total_is_shown_where_it_is_the_objective(composer: Composer) -> None:
    found = listed(
        composer, "micro_batch=4,8", estimate=lambda _: an_estimate(), goal=Goal(name="tokens_per_s")
    )
    assert row(found)[4] == "4,000"
    assert not any("/GPU" in line for line in shown(found))


def test_a_time_or_a_cost_has_a_column_before_the_speed(composer: Composer) -> None:
    goal = Goal(name="time_to_tokens", tokens=4000.0 * 7200)
    found = listed(composer, "micro_batch=4,8", estimate=lambda _: an_estimate(), goal=goal)
    assert " ".join(row(found)[4:7]) == "2.00 h 2,000"
    goal = Goal(name="cost", tokens=2000.0 * 7200, price_per_gpu_hour=3.0)
    found = listed(composer, "micro_batch=4,8", estimate=lambda _: an_estimate(), goal=goal)
    assert row(found)[4:6] == ["6.00", "2,000"]
    assert "cost" in " ".join(shown(found)[:3]).split()


def test_a_plan_that_is_too_large_says_by_how_much_and_when(composer: Composer) -> None:
    found = listed(composer, "micro_batch=4,8", estimate=lambda _: too_large(12.5))
    assert sum(line.endswith("too large  2.50 GiB over the limit (loss)") for line in shown(found)) == 2


def test_a_limit_that_nobody_knows_is_not_shown(composer: Composer) -> None:
    lines = shown(listed(composer, "micro_batch=4,8"))
    assert not any("of 8," in line for line in lines)
    assert lines[0].split() == ["micro_", "tokens/s", "step", "peak", "needed", "opti-", "gradi-", "activa-"]


def test_no_line_of_a_usual_space_is_two_hundred_wide(composer: Composer) -> None:
    cap = "cluster.memory_limit_gib=24"
    found = listed(composer, "model=llama_1b3", cap, "space=zero", machine=TWO_H200)
    table = shown(found)[: len(found.legal) + 4]
    assert len(found.legal) > 40
    assert max(map(len, table)) < 200


def test_parts_of_the_peak_sum_to_it_in_every_row(composer: Composer) -> None:
    found = listed(composer, "model=llama_1b3", "space=offload", machine=TWO_H200)
    assert len(found.legal) > 40
    for one in found.legal:
        parts = by_group(one.estimate.components)
        assert sum(parts.values()) == pytest.approx(one.estimate.peak_bytes, abs=100)
        assert set(parts) <= {*GROUPS}


def test_a_knob_that_does_not_apply_is_blank(composer: Composer) -> None:
    lines = shown(listed(composer, *MIXED))
    at = next(line for line in lines if line.startswith("#")).index("accumulation")
    rows = [line[:at].split() for line in lines if "fits" in line and ";" not in line]
    assert sorted(cells[1:] for cells in rows) == [["ddp", "1"], ["zero3", "1", "1e7"], ["zero3", "1", "5e7"]]


def test_totals_and_reasons_stand_below(composer: Composer) -> None:
    *_, reason, counts, total = shown(listed(composer, *MIXED))
    assert reason.startswith("rejected (3) by batches_divide, for example: global_batch=16 is not a multiple")
    assert reason.endswith("]")
    assert counts == "3 fits; memory: the fullest rank, at its peak"
    assert total == "6 points: 3 legal, 3 rejected"


def test_how_the_estimates_were_made_stands_below(composer: Composer) -> None:
    assert "estimates: by hand" in shown(listed(composer, *MIXED, basis="by hand"))


def test_without_a_legal_plan_there_is_no_table(composer: Composer) -> None:
    found = listed(composer, "strategy=zero1", "micro_batch=3,5", basis="by hand")
    assert found.legal == ()
    assert [line.partition(" ")[0] for line in shown(found)] == ["rejected", "2"]


def test_a_repeat_names_the_row_it_repeats(composer: Composer) -> None:
    found = listed(composer, "strategy=zero1,zero2", "zero.stage=1,2")
    assert [line.split()[-2:] for line in shown(found) if "same as" in line] == [["as", "#1"], ["as", "#3"]]


def test_a_sample_says_so(composer: Composer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing_module, "MAX_LISTED", 5)
    found = listed(composer, "strategy=zero1", f"seed={','.join(map(str, range(40)))}", seed=7)
    assert shown(found)[-1] == f"a sample, by search.seed=7: the space has {40 - found.looked_at} more points"


def test_an_infinite_space_says_so(composer: Composer) -> None:
    bucket = "zero.reduce_bucket_size=tag(log,interval(5e7,1e9))"
    assert "the space is infinite" in shown(listed(composer, "strategy=zero1,zero2", bucket))[-1]


def test_a_wasteful_plan_is_marked_and_explained_by_kind(composer: Composer) -> None:
    lines = shown(listed(composer, "strategy=pp_zero1", "micro_batch=4,8,16"))
    assert [line.split()[-1] for line in lines if "pp2_zero1" in line].count("wasteful") == 1
    (caution,) = [line for line in lines if line.startswith("wasteful")]
    assert caution == (
        "wasteful (1) by a_pipeline_is_filled, for example: pipeline=2 with 1 micro-batch per step (gradient "
        "accumulation): each stage is idle at least 50% of the time, and they never all work at once; "
        "use micro_batch=8, or global_batch=32 or more"
    )


# ---------------------------------------------------------------- words


def test_what_belongs_to_no_group_is_other() -> None:
    assert by_group({"master weights": 4, "moments": 8, "process": 5, "weights": 0}) == {
        "optimizer": 12,
        "other": 5,
    }


def test_the_biggest_component_comes_first() -> None:
    assert biggest({"weights": GIB, "logits": 3 * GIB, "unseen": 99}) == "logits 3.00, weights 1.00"
    assert biggest({"weights": 5, "logits": 3}) == "weights 0.00"


def test_what_the_host_lacks_is_said_beside_what_the_card_lacks() -> None:
    estimate = too_large(12.0, why="needs 12.00 GiB (loss) of 10.00 GiB, a card; needs 70 GiB of the node's")
    assert shortfall(estimate) == "2.00 GiB over the limit (loss); needs 70 GiB of the node's"


def test_what_the_host_alone_lacks_is_said_in_full() -> None:
    estimate = an_estimate(fit=Fit.TOO_LARGE, why="needs 70.00 GiB of the node's 64.00 GiB of host memory")
    assert shortfall(estimate) == "needs 70.00 GiB of the node's 64.00 GiB of host memory"


def described(machine: Machine, cluster: ClusterConfig, observations: int = 0) -> str:
    gate = GateConfig()
    return basis(hardware_for(machine), room_of(cluster, gate, machine), gate, observations)


def test_cold_estimates_of_a_known_card_say_so() -> None:
    assert described(TWO_H200, ClusterConfig()) == (
        "from formulas alone, nothing measured yet; NVIDIA H200: figures from its data sheet; "
        "limit 140.00 GiB per rank (NVIDIA H200), including CUDA's context; "
        "needed: peak + fragmentation + a safety margin that suffices in 90% of cases"
    )


def test_estimates_that_learned_name_the_number_of_trials_and_the_imposed_limit() -> None:
    text = described(TWO_H200, ClusterConfig(memory_limit_gib=40, limit_counts_context=False), 12)
    assert text.startswith("learned from 12 trials; ")
    assert "limit 40.00 GiB per rank (cluster.memory_limit_gib=40), excluding CUDA's context" in text


def test_a_card_that_is_not_known_has_the_figures_of_one_like_it() -> None:
    gpu = Gpu(index=0, uuid="GPU-0", name="NVIDIA X1", memory_bytes=80 * GIB)
    machine = Machine(device="cuda", nodes=1, ranks_per_node=1, gpus=(gpu,))
    assert "NVIDIA X1 is not known here: figures of a similar GPU" in described(machine, ClusterConfig())


def test_a_host_whose_memory_nobody_knows_has_no_limit() -> None:
    assert "no limit: the host's memory is not known" in described(CPU, ClusterConfig())
