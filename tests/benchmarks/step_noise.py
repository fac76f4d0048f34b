"""Noise of step times, from step to step and from launch to launch, for simulations of measuring.

Recorded on two H200s of a virtual machine with 32 cores (torch 2.11, DeepSpeed 0.19): 33 launches of half a
llama_1b3 with 12 timed steps each, at 32 x 1,024 tokens per step, and six more with 40 steps each. Steps of
plans that keep the GPUs busy vary by 0.2% to 0.7%, steps of plans that wait for the host by 1% to 14%. The
bias-corrected correlation of neighbouring steps averages 0.2 for the former and 0.35 for the latter. Three
launches of one plan differ by 0.6%; two launches of another plan, which waits for the host, by 9%. The CPU
figures are guesses for a shared machine.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

STEPS = 20  # the number of steps that a fixed measurement times
# Plans of one grid: median step in ms, standard deviation of a step in percent.
RECORDED = (
    *((303.3, 0.215), (215.1, 0.291), (223.2, 0.344), (256.5, 0.418), (268.5, 1.059), (287.3, 1.269)),
    *((319.6, 1.568), (246.5, 2.614), (819.2, 2.748), (463.1, 4.062), (421.2, 4.600), (426.5, 4.655)),
    *((602.0, 5.151), (753.6, 6.647), (369.8, 6.821)),
)
SPREADS = tuple(percent / 100 for _, percent in RECORDED)


@dataclass(frozen=True, kw_only=True, slots=True)
class Noise:
    """A machine's noise. Standard deviations and hiccups are shares of the step time."""

    spreads: tuple[float, ...]  # standard deviation from step to step: each plan has one of these
    launch: float = 0.005  # standard deviation from launch to launch
    correlation: float = 0.0  # of neighbouring steps
    hiccups: float = 0.0  # share of the steps that take longer
    hiccup: float = 0.0  # mean additional time of such a step

    def steps_s(self, typical_s: float, spread: float, rng: random.Random) -> list[float]:
        """Draw the step times of one launch, in seconds. Their median is `typical_s`, apart from hiccups."""
        launched_s = typical_s * math.exp(rng.gauss(0, self.launch))
        off = rng.gauss(0, 1)
        steps_s: list[float] = []
        for _ in range(STEPS):
            off = self.correlation * off + math.sqrt(1 - self.correlation**2) * rng.gauss(0, 1)
            longer = rng.expovariate(1 / self.hiccup) if rng.random() < self.hiccups else 0.0
            steps_s.append(launched_s * math.exp(spread * off) * (1 + longer))
        return steps_s


MACHINES = {
    "H200, cards busy": Noise(spreads=SPREADS[:4], correlation=0.2),
    "H200, half wait for the host": Noise(spreads=SPREADS[:7], correlation=0.25),
    "H200, all plans recorded": Noise(spreads=SPREADS, correlation=0.3),
    "H200, cards busy, 2% hiccups": Noise(spreads=SPREADS[:4], correlation=0.2, hiccups=0.02, hiccup=0.1),
    "CPU, 10%": Noise(spreads=(0.1,), launch=0.02, correlation=0.15, hiccups=0.02, hiccup=0.3),
    "CPU, 20%": Noise(spreads=(0.2,), launch=0.02, correlation=0.15, hiccups=0.02, hiccup=0.3),
}


def bootstrap(values: Sequence[float], draws: int = 400) -> tuple[float, float]:
    """Return the 95% bootstrap interval of the mean."""
    rng = random.Random(0)
    means = sorted(math.fsum(rng.choices(values, k=len(values))) / len(values) for _ in range(draws))
    return means[int(0.025 * draws)], means[int(0.975 * draws)]
