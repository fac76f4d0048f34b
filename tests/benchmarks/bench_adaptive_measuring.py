"""Compare adaptive timing with 20 fixed steps, on simulated steps (see step_noise): `make bench`.

A simulated study measures eight plans one after another, in random order. The best one takes 1 s per step,
the others take 0.5%, 1%, 2%, 5%, 20%, 20% and 50% longer. That is harder than the recorded grid, most of
whose plans are far slower; results for the grid are printed too. A winner is wrong if it is not the best
plan. "before" chooses by the first measurements' medians; "confirmed" measures the best three twice more,
without a step time to beat, and chooses by these medians, as the product does.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

import pytest

from sweeps.study.futility import MARGIN
from tests.benchmarks.step_noise import MACHINES, RECORDED, STEPS, Noise, bootstrap
from train_entry.contract import MeasureSpec, TimingEnd
from train_entry.measure.stopping import decide, half_width_s, is_due

STUDIES = 2000
RUNS = 10_000
GAPS = (0.0, 0.005, 0.01, 0.02, 0.05, 0.2, 0.2, 0.5)
CONFIRMED, AGAIN = 3, 2
MEASURE = MeasureSpec(warmup_steps=3, steps=STEPS, split_steps=0, precision=0.005)  # measure=short's


@dataclass(frozen=True, slots=True)
class Candidate:
    typical_s: float
    spread: float


def time_until(steps_s: Sequence[float], measure: MeasureSpec) -> tuple[Sequence[float], TimingEnd]:
    """Return the steps that a job times, and why it stops."""
    for timed in range(len(steps_s)):
        if is_due(timed, measure) and (ended := decide(steps_s[:timed], measure)) is not None:
            return steps_s[:timed], ended
    return steps_s, TimingEnd.CAP


# ---------------------------------------------------------------- the interval


def correlated(correlation: float, spread: float = 0.01) -> Noise:
    return Noise(spreads=(spread,), launch=0.0, correlation=correlation)


def hiccups(share: float, hiccup: float, spread: float) -> Noise:
    return Noise(spreads=(spread,), launch=0.0, hiccups=share, hiccup=hiccup)


HOLDS = {
    "independent": correlated(0.0),
    "correlated by 0.1": correlated(0.1),
    "correlated by 0.2": correlated(0.2),
    "correlated by 0.25": correlated(0.25),
    "skewed, 20% spread": correlated(0.0, spread=0.2),
    "2% hiccups of 10%, 0.3% spread": hiccups(0.02, 0.1, 0.003),
    "5% hiccups of 30%, 1% spread": hiccups(0.05, 0.3, 0.01),
    "5% hiccups of 100%, 10% spread": hiccups(0.05, 1.0, 0.1),
}
BEYOND = {"correlated by 0.3": correlated(0.3), "correlated by 0.5": correlated(0.5)}


EVERY_LOOK = tuple(range(2, STEPS + 1))
OUR_LOOKS = tuple(timed for timed in EVERY_LOOK if is_due(timed, MEASURE))


def misses(noise: Noise, looks: Sequence[int]) -> list[float]:
    """Return for each run 1 if the interval misses the typical step, 1 s, at any of these looks, else 0."""
    rng = random.Random(11)
    runs = (noise.steps_s(1.0, noise.spreads[0], rng) for _ in range(RUNS))
    return [float(any(leaves_out(steps_s[:timed]) for timed in looks)) for steps_s in runs]


def leaves_out(steps_s: Sequence[float]) -> bool:
    width_s = half_width_s(steps_s, MEASURE.confidence)
    return width_s is not None and abs(fmean(steps_s) - 1.0) > width_s


def test_the_interval_covers_the_typical_step_at_all_looks_at_once() -> None:
    print(f"\nshare of {RUNS:,} runs whose interval misses the typical step at any look")
    print(f"{'':34s} after each of 2 to 20   after 4, 6, ... 18 steps")
    wrong: dict[str, float] = {}
    for name, noise in (HOLDS | BEYOND).items():
        found = [misses(noise, looks) for looks in (EVERY_LOOK, OUR_LOOKS)]
        wrong[name] = fmean(found[0])
        print(f"  {name:32s}", *(f"{fmean(missed):6.1%} {interval(missed):17s}" for missed in found))
    assert max(wrong[name] for name in HOLDS) <= 1 - MEASURE.confidence


def interval(values: Sequence[float]) -> str:
    low, high = bootstrap(values)
    return f"[{low:.1%}, {high:.1%}]"


# ---------------------------------------------------------------- eight plans, one winner


@dataclass(frozen=True, kw_only=True, slots=True)
class Study:
    """The results of both ways of measuring the same steps."""

    share: float  # adaptively timed steps over the steps of fixed measurements
    loss: dict[str, float]  # the share by which each way's winner is slower than the best plan


def study(plans: Sequence[Candidate], noise: Noise, rng: random.Random) -> Study:
    order = rng.sample(plans, len(plans))
    fixed: list[tuple[float, Candidate]] = []
    ours: list[tuple[float, Candidate]] = []
    timed = 0
    for plan in order:
        steps_s = noise.steps_s(plan.typical_s, plan.spread, rng)
        fixed.append((median(steps_s), plan))
        known, ended = time_until(steps_s, with_bar(min(ours, key=first)[0] if ours else None))
        timed += len(known)
        if ended is not TimingEnd.FUTILE:
            ours.append((median(known), plan))
    best_s = min(plan.typical_s for plan in plans)
    seed = rng.random()  # both confirmations see the same launches of the same plans
    winners = {
        "fixed": min(fixed, key=first)[1],
        "ours": min(ours, key=first)[1],
        "fixed, confirmed": confirmed(fixed, noise, seed, lambda steps_s: steps_s),
        "ours, confirmed": confirmed(ours, noise, seed, lambda steps_s: time_until(steps_s, MEASURE)[0]),
    }
    loss = {name: winner.typical_s / best_s - 1 for name, winner in winners.items()}
    return Study(share=timed / (STEPS * len(plans)), loss=loss)


def first(pair: tuple[float, Candidate]) -> float:
    return pair[0]


def with_bar(best_s: float | None) -> MeasureSpec:
    bar_s = None if best_s is None else best_s * (1 + MARGIN)
    return dataclasses.replace(MEASURE, beat_step_s=bar_s)


def confirmed(
    seen: Sequence[tuple[float, Candidate]],
    noise: Noise,
    seed: float,
    timed: Callable[[Sequence[float]], Sequence[float]],
) -> Candidate:
    """Return the fastest of the best few plans, by fresh launches."""
    again: list[tuple[float, Candidate]] = []
    for _, plan in sorted(seen, key=first)[:CONFIRMED]:
        rng = random.Random(f"{seed} {plan}")
        launches = [noise.steps_s(plan.typical_s, plan.spread, rng) for _ in range(AGAIN)]
        again.append((fmean(median(timed(steps_s)) for steps_s in launches), plan))
    return min(again, key=first)[1]


def spaced(noise: Noise, rng: random.Random) -> list[Candidate]:
    return [Candidate(1.0 + gap, rng.choice(noise.spreads)) for gap in GAPS]


def grid(noise: Noise, rng: random.Random) -> list[Candidate]:
    """Return the plans of the recorded grid, each with its own noise."""
    return [Candidate(step_ms / 1000, percent / 100) for step_ms, percent in RECORDED]


SHARE_MAY_BE = {"H200, cards busy": 0.5, "recorded grid": 0.5}  # others: only printed, noise needs steps


def run(name: str, make: Callable[[Noise, random.Random], list[Candidate]], noise: Noise) -> list[Study]:
    rng = random.Random(name)
    return [study(make(noise, rng), noise, rng) for _ in range(STUDIES)]


def test_fewer_steps_find_the_same_winners() -> None:
    print(f"\n{STUDIES:,} studies each; [95% bootstrap intervals]")
    print(f"{'':30s} steps of 20       wrong: fixed   ours   difference        slower: fixed   ours")
    cases = {name: (spaced, noise) for name, noise in MACHINES.items()}
    cases["recorded grid"] = (grid, MACHINES["H200, all plans recorded"])
    for name, (make, noise) in cases.items():
        studies = run(name, make, noise)
        share = fmean(found.share for found in studies)
        low, high = bootstrap([found.share for found in studies])
        print(f"{name:30s} {share:.0%} [{low:.0%}, {high:.0%}]")
        compare(studies, "")
        assert compare(studies, ", confirmed") <= 0, f"{name}: more announced winners are wrong"
        assert share <= SHARE_MAY_BE.get(name, 1.0)


def compare(studies: Sequence[Study], end: str) -> float:
    """Print a line. Return the lower bound of how much more often our winner is wrong."""
    fixed, ours = ([found.loss[f"{way}{end}"] for found in studies] for way in ("fixed", "ours"))
    more = [float(mine > 0) - float(other > 0) for mine, other in zip(ours, fixed, strict=True)]
    low, high = bootstrap(more)
    wrong = [fmean(loss > 0 for loss in losses) for losses in (fixed, ours)]
    print(
        f"  {end.removeprefix(', ') or 'before':45s} {wrong[0]:10.1%} {wrong[1]:6.1%}"
        f"  {fmean(more):+.1%} [{low:+.1%}, {high:+.1%}]   {fmean(fixed):9.3%} {fmean(ours):7.3%}"
    )
    return low


# ---------------------------------------------------------------- two equal plans


@pytest.mark.parametrize("margin", [0.0, MARGIN])
def test_of_two_equal_plans_none_is_called_better(margin: float) -> None:
    """The second plan should rarely end as futile, even though launches of equal plans differ too."""
    print(f"\nruns that give up the second of two equal plans, with a limit {margin:.1%} above the first")
    print(f"{'':30s} launches alike         launches differ")
    for name, noise in MACHINES.items():
        alike = given_up(dataclasses.replace(noise, launch=0.0), margin)
        differing = given_up(noise, margin)
        texts = [
            f"{fmean(found):6.2%} [{low:.2%}, {high:.2%}]"
            for found in (alike, differing)
            for low, high in [bootstrap(found)]
        ]
        print(f"{name:30s} {texts[0]:22s} {texts[1]}")
        assert fmean(alike) <= 0.05
        assert margin == 0.0 or fmean(differing) <= 0.05


def given_up(noise: Noise, margin: float) -> list[float]:
    rng = random.Random(7)
    ends: list[float] = []
    for _ in range(STUDIES):
        spread = rng.choice(noise.spreads)
        known, _ = time_until(noise.steps_s(1.0, spread, rng), MEASURE)
        bar = dataclasses.replace(MEASURE, beat_step_s=median(known) * (1 + margin))
        ends.append(float(time_until(noise.steps_s(1.0, spread, rng), bar)[1] is TimingEnd.FUTILE))
    return ends


def test_the_mixture_is_near_the_best_at_every_number_of_steps() -> None:
    """This computation chose the value of stopping.EFFECT_VARIANCE."""
    numbers = range(4, STEPS + 1)
    values = [tenths / 10 for tenths in range(1, 400)]
    best = {n: min(factor(n, value) for value in values) for n in numbers}
    wider = {value: max(factor(n, value) / best[n] for n in numbers) for value in values}
    chosen = min(wider, key=lambda value: wider[value])
    print(
        f"\nvariance of the effect {chosen}: at most {wider[chosen] - 1:.1%} wider than the best for 4 to 20"
    )
    assert chosen == 4.4
    assert wider[chosen] < 1.08


def factor(n: int, variance: float) -> float:
    """Return the interval's half-width at 95%, in standard deviations of a step."""
    spread = 1 + n * variance
    ratio = (spread / 0.05**2) ** (1 / n)
    if ratio >= spread:
        return math.inf
    return math.sqrt((n - 1) / n * (ratio - 1) / (1 - ratio / spread))
