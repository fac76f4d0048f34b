"""Tables computed by formula, for situations that no recorded table shows."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator

from sweeps.estimate.hardware import Hardware, hardware_of
from sweeps.estimate.memory.model import memory_of
from sweeps.estimate.time.step import time_of
from sweeps.plan.resolve import fingerprint
from sweeps.space.dimensions import Point
from tests.benchmarks.simulator.tables import (
    IMPORTS_S,
    SPREADS,
    Table,
    TableRow,
    h200s,
    knobs_of,
    recorded_table,
    without_constants,
)
from tests.support.recorded import GIB, H200, RECORDED, load_table
from train_entry.contract import DataSpec, FailureKind, ModelShape, Plan

BUCKETS = (20_000_000, 50_000_000, 100_000_000, 200_000_000, 500_000_000)
STEPS_OF_A_JOB = 25  # 3 warm-up, 20 timed and 2 split steps


def bordering_table(excess: float = 1.15, limit_gib: float = 40.0, seed: int = 0) -> Table:
    """Return a table in which every plan needs `excess` times our estimate of its memory.

    Step times are our estimates, each multiplied by a random factor, so plans that use more memory are mostly
    faster.
    """
    draws = random.Random(seed)
    base = load_table(RECORDED / "h200x2_1b3_cap40.jsonl")[0]
    machine = h200s(2)
    hardware = hardware_of(H200.name, "cuda", 2, H200.memory_bytes, H200.host_memory_bytes)
    rows: dict[Plan, TableRow] = {}
    for plan in _plans_at_the_border(base.plan):
        values, plan = knobs_of(plan)
        rows[plan] = _made_up_row(values, plan, base.model, hardware, excess, limit_gib, draws)
    return Table(
        name=f"border x{excess:g}",
        model=base.model,
        machine=machine,
        rows=without_constants(list(rows.values())),
        memory_limit_gib=limit_gib,
    )


def _plans_at_the_border(plan: Plan) -> Iterator[Plan]:
    for stage, micro_batch, checkpoint, bucket in itertools.product(
        range(4), (1, 2, 4, 8, 16), (0, 1, 2, 4), BUCKETS
    ):
        zero = dataclasses.replace(
            plan.zero, stage=stage, reduce_bucket_size=bucket, allgather_bucket_size=bucket
        )
        yield dataclasses.replace(plan, zero=zero, micro_batch=micro_batch, checkpoint_every=checkpoint)


def _made_up_row(
    values: Point,
    plan: Plan,
    model: ModelShape,
    hardware: Hardware,
    excess: float,
    limit_gib: float,
    draws: random.Random,
) -> TableRow:
    peak = round(excess * memory_of(plan, model, hardware).peak_bytes)
    reserved = round(1.08 * peak)
    fails = reserved > limit_gib * GIB
    return TableRow(
        values=values,
        plan=plan,
        fingerprint=fingerprint(plan, model, DataSpec(kind="synthetic")),
        failure=FailureKind.GPU_OOM if fails else None,
        step_s=time_of(plan, model, hardware).step_s * draws.lognormvariate(0, 0.1),
        spread=draws.uniform(*SPREADS),
        startup_s=5.0,
        first_step_s=2.0,
        static_bytes=peak // 2,
        peak_bytes=peak,
        reserved_bytes=reserved,
        card_bytes=reserved + hardware.context_bytes,
    )


def twins() -> Table:
    """Return a table of two plans with the same step time."""
    table = recorded_table("h200x2_1b3_cap40", keep=lambda row: row.plan.zero.stage in (1, 2))
    rows = [row for row in table.rows if row.plan.micro_batch == 8 and row.plan.checkpoint_every]
    rows = [row for row in rows if row.plan.tensor == 1]
    same = [dataclasses.replace(row, step_s=rows[0].step_s, spread=rows[0].spread) for row in rows]
    return dataclasses.replace(table, name="twins", rows=without_constants(same))


def evenly_long(seconds: float, longer: float) -> Table:
    """Return 24 plans for one GPU whose jobs take `seconds`; only the first takes `longer` times as long."""
    base = recorded_table("h200x1_1b3_cap40", keep=lambda row: not row.plan.offload.devices)
    rows: list[TableRow] = []
    for plan in _plans_at_the_border(dataclasses.replace(base.rows[0].plan, ranks=1, global_batch=16)):
        is_kept = plan.zero.reduce_bucket_size == BUCKETS[-1] and plan.checkpoint_every < 2
        if not is_kept or plan.micro_batch > 4:
            continue
        values, plan = knobs_of(plan)
        row = dataclasses.replace(
            base.rows[0],
            values=values,
            plan=plan,
            fingerprint=fingerprint(plan, base.model, DataSpec(kind="synthetic")),
            step_s=1.0,
            spread=0.0,
            first_step_s=1.0,
            startup_s=seconds * (1 if rows else longer) - IMPORTS_S - STEPS_OF_A_JOB,
        )
        rows.append(row)
    return Table(name="evenly long", model=base.model, rows=without_constants(rows), machine=h200s(8))


def distorted(table: Table, seed: int, error: float = 0.1) -> Table:
    """Return a table on which our estimates are worse: each step time is multiplied by a random factor."""
    draws = random.Random(seed)
    rows = [
        dataclasses.replace(row, step_s=row.step_s * draws.lognormvariate(0, error)) for row in table.rows
    ]
    return dataclasses.replace(table, rows=tuple(rows))
