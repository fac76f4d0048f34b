"""Other search methods, on the same table and with the same cost per trial.

Each launches one trial after another until it ends by itself, or until its incumbent (the best by its own
measurements) has been good enough for a while. All except DeepSpeed's Autotuning time 20 steps per trial.
"""

from __future__ import annotations

import dataclasses
import math
import random
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import optuna

from sweeps.space.dimensions import Choices, Dimension
from tests.benchmarks.rivals import deepspeed_autotuning
from tests.benchmarks.simulator.replay import Noise, Run, run_of
from tests.benchmarks.simulator.tables import IMPORTS_S, Table, TableRow
from train_entry.contract import MeasureSpec, Plan

GOOD = 0.02  # an incumbent is good if it is slower than the optimum by at most this share
SETTLED = 10  # a method without an end is stopped after this many launches with a good incumbent
MOST_ASKED = 3000
MOST_LAUNCHED = 100  # more than any recorded table has plans
FIXED = MeasureSpec(warmup_steps=3, steps=20, split_steps=0)


@dataclass(kw_only=True)
class Course:
    """The course of a search: its cost and its incumbent after each launch."""

    table: Table
    method: str
    seed: int
    spent_gpu_s: list[float] = field(default_factory=list)
    incumbents: list[TableRow | None] = field(default_factory=list)
    timed_steps: int = 0
    failures: int = 0
    trials: int = 0  # launches that are not repeats
    announced: TableRow | None = None  # the winner when it ended by itself; None: it has no end

    @property
    def total_gpu_s(self) -> float:
        return self.spent_gpu_s[-1] if self.spent_gpu_s else 0.0

    @property
    def launches(self) -> int:
        return len(self.spent_gpu_s)

    def is_good(self, row: TableRow | None) -> bool:
        return row is not None and self.table.shortfall(row) <= GOOD

    @property
    def found_gpu_s(self) -> float | None:
        """The cost after which the incumbent was good and stayed good; None if it was not."""
        found: float | None = None
        for spent, row in zip(self.spent_gpu_s, self.incumbents, strict=True):
            if not self.is_good(row):
                found = None
            elif found is None:
                found = spent
        return found

    @property
    def is_settled(self) -> bool:
        last = self.incumbents[-SETTLED:]
        return len(last) == SETTLED and all(map(self.is_good, last))


@dataclass(kw_only=True)
class Buyer:
    """Launch rows of the table and record their cost in the course."""

    course: Course
    draws: random.Random
    noise: Noise = field(default_factory=Noise)
    best: tuple[float, TableRow] | None = None

    def buy(self, row: TableRow, measure: MeasureSpec = FIXED) -> float | None:
        """Launch a row and return the measured tokens/s; None if it failed."""
        run = run_of(row, measure, self.noise, self.draws)
        self.pay(run)
        value = run.value
        if value is not None and (self.best is None or value > self.best[0]):
            self.best = (value, row)
        self.course.incumbents.append(self.best[1] if self.best else None)
        return value

    def pay(self, run: Run) -> None:
        course = self.course
        course.spent_gpu_s.append(course.total_gpu_s + run.row.plan.ranks * run.seconds)
        course.timed_steps += len(run.timed_s)
        course.failures += run.row.failure is not None
        course.trials += 1


Search = Callable[[Table, Buyer], None]
Others = tuple[int, int, int]  # checkpointing, tensor, pipeline


def search(method: str, table: Table, seed: int) -> Course:
    """Run another method's search of a table."""
    course = Course(table=table, method=method, seed=seed)
    RIVALS[method](table, Buyer(course=course, draws=random.Random(f"{method} {table.name} {seed}")))
    return course


# ---------------------------------------------------------------- random and exhaustive search


def at_random(table: Table, buyer: Buyer) -> None:
    """Launch all legal points in random order, none twice."""
    rows = buyer.draws.sample(table.rows, len(table.rows))
    for row in rows:
        buyer.buy(row)


def whole_grid(table: Table, buyer: Buyer) -> None:
    """Launch every legal point in order, and announce the best."""
    for point in table.space.points(table.is_active):
        if (row := table.find(point)) is not None:
            buyer.buy(row)
    buyer.course.announced = buyer.best[1] if buyer.best else None


# ---------------------------------------------------------------- Optuna, used as in its tutorials


