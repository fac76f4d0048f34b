"""Other ways to search, on the same table and at the same price a trial.

Each launches one trial after another until its incumbent, the best by its own numbers, has been good enough
for a while, or until it ends by itself. All but DeepSpeed's Autotuning time 20 steps a trial.
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

GOOD = 0.02  # off the optimum
SETTLED = 10  # launches with a good incumbent after which a method without an end is left
MOST_ASKED = 3000
MOST_LAUNCHED = 100  # more than any recorded table has plans
FIXED = MeasureSpec(warmup_steps=3, steps=20, split_steps=0)


@dataclass(kw_only=True)
class Course:
    """What a search did: after each launch, what it had spent and which row it held for the best."""

    table: Table
    method: str
    seed: int
    spent_gpu_s: list[float] = field(default_factory=list)
    incumbents: list[TableRow | None] = field(default_factory=list)
    timed_steps: int = 0
    failures: int = 0
    trials: int = 0  # launches that are no repeats
    announced: TableRow | None = None  # when it ended by itself; None: it has no end

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
        """Spent when the incumbent was good for the first time of those after which it stayed so."""
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
    """Launches rows and pays for them."""

    course: Course
    draws: random.Random
    noise: Noise = field(default_factory=Noise)
    best: tuple[float, TableRow] | None = None

    def buy(self, row: TableRow, measure: MeasureSpec = FIXED) -> float | None:
        """Tokens/s as measured; None: it failed."""
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
    """A rival's search of a table."""
    course = Course(table=table, method=method, seed=seed)
    RIVALS[method](table, Buyer(course=course, draws=random.Random(f"{method} {table.name} {seed}")))
    return course


# ---------------------------------------------------------------- without a model


def at_random(table: Table, buyer: Buyer) -> None:
    """Legal points at random, none of them twice. It has no end before all are known."""
    rows = buyer.draws.sample(table.rows, len(table.rows))
    for row in rows:
        buyer.buy(row)


def whole_grid(table: Table, buyer: Buyer) -> None:
    """Every legal point, in order."""
    for point in table.space.points(table.is_active):
        if (row := table.find(point)) is not None:
            buyer.buy(row)
    buyer.course.announced = buyer.best[1] if buyer.best else None


# ---------------------------------------------------------------- Optuna as in its tutorials


def plain_optuna(
    sampler: Callable[[int], optuna.samplers.BaseSampler], failure: float | None = None
) -> Search:
    """What fails, or is illegal, is pruned, or told as a value; a point proposed twice is measured twice.

    The GP hears nothing of pruned trials, and proposes them again. Numbers in order are suggested by their
    position, knobs only where they matter: as we tell it ourselves.
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
    """Its algorithm as described, in our words: stage by stage, of each the micro-batch, then its buckets.

    It knows neither checkpointing nor degrees: those are the user's. It times steps 3 to 5 of a process. Its
    own arithmetic says what fits; what does not it finds by launching.
    """

    table: Table
    buyer: Buyer
    fast: bool  # it ends with the micro-batches: its default
    others: Others  # what it does not know, as the user has set it
    candidates: int = 3  # micro-batches that are tried between the least and the most that run
    patience: int = 5  # configurations without a better one that end a grid
    measured: dict[str, float | None] = field(default_factory=dict)

    MEASURE = MeasureSpec(warmup_steps=2, steps=3, split_steps=0)
    GAIN = 1.05  # a larger micro-batch must bring so much
    NEAR = (1.05, 1.0, 0.95)  # of the most that its arithmetic gives

    def run(self) -> None:
        self._profile()
        before_most, before_best = 0, 0
        before_value = 0.0
        for stage in range(4):
            most = self._most(stage)
            if most < max(1, before_most):
                continue  # a stage that saves nothing over the one before
            runs = self._running(stage, most)
            if not runs:
                continue
            best, value = self._tune_micro_batch(stage, runs)
            if not self.fast and stage > 0 and (best > before_best or value > before_value):
                self._tune_buckets(stage, best)
            before_most, before_best, before_value = most, best, value
        self.buyer.course.announced = self.buyer.best[1] if self.buyer.best else None

    def _profile(self) -> None:
        """ZeRO-3, micro-batch 1, ended in its first forward pass: what parameters and activations take."""
        row = self._row(3, min(self._micro_batches(3), default=1))
        if row is None:
            return
        forward_s = row.first_step_s / (3 * row.plan.grad_accum)
        self.buyer.pay(Run(row=row, seconds=IMPORTS_S + row.startup_s + forward_s))
        self.buyer.course.incumbents.append(self.buyer.best[1] if self.buyer.best else None)

    def _most(self, stage: int) -> int:
        """Micro-batches that fit by its arithmetic: what states leave, in activations of one sequence."""
        row = self._row(stage, min(self._micro_batches(stage), default=1))
        limit = (self.table.memory_limit_gib or math.inf) * 2**30
        if row is None:
            return 0
        one = deepspeed_autotuning(_with_micro_batch(row, 1), self.table.model) or 0.0
        two = deepspeed_autotuning(_with_micro_batch(row, 2), self.table.model) or 0.0
        each = two - one
        return int((min(limit, self.table.machine.gpus[0].memory_bytes) - (one - each)) // each)

    def _running(self, stage: int, most: int) -> list[int]:
        """Micro-batches from the least to the largest that runs: near its guess first, else by halving."""
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
        """The best of a few, evenly spread; then smaller steps below it, while they gain."""
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
        """The grid of what else the table varies, in order, until nothing better comes for a while."""
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
        """With DeepSpeed's default bucket, where the table has it."""
        rows = list(self._rows(stage, micro_batch))
        return max(rows, key=lambda row: row.plan.zero.reduce_bucket_size, default=None)

    def _rows(self, stage: int, micro_batch: int) -> Iterator[TableRow]:
        for row in self._fixed():
            if row.plan.zero.stage == stage and row.plan.micro_batch == micro_batch:
                yield row

    def _fixed(self) -> Iterable[TableRow]:
        """Rows with what else the user has set."""
        for row in self.table.rows:
            if others_of(row) == self.others and not row.plan.offload.devices:
                yield row


def _with_micro_batch(row: TableRow, micro_batch: int) -> Plan:
    return dataclasses.replace(row.plan, micro_batch=micro_batch)


def autotuning(fast: bool, told: bool) -> Search:
    """`told`: the user has set what it does not know as the optimum has it; else it runs for each setting."""

    def run(table: Table, buyer: Buyer) -> None:
        settings = dict.fromkeys(others_of(row) for row in table.rows)
        for others in [others_of(table.best)] if told else settings:
            Autotuning(table=table, buyer=buyer, fast=fast, others=others).run()

    return run


def others_of(row: TableRow) -> Others:
    return row.plan.checkpoint_every, row.plan.tensor, row.plan.pipeline


def _optuna(name: str, seed: int) -> optuna.samplers.BaseSampler:
    """Each with its defaults."""
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
