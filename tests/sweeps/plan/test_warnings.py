"""Warnings of plans that are legal but wasteful."""

from __future__ import annotations

from typing import Any

import pytest

from sweeps.plan.warnings import Caution, cautions
from tests.support.examples import a_plan


def texts(**changes: Any) -> list[str]:
    return [caution.text for caution in cautions(a_plan(zero={"stage": 1}, ranks=8, **changes))]


def test_a_plan_without_a_pipeline_needs_no_caution() -> None:
    assert texts(pipeline=1, micro_batch=4, global_batch=32) == []


@pytest.mark.parametrize("micro_batch", [1, 2, 4])
def test_a_pipeline_with_as_many_micro_batches_as_stages_needs_none(micro_batch: int) -> None:
    assert texts(pipeline=4, micro_batch=micro_batch, global_batch=32) == []


def test_fewer_micro_batches_than_stages_leave_stages_waiting() -> None:
    (caution,) = cautions(a_plan(ranks=8, pipeline=4, micro_batch=8, global_batch=32, zero={"stage": 1}))
    assert caution == Caution(
        name="a_pipeline_is_filled",
        text="pipeline=4 with 2 micro-batches per step (gradient accumulation): each stage is idle at least "
        "60% of the time, and they never all work at once; use micro_batch=4, or global_batch=64 or more",
    )


def test_a_single_micro_batch_keeps_one_stage_at_work_at_a_time() -> None:
    (text,) = texts(pipeline=8, micro_batch=8, global_batch=8)
    assert text.startswith(
        "pipeline=8 with 1 micro-batch per step (gradient accumulation): each stage is idle at least 88%"
    )


def test_where_no_smaller_micro_batch_would_do_only_a_larger_batch_is_offered() -> None:
    (text,) = texts(pipeline=4, micro_batch=1, global_batch=4)
    assert text.endswith("they never all work at once; use global_batch=8 or more")


def test_the_largest_micro_batch_that_fills_the_pipeline_is_offered() -> None:
    (text,) = texts(pipeline=2, micro_batch=12, global_batch=48)
    assert text.endswith("; use micro_batch=6, or global_batch=96 or more")


def test_other_degrees_count_in_what_is_offered() -> None:
    (text,) = texts(pipeline=2, tensor=2, micro_batch=4, global_batch=8)
    assert text.endswith("; use micro_batch=2, or global_batch=16 or more")