def plain_optuna(
    sampler: Callable[[int], optuna.samplers.BaseSampler], failure: float | None = None
) -> Search:
    """Return a search by an Optuna sampler.

    A failed or illegal trial is pruned, or told with the value `failure`. A point proposed twice is measured
    twice. The GP ignores pruned trials and may propose them again. As in our own search, ordered values are
    suggested by their position, and a knob only where it is active.
    """

    def run(table: Table, buyer: Buyer) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optuna.logging.set_verbosity(optuna.logging.ERROR)
            study = optuna.create_study(direction="maximize", sampler=sampler(buyer.draws.getrandbits(31)))
            for _ in range(MOST_ASKED):
                if buyer.course.is_settled or buyer.course.launches >= MOST_LAUNCHED:
                    return
                _ask_and_tell(study, table, buyer, failure)

    return run


def _ask_and_tell(study: optuna.Study, table: Table, buyer: Buyer, failure: float | None) -> None:
    trial = study.ask()
    point = table.space.build(lambda dimension: _suggest(trial, dimension), table.is_active)
    row = table.find(point)
    value = buyer.buy(row) if row else None
    value = failure if value is None else value
    if value is None:
        study.tell(trial, state=optuna.trial.TrialState.PRUNED)
    else:
        study.tell(trial, value)


def _suggest(trial: optuna.trial.Trial, dimension: Dimension) -> Any:
    found = dimension.range
    assert isinstance(found, Choices), "a table's space is finite"
    if found.is_ordinal:
        return found.values[trial.suggest_int(dimension.key, 0, len(found.values) - 1)]
    return trial.suggest_categorical(dimension.key, found.values)


# ---------------------------------------------------------------- DeepSpeed's Autotuning


