"""Print the errors of step time estimates on recorded trials: `make bench`. No job runs.

Errors are printed before any trial and after learning from some, beside those of simpler models on the same
rows. A timed row has only two steps, which differ by a few percent; the errors are uncertain by as much. The
host's time per operation was derived from these same tables, so errors before any trial are smaller here than
on another machine. The test that begins with wrong factors shows how much trials then correct.
"""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from sweeps.estimate.flops import flops_per_token, recomputed_flops_per_token
from sweeps.estimate.hardware import Hardware
from sweeps.estimate.time.collectives import data_group
from sweeps.estimate.time.fitting import TimeObservation, fit_time, quantile_s
from sweeps.estimate.time.step import COLD, TimeFactors, time_of
from tests.support.recorded import Row, tables
from train_entry.contract import Engine, ModelShape, Plan

CHOICES = 100  # random sets of calibration trials
TRIALS = (1, 3, 8)
PREDICTED_BEST = 5
ESTIMATES = 5000
MFU = 0.45  # published trainings of 1 to 8 billion parameters on one node reach this
EFFICIENCY = 0.5  # the value that llm-analysis uses in its validation on LLaMA
# Factors of a machine whose GPU is slower and whose host is faster than the constants say.
WRONG = dataclasses.replace(
    COLD, compute=0.7, launch=1.8, hooks=1.2, communication=0.5, offload=0.6, update=0.7
)

