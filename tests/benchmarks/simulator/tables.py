"""Tables of plans and their results, recorded from real trials, from which a simulated cluster answers.

A table's rows are jobs: configurations that would run the same job share a row.
"""

from __future__ import annotations

import dataclasses
import json
import random
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sweeps.config.schema import ClusterConfig
from sweeps.machine import Gpu, Machine
from sweeps.plan.resolve import fingerprint
from sweeps.space.dimensions import Choices, Dimension, Point, SearchSpace
from tests.support.recorded import GIB, H200, RECORDED, Row, load_table
from train_entry.contract import DataSpec, Engine, FailureKind, ModelShape, Plan, Scalar, load

IMPORTS_S = 12.0  # a fresh process imports torch, DeepSpeed and transformers, without page cache
DEFAULTS: Point = {
    "activation_checkpointing": "none",
    "zero.reduce_bucket_size": 500_000_000,
    "tensor": 1,
    "pipeline": 1,
    "zero.overlap_comm": True,
    "zero.offload_optimizer": "none",
    "zero.offload_param": "none",
    "engine": "deepspeed",
}
CHECKPOINTING = {0: "none", 1: "full"}  # other values: every k-th block
ORDER = ("strategy", "tensor", "micro_batch", "activation_checkpointing", "zero.reduce_bucket_size")
LEAST_STEPS = 8  # with fewer recorded steps, the spread is drawn from SPREADS
SPREADS = (0.003, 0.01)  # range of the relative spread of step times within a process, from longer records


@dataclass(frozen=True, kw_only=True, slots=True)
class TableRow:
    """A job and its true results. Sizes are those of the fullest rank, in bytes."""

    values: Point  # the knobs that matter
    plan: Plan
    fingerprint: str
    failure: FailureKind | None
    step_s: float  # the true step time: median of the recorded steps; 0 or meaningless for a failure
    spread: float  # standard deviation of a step over the mean, within a process
    startup_s: float  # from the end of the imports to the first step
    first_step_s: float  # for a failure, the time until it fails
    static_bytes: int
    peak_bytes: int
    reserved_bytes: int
    card_bytes: int
    loss: float = 3.0

    @property
    def tokens_per_s(self) -> float:
        """The true throughput; 0 for a failure."""
        return 0.0 if self.failure else self.plan.tokens_per_step / self.step_s


@dataclass(frozen=True, kw_only=True)
class Table:
    """One model on one machine."""

    name: str
    model: ModelShape
    machine: Machine
    rows: tuple[TableRow, ...]
    memory_limit_gib: float | None = None  # what torch may reserve on each GPU; None: no limit

    def __post_init__(self) -> None:
        by_values = {_key(row.values): row for row in self.rows}
        assert len(by_values) == len(self.rows), "no two rows have the same knobs"
        object.__setattr__(self, "_by_values", by_values)
        object.__setattr__(self, "_by_plan", {row.plan: row for row in self.rows})
        object.__setattr__(self, "_knobs", _knobs_by_strategy(self.rows))

    @property
    def best(self) -> TableRow:
        return max(self.rows, key=lambda row: row.tokens_per_s)

    def shortfall(self, row: TableRow) -> float:
        """The share by which a row is slower than the optimum: 0.02 is two percent."""
        return 1 - row.tokens_per_s / self.best.tokens_per_s

    @property
    def space(self) -> SearchSpace:
        """All knobs that vary, with the values that they take in the rows."""
        keys = {key for row in self.rows for key in row.values}
        ordered = [*(key for key in ORDER if key in keys), *sorted(keys - set(ORDER))]
        found = [(key, {row.values[key]: None for row in self.rows if key in row.values}) for key in ordered]
        return SearchSpace(
            dimensions=tuple(_dimension(key, tuple(values)) for key, values in found if len(values) > 1)
        )

    def is_active(self, key: str, point: Mapping[str, Scalar]) -> bool:
        """True if any row of the point's strategy has the knob."""
        return key == "strategy" or key in self._of_strategy(point.get("strategy"))

    def find(self, values: Mapping[str, Scalar]) -> TableRow | None:
        """Return a configuration's row, or None. Values of knobs that do not matter are ignored."""
        wanted = {**DEFAULTS, **values}
        if "zero.stage" in values or values.get("engine") == "ddp":
            suffix = "_offload" if wanted["zero.offload_optimizer"] == "cpu" else ""
            wanted["strategy"] = (
                "ddp" if wanted["engine"] == "ddp" else f"zero{values.get('zero.stage', 0)}{suffix}"
            )
        if wanted.get("ranks", self.ranks) != self.ranks:
            return None
        knobs = self._of_strategy(wanted.get("strategy"))
        point = {key: wanted[key] for key in knobs if key in wanted}
        if any(values[key] != DEFAULTS[key] for key in values if key in DEFAULTS and key not in self.keys):
            return None
        found: TableRow | None = self._by_values.get(_key(point))  # type: ignore[attr-defined]
        return found

    def row_of(self, plan: Plan) -> TableRow:
        found: TableRow = self._by_plan[plan]  # type: ignore[attr-defined]
        return found

    @property
    def ranks(self) -> int:
        return self.rows[0].plan.ranks

    @property
    def keys(self) -> frozenset[str]:
        return frozenset(key for row in self.rows for key in row.values)

    def _of_strategy(self, strategy: Scalar) -> Sequence[str]:
        found: Mapping[Scalar, Sequence[str]] = self._knobs  # type: ignore[attr-defined]
        return found.get(strategy, ())

    @property
    def cluster_config(self) -> ClusterConfig:
        return ClusterConfig(memory_limit_gib=self.memory_limit_gib, limit_counts_context=False)