@dataclass(kw_only=True)
class Autotuning:
    """DeepSpeed's Autotuning, after its description: per stage it tunes the micro-batch, then the buckets.

    It does not tune checkpointing or degrees; the user sets them. It times steps 3 to 5 of a process. Its own
    formula says which micro-batches fit; where that is wrong, launches fail.
    """

    table: Table
    buyer: Buyer
    fast: bool  # tune only micro-batches, which is its default
    others: Others  # the knobs that it does not tune, as the user has set them
    candidates: int = 3  # number of micro-batches to try between the least and the largest that run
    patience: int = 5  # a grid ends after this many configurations without a better one
    measured: dict[str, float | None] = field(default_factory=dict)

    MEASURE = MeasureSpec(warmup_steps=2, steps=3, split_steps=0)
    GAIN = 1.05  # the least gain of a larger micro-batch
    NEAR = (1.05, 1.0, 0.95)  # shares of the largest micro-batch by its formula

    def run(self) -> None:
        self._profile()
        before_most, before_best = 0, 0
        before_value = 0.0
        for stage in range(4):
            most = self._most(stage)
            if most < max(1, before_most):
                continue  # this stage saves no memory over the previous one
            runs = self._running(stage, most)
            if not runs:
                continue
            best, value = self._tune_micro_batch(stage, runs)
            if not self.fast and stage > 0 and (best > before_best or value > before_value):
                self._tune_buckets(stage, best)
            before_most, before_best, before_value = most, best, value
        self.buyer.course.announced = self.buyer.best[1] if self.buyer.best else None

    def _profile(self) -> None:
        """Pay for its profiling run: ZeRO-3, micro-batch 1, ended in the first forward pass."""
        row = self._row(3, min(self._micro_batches(3), default=1))
        if row is None:
            return
        forward_s = row.first_step_s / (3 * row.plan.grad_accum)
        self.buyer.pay(Run(row=row, seconds=IMPORTS_S + row.startup_s + forward_s))
        self.buyer.course.incumbents.append(self.buyer.best[1] if self.buyer.best else None)

    def _most(self, stage: int) -> int:
        """The largest micro-batch by its formula: memory without states over activations per sequence."""
        row = self._row(stage, min(self._micro_batches(stage), default=1))
        limit = (self.table.memory_limit_gib or math.inf) * 2**30
        if row is None:
            return 0
        one = deepspeed_autotuning(_with_micro_batch(row, 1), self.table.model) or 0.0
        two = deepspeed_autotuning(_with_micro_batch(row, 2), self.table.model) or 0.0
        each = two - one
        return int((min(limit, self.table.machine.gpus[0].memory_bytes) - (one - each)) // each)

    def _running(self, stage: int, most: int) -> list[int]:
        """Return the micro-batches up to the largest that runs.

        It tries sizes near its own estimate first, then bisects.
        """
        sizes = self._micro_batches(stage)
        if not sizes or self._value(stage, sizes[0]) is None:
            return []
        for share in self.NEAR:
            near = max((size for size in sizes if size <= share * most), default=sizes[0])
            if self._value(stage, near) is not None:
                return [size for size in sizes if size <= near]
        low, high = 0, len(sizes) - 1
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._value(stage, sizes[middle]) is not None else (low, middle - 1)
        return sizes[: low + 1]

    def _tune_micro_batch(self, stage: int, runs: list[int]) -> tuple[int, float]:
        """Return the best of a few evenly spread micro-batches, or a better smaller one next to it."""
        stride = max(1, len(runs) // self.candidates)
        best, best_value = runs[0], self._value(stage, runs[0]) or 0.0
        for size in [*runs[::-1][: self.candidates * stride : stride]][::-1]:
            value = self._value(stage, size)
            if value is not None and value > best_value:
                best, best_value = size, value
        index = runs.index(best)
        for size in runs[:index][::-1]:
            value = self._value(stage, size)
            if value is None or value <= best_value:
                break
            best, best_value = size, value
        return best, best_value

    def _tune_buckets(self, stage: int, micro_batch: int) -> None:
        """Launch the grid of the remaining knobs, in order, until `patience` launches bring no gain."""
        best, since = 0.0, 0
        for row in self._rows(stage, micro_batch):
            value = self._measure(row)
            better = value is not None and value > best
            best, since = (value or best, 0) if better else (best, since + 1)
            if since >= self.patience:
                return

    def _value(self, stage: int, micro_batch: int) -> float | None:
        row = self._row(stage, micro_batch)
        return self._measure(row) if row else None

    def _measure(self, row: TableRow) -> float | None:
        if row.fingerprint not in self.measured:
            self.measured[row.fingerprint] = self.buyer.buy(row, self.MEASURE)
        return self.measured[row.fingerprint]

    def _micro_batches(self, stage: int) -> list[int]:
        return sorted({row.plan.micro_batch for row in self._fixed() if row.plan.zero.stage == stage})

    def _row(self, stage: int, micro_batch: int) -> TableRow | None:
        """The row with the largest bucket, which is DeepSpeed's default where the table has it."""
        rows = list(self._rows(stage, micro_batch))
        return max(rows, key=lambda row: row.plan.zero.reduce_bucket_size, default=None)

    def _rows(self, stage: int, micro_batch: int) -> Iterator[TableRow]:
        for row in self._fixed():
            if row.plan.zero.stage == stage and row.plan.micro_batch == micro_batch:
                yield row

    def _fixed(self) -> Iterable[TableRow]:
        """The rows with the user's settings of the knobs that it does not tune."""
        for row in self.table.rows:
            if others_of(row) == self.others and not row.plan.offload.devices:
                yield row


def _with_micro_batch(row: TableRow, micro_batch: int) -> Plan:
    return dataclasses.replace(row.plan, micro_batch=micro_batch)


def autotuning(fast: bool, told: bool) -> Search:
    """Return Autotuning's search.

    With `told`, the user has set the knobs that it does not tune to the optimum's values; otherwise it runs
    once for each setting of them.
    """

    def run(table: Table, buyer: Buyer) -> None:
        settings = dict.fromkeys(others_of(row) for row in table.rows)
        for others in [others_of(table.best)] if told else settings:
            Autotuning(table=table, buyer=buyer, fast=fast, others=others).run()

    return run


def others_of(row: TableRow) -> Others:
    return row.plan.checkpoint_every, row.plan.tensor, row.plan.pipeline


def _optuna(name: str, seed: int) -> optuna.samplers.BaseSampler:
    """Return an Optuna sampler with its defaults."""
    samplers: dict[str, Any] = {
        "tpe": optuna.samplers.TPESampler,
        "gp": optuna.samplers.GPSampler,
        "nsga2": optuna.samplers.NSGAIISampler,
    }
    sampler: optuna.samplers.BaseSampler = samplers[name](seed=seed)
    return sampler


RIVALS: dict[str, Search] = {
    "random": at_random,
    "full grid": whole_grid,
    "Optuna TPE": plain_optuna(lambda seed: _optuna("tpe", seed)),
    "Optuna GP": plain_optuna(lambda seed: _optuna("gp", seed)),
    "Optuna GP, failures told as 0": plain_optuna(lambda seed: _optuna("gp", seed), failure=0.0),
    "Optuna NSGA-II": plain_optuna(lambda seed: _optuna("nsga2", seed)),
    "Autotuning, told the rest": autotuning(fast=True, told=True),
    "Autotuning, fast=false, told": autotuning(fast=False, told=True),
    "Autotuning, for each setting": autotuning(fast=True, told=False),
    "Autotuning, fast=false, each": autotuning(fast=False, told=False),
}