Predictor = Callable[[Row], float]  # seconds per step
Learner = Callable[[Sequence[Row]], Predictor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """A predictor's errors on rows that it has not seen. `finds_best` is over all rows, as in a study."""

    median: float
    p95: float
    correlation: float
    finds_best: float

    @property
    def line(self) -> str:
        return (
            f"{100 * self.median:7.1f}% {100 * self.p95:7.1f}% {self.correlation:8.3f}"
            f" {100 * self.finds_best:9.0f}%"
        )


def timed_tables() -> dict[str, list[Row]]:
    timed = {name: [row for row in rows if is_timed(row)] for name, rows in tables().items()}
    return {name: rows for name, rows in timed.items() if len(rows) > max(TRIALS)}


def is_timed(row: Row) -> bool:
    return not row.is_oom and len(row.steps_s) > 1


def step_s(row: Row) -> float:
    """The median step time in seconds, without the first step, which is warm-up."""
    return statistics.median(row.steps_s[1:])


# ---------------------------------------------------------------- predictors


def ours(seen: Sequence[Row]) -> Predictor:
    factors = factors_of(seen)
    return lambda row: time_of(row.plan, row.model, row.hardware, factors).step_s


def from_wrong_factors(seen: Sequence[Row]) -> Predictor:
    factors = factors_of(seen, WRONG)
    return lambda row: time_of(row.plan, row.model, row.hardware, factors).step_s


def factors_of(seen: Sequence[Row], start: TimeFactors = COLD) -> TimeFactors:
    observations = [
        TimeObservation(plan=row.plan, model=row.model, hardware=row.hardware, step_s=step_s(row))
        for row in seen
    ]
    return fit_time(observations, start)


def scaled(model: Predictor) -> Learner:
    """Return a learner that scales a model by one factor, the median ratio over the rows seen."""

    def learn(seen: Sequence[Row]) -> Predictor:
        ratios = [step_s(row) / model(row) for row in seen]
        factor = statistics.median(ratios) if ratios else 1.0
        return lambda row: factor * model(row)

    return learn


def flops_alone(row: Row) -> float:
    """Predict from FLOPs at one utilization, with 8 P instead of 6 P FLOPs if blocks are recomputed."""
    return computing_s(row, MFU)


def textbook(row: Row) -> float:
    """Predict from FLOPs at one efficiency, transfers over the link, and an update at memory bandwidth.

    As in llm-analysis, communication does not overlap with computing, and the host takes no time.
    """
    plan, hardware = row.plan, row.hardware
    held = row.model.parameters / (plan.tensor * plan.pipeline)
    stage = plan.zero.stage if plan.engine is Engine.DEEPSPEED else 0
    exchanged = 0.0
    if plan.data > 1:
        group = data_group(plan, hardware)
        exchanged = group.all_reduce_s(2 * held) * (1.5 if stage == 3 else 1)
    update = 16 * held / (plan.data if stage else 1) / hardware.memory_bytes_per_s
    return computing_s(row, EFFICIENCY) + exchanged + update


def computing_s(row: Row, share: float) -> float:
    count = recomputed_flops_per_token if row.plan.checkpoint_every else flops_per_token
    rate = share * row.hardware.flops_per_s(row.plan.precision) * row.plan.ranks
    return row.plan.tokens_per_step * count(row.model, row.plan.seq_len) / rate


def nearest(seen: Sequence[Row]) -> Predictor:
    """Predict the step time of the most similar trial seen."""
    return lambda row: step_s(min(seen, key=lambda other: distance(row.plan, other.plan)))


def distance(one: Plan, other: Plan) -> float:
    """The distance of two plans: 1 per changed knob, and 1 per doubling of the micro-batch."""
    knobs = [
        (plan.strategy, plan.tensor, bool(plan.checkpoint_every), plan.zero.overlap_comm)
        for plan in (one, other)
    ]
    changed = sum(a != b for a, b in zip(*knobs, strict=True))
    return float(changed + abs(math.log2(one.micro_batch / other.micro_batch)))


def mean(seen: Sequence[Row]) -> Predictor:
    average = math.exp(statistics.fmean(math.log(step_s(row)) for row in seen))
    return lambda row: average


LEARNERS: dict[str, Learner] = {
    "shardsweep": ours,
    f"FLOPs at MFU {MFU}": lambda seen: flops_alone,
    "FLOPs, MFU fitted": scaled(flops_alone),
    f"textbook at {EFFICIENCY}": lambda seen: textbook,
    "textbook, fitted": scaled(textbook),
    "nearest trial": nearest,
    "mean of trials": mean,
}
NEED_TRIALS = ("nearest trial", "mean of trials")


# ---------------------------------------------------------------- scores


def score(predict: Predictor, rows: Sequence[Row], others: Sequence[Row]) -> Score:
    errors = sorted(abs(predict(row) / step_s(row) - 1) for row in others)
    ranked = sorted(rows, key=lambda row: -row.plan.tokens_per_step / predict(row))
    best = max(rows, key=lambda row: row.plan.tokens_per_step / step_s(row))
    return Score(
        median=statistics.median(errors),
        p95=errors[math.ceil(0.95 * len(errors)) - 1],
        correlation=spearman([predict(row) for row in others], [step_s(row) for row in others]),
        finds_best=float(best in ranked[:PREDICTED_BEST]),
    )


def averaged(scores: Sequence[Score]) -> Score:
    """Combine scores over choices of calibration trials: medians, and the share of `finds_best`."""
    return Score(
        median=statistics.median(one.median for one in scores),
        p95=statistics.median(one.p95 for one in scores),
        correlation=statistics.median(one.correlation for one in scores),
        finds_best=statistics.fmean(one.finds_best for one in scores),
    )


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the rank correlation; 0 if all values of `one` are equal."""
    if len(set(one)) < 2:
        return 0.0
    return statistics.correlation(ranks(one), ranks(other))


def ranks(values: Sequence[float]) -> list[float]:
    """Return the ranks of values. Equal values get the mean of their ranks."""
    ordered = sorted(values)
    return [ordered.index(value) + (ordered.count(value) - 1) / 2 for value in values]


def after(learn: Learner, rows: Sequence[Row], trials: int) -> Score:
    chooser = random.Random(0)  # the same choices for every learner
    scores = []
    for _ in range(CHOICES if trials else 1):
        seen = chooser.sample(range(len(rows)), trials)
        others = [row for index, row in enumerate(rows) if index not in seen]
        scores.append(score(learn([rows[index] for index in seen]), rows, others))
    return averaged(scores)


# ---------------------------------------------------------------- printing


@pytest.mark.parametrize("table", timed_tables())
def test_step_times_are_known_before_and_after_some_trials(table: str) -> None:
    rows = timed_tables()[table]
    steps = [max(row.steps_s[1:]) / min(row.steps_s[1:]) - 1 for row in rows]
    print(f"\n{table}: {len(rows)} rows; two timed steps of a row differ by {statistics.median(steps):.1%}")
    print("trials seen  model                 median      p95 spearman best in 5")
    for trials in (0, *TRIALS):
        for name, learn in LEARNERS.items():
            if trials or name not in NEED_TRIALS:
                print(f"{trials:11d}  {name:18} {after(learn, rows, trials).line}")
    assert after(ours, rows, 0).median < 1


@pytest.mark.parametrize("table", timed_tables())
def test_step_times_after_another_table(table: str) -> None:
    """Fit to all trials of another table, which has another number of GPUs."""
    rows = timed_tables()[table]
    print(f"\n{'fitted to':30} scored on {table}:  median      p95 spearman best in 5")
    print(f"{'nothing':30} {score(ours([]), rows, rows).line}")
    for name, seen in timed_tables().items():
        where = f"{name} (itself)" if name == table else name
        print(f"{where:30} {score(ours(seen), rows, rows).line}")
    assert rows


@pytest.mark.parametrize("table", timed_tables())
def test_trials_mend_wrong_factors(table: str) -> None:
    rows = timed_tables()[table]
    print(f"\n{table}, beginning with {WRONG.named}")
    print("trials seen     median      p95 spearman best in 5")
    for trials in (0, *TRIALS):
        print(f"{trials:11d}    {after(from_wrong_factors, rows, trials).line}")
    assert after(from_wrong_factors, rows, max(TRIALS)).median < 1


@pytest.mark.parametrize("table", timed_tables())
def test_a_quantile_covers_its_share(table: str) -> None:
    rows = timed_tables()[table]
    print(f"\n{table}: share of other rows below the 90% quantile, and the factors of one choice of trials")
    for trials in (0, *TRIALS):
        chooser = random.Random(1)
        below, factors = [], COLD
        for _ in range(CHOICES if trials else 1):
            seen = chooser.sample(rows, trials)
            factors = factors_of(seen)
            below += [is_below(row, factors) for row in rows if row not in seen]
        named = " ".join(f"{name}={value:.2f}" for name, value in factors.named.items())
        print(f"{trials:3d} trials {statistics.fmean(below):6.1%}  {named} spread={factors.spread:.2f}")
    assert below


def is_below(row: Row, factors: TimeFactors) -> bool:
    estimate = time_of(row.plan, row.model, row.hardware, factors)
    return step_s(row) <= quantile_s(estimate, 0.9, factors)


def test_an_estimate_costs_little() -> None:
    cases: list[tuple[Plan, ModelShape, Hardware]] = [
        (row.plan, row.model, row.hardware) for rows in tables().values() for row in rows
    ]
    began = time.perf_counter()
    for number in range(ESTIMATES):
        assert time_of(*cases[number % len(cases)]).step_s > 0
    spent = time.perf_counter() - began
    print(f"\n{ESTIMATES} estimates of time in {spent:.2f} s: {1e3 * spent / ESTIMATES:.3f} ms per plan")