def _key(values: Mapping[str, Scalar]) -> frozenset[tuple[str, Scalar]]:
    return frozenset(values.items())


def _knobs_by_strategy(rows: Iterable[TableRow]) -> dict[Scalar, tuple[str, ...]]:
    knobs: dict[Scalar, dict[str, None]] = {}
    for row in rows:
        knobs.setdefault(row.values.get("strategy"), {}).update(dict.fromkeys(row.values))
    return {strategy: tuple(keys) for strategy, keys in knobs.items()}


def _dimension(key: str, values: tuple[Scalar, ...]) -> Dimension:
    if all(isinstance(value, int) and not isinstance(value, bool) for value in values):
        values = tuple(sorted(values, key=lambda value: float(value or 0)))
    elif key == "strategy":
        values = tuple(sorted(values, key=str))
    return Dimension(key=key, text=",".join(map(str, values)), range=Choices(values=values))


# ---------------------------------------------------------------- from recorded trials


def recorded_tables() -> dict[str, Table]:
    """Return the tables of tests/data/recorded that are whole grids of one model."""
    found = [
        recorded_table("h200x1_1b3_cap40", keep=lambda row: not row.plan.offload.devices),
        # It has only single rows with other buckets or without overlap.
        recorded_table(
            "h200x2_1b3_cap40",
            keep=lambda row: row.plan.zero.overlap_comm and row.plan.zero.reduce_bucket_size == 500_000_000,
        ),
    ]
    if (RECORDED / "h200x2_half_cap24.jsonl").is_file():
        # Its strategies are no full product of stages and degrees.
        found.append(recorded_table("h200x2_half_cap24", by_name=True, wall_has_imports=True))
    return {table.name: table for table in found}


def recorded_table(
    name: str, keep: Any = lambda row: True, by_name: bool = False, wall_has_imports: bool = False
) -> Table:
    """Load a recorded table. With `by_name`, degrees are part of the strategy and not separate knobs."""
    kept = [row for row in load_table(RECORDED / f"{name}.jsonl") if keep(row) and _is_telling(row)]
    first = kept[0]
    startup_s = statistics.median(_startup_s(row) for row in kept if not row.is_oom)
    draws = random.Random(name)
    failing_s = startup_s + (IMPORTS_S if wall_has_imports else 0.0)
    rows = _merged([_recorded_row(row, by_name, startup_s, failing_s, draws) for row in kept])
    return Table(
        name=name,
        model=first.model,
        machine=h200s(first.plan.ranks),
        rows=without_constants(rows),
        memory_limit_gib=first.cap_bytes / GIB,
    )


def h200s(count: int) -> Machine:
    gpus = tuple(
        Gpu(index=i, uuid=f"GPU-{i}", name=H200.name, memory_bytes=H200.memory_bytes, capability=(9, 0))
        for i in range(count)
    )
    return Machine(
        device="cuda",
        nodes=1,
        ranks_per_node=count,
        gpus=gpus,
        cores=64,
        host_memory_bytes=H200.host_memory_bytes,
    )


def _is_telling(row: Row) -> bool:
    return row.is_oom or len(row.steps_s) > 1


def _startup_s(row: Row) -> float:
    """The recorded seconds until the first step, which is recorded separately."""
    return sum(seconds for phase, seconds in row.startup_s.items() if phase != "first")


def _recorded_row(
    row: Row, by_name: bool, startup_s: float, failing_s: float, draws: random.Random
) -> TableRow:
    values, plan = knobs_of(row.plan, by_name)
    steps_s = row.steps_s[1:]
    drawn = draws.uniform(*SPREADS)
    return TableRow(
        values=values,
        plan=plan,
        fingerprint=fingerprint(plan, row.model, DataSpec(kind="synthetic")),
        failure=FailureKind.GPU_OOM if row.is_oom else None,
        step_s=statistics.median(steps_s) if steps_s else 0.0,
        spread=_spread(steps_s) if len(steps_s) >= LEAST_STEPS else drawn,
        startup_s=startup_s if row.is_oom else _startup_s(row),
        first_step_s=max(0.5, (row.wall_s or 0.0) - failing_s) if row.is_oom else row.steps_s[0],
        static_bytes=row.static_bytes or 0,
        peak_bytes=row.peak_bytes or 0,
        reserved_bytes=row.reserved_bytes or row.peak_bytes or 0,
        card_bytes=row.card_bytes or 0,
    )


