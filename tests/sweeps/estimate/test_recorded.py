"""Tables of recorded trials can be of any model and GPU, and lines may leave out what is unknown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sweeps.estimate.memory.model import memory_of
from tests.support.recorded import GIB, MORE_TABLES, RECORDED, Row, load_table, row_of, tables
from train_entry.contract import Engine, Offload

LEAST = {
    "gpus": 4,
    "seq": 1024,
    "global_batch": 64,
    "cap_gib": 80,
    "stage": 2,
    "micro_batch": 4,
    "outcome": "ok",
    "model": "llama_160m",
}

DEGREES = load_table(RECORDED / "h200x2_degrees.jsonl")  # with pipeline and tensor parallelism, among others


@pytest.mark.parametrize("row", DEGREES, ids=lambda row: row.label)
def test_every_rank_is_estimated_to_one_percent(row: Row) -> None:
    """This includes stages before the last, whose peaks are below the fullest rank's."""
    stages = memory_of(row.plan, row.model, row.hardware).stages
    estimated = [stages[rank % len(stages)].peak.total for rank in range(row.plan.ranks)]
    assert row.rank_peak_bytes == pytest.approx(estimated, rel=0.01)
    assert row.peak_bytes == max(row.rank_peak_bytes)


@pytest.mark.parametrize("row", DEGREES, ids=lambda row: row.label)
def test_host_memory_is_enough_and_not_much_more(row: Row) -> None:
    estimated = memory_of(row.plan, row.model, row.hardware).host_bytes
    assert row.host_peak_bytes is not None
    assert row.host_peak_bytes < estimated < 1.3 * row.host_peak_bytes


def test_a_line_may_leave_out_all_that_is_usual() -> None:
    row = row_of(LEAST)
    assert (row.plan.data, row.plan.grad_accum, row.plan.engine) == (4, 4, Engine.DEEPSPEED)
    assert (row.model.parameters, row.cap_bytes, row.is_oom) == (162_417_408, 80 * GIB, False)
    assert memory_of(row.plan, row.model, row.hardware).peak_bytes > 0


def test_a_line_may_bring_a_model_and_a_card_of_its_own() -> None:
    shape = {"family": "llama", "layers": 2, "hidden": 64, "heads": 4, "ffn": 128, "vocab": 100}
    row = row_of({**LEAST, "model": "mine", "gpu": "NVIDIA A100-SXM4-80GB", **shape})
    assert (row.model.name, row.model.layers, row.model.kv_heads) == ("mine", 2, 4)
    assert (row.hardware.name, row.hardware.is_known) == ("NVIDIA A100-SXM4-80GB", True)
    assert row.hardware.half_flops_per_s == 312e12


def test_knobs_of_a_line_are_those_of_its_plan() -> None:
    plan = row_of({**LEAST, "tp": 2, "offload": "cpu", "bucket": 5e7, "ckpt": True, "overlap": True}).plan
    assert (plan.tensor, plan.data, plan.offload.optimizer, plan.checkpoint_every) == (2, 2, Offload.CPU, 1)
    assert (plan.zero.reduce_bucket_size, plan.zero.allgather_bucket_size) == (50_000_000, 50_000_000)
    assert plan.zero.overlap_comm


def test_what_torch_asked_for_is_read_from_its_message() -> None:
    row = row_of({**LEAST, "outcome": "oom", "error": "CUDA out of memory. Tried to allocate 1.95 GiB."})
    assert row.is_oom
    assert row.asked_bytes == round(1.95 * GIB)


def test_more_tables_are_named_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = tables()
    path = tmp_path / "mine.jsonl"
    path.write_text(json.dumps(LEAST) + "\n\n", encoding="utf-8")
    monkeypatch.setenv(MORE_TABLES, str(path))
    assert tables() == {**usual, "mine": load_table(path)}