def knobs_of(plan: Plan, by_name: bool = False) -> tuple[Point, Plan]:
    """Return a plan's knobs, and the plan with knobs that do not matter at their defaults."""
    shards = plan.engine is Engine.DEEPSPEED and plan.zero.stage > 0
    suffix = "_offload" if plan.offload.devices else ""
    degrees: Point = {} if by_name else {"tensor": plan.tensor, "pipeline": plan.pipeline}
    values: Point = {
        "strategy": plan.strategy if by_name else f"zero{plan.zero.stage}{suffix}",
        **degrees,
        "micro_batch": plan.micro_batch,
        "activation_checkpointing": CHECKPOINTING.get(plan.checkpoint_every, str(plan.checkpoint_every)),
    }
    if shards:
        values["zero.reduce_bucket_size"] = plan.zero.reduce_bucket_size
        values["zero.overlap_comm"] = plan.zero.overlap_comm
    else:
        idle = dataclasses.replace(
            plan.zero, reduce_bucket_size=500_000_000, allgather_bucket_size=500_000_000
        )
        plan = dataclasses.replace(plan, zero=idle)
    return values, plan


def _spread(steps_s: Sequence[float]) -> float:
    """The relative spread by the interquartile range: slow single steps are hiccups, simulated separately."""
    lower, median, upper = statistics.quantiles(steps_s, n=4)
    return max(0.001, (upper - lower) / 1.349 / median)


def _merged(rows: Iterable[TableRow]) -> list[TableRow]:
    """Merge the records of each job into one row with their mean step time."""
    by_plan: dict[Plan, list[TableRow]] = {}
    for row in rows:
        by_plan.setdefault(row.plan, []).append(row)
    return [
        dataclasses.replace(same[0], step_s=statistics.fmean(row.step_s for row in same))
        for same in by_plan.values()
    ]


def without_constants(rows: Sequence[TableRow]) -> tuple[TableRow, ...]:
    """Drop the knobs that do not vary within any strategy."""
    seen: dict[tuple[str, Scalar], set[Scalar]] = {}
    for row in rows:
        for key, value in row.values.items():
            seen.setdefault((key, row.values["strategy"]), set()).add(value)
    varies = {key for (key, _), values in seen.items() if len(values) > 1}
    varies |= {"strategy"} if len({row.values["strategy"] for row in rows}) > 1 else set()
    return tuple(
        dataclasses.replace(row, values={k: v for k, v in row.values.items() if k in varies}) for row in rows
    )


# ---------------------------------------------------------------- from our own studies


def exported_table(path: Path) -> Table:
    """Load a table written by `python -m analysis export-table` from a study on H200s with one rank count."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    header, raws = lines[0], lines[1:]
    rows = tuple(_exported_rows([raw for raw in raws if not raw.get("yardstick")]))
    limits = [raw["memory_limit_bytes"] for raw in raws if raw.get("memory_limit_bytes")]
    return Table(
        name=header["study"],
        model=load(ModelShape, json.dumps(header["model"])),
        machine=h200s(rows[0].plan.ranks),
        rows=rows,
        memory_limit_gib=max(limits) / GIB if limits else None,
    )


def _exported_rows(raws: Sequence[Mapping[str, Any]]) -> Iterator[TableRow]:
    seen: set[str] = set()
    for raw in raws:
        if raw["fingerprint"] in seen or (raw["outcome"] == "ok" and len(raw["step_s"]) < 2):
            continue
        seen.add(raw["fingerprint"])
        warmup_s, steps_s = raw.get("warmup_s") or [0.0], raw["step_s"]
        is_ok = raw["outcome"] == "ok"
        yield TableRow(
            values=raw["values"],
            plan=load(Plan, json.dumps(raw["plan"])),
            fingerprint=raw["fingerprint"],
            failure=None if is_ok else _failure_kind(raw["outcome"]),
            step_s=statistics.median(steps_s) if is_ok else 0.0,
            spread=_spread(steps_s) if len(steps_s) >= LEAST_STEPS else SPREADS[1],
            startup_s=max(0.0, (raw["startup_s"] or raw["seconds"]) - IMPORTS_S - warmup_s[0]),
            first_step_s=warmup_s[0],
            static_bytes=raw["peak_bytes"] or 0,
            peak_bytes=raw["peak_bytes"] or 0,
            reserved_bytes=raw["reserved_bytes"] or 0,
            card_bytes=raw["reserved_bytes"] or 0,
            loss=raw["loss"] or 3.0,
        )


def _failure_kind(outcome: str) -> FailureKind:
    return FailureKind.GPU_OOM if outcome == "oom" else next(kind for kind in FailureKind if kind == outcome)
