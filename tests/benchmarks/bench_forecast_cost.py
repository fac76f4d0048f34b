"""Print how long estimates take, since a dry run estimates thousands of plans: `make bench`."""

from __future__ import annotations

import random
import time

import pytest

from sweeps.config.schema import ClusterConfig, GateConfig
from sweeps.estimate.estimator import MOST_OBSERVATIONS, Estimator, hardware_for
from sweeps.estimate.fit import room_of
from sweeps.machine import Gpu, Machine
from tests.support.examples import a_measured_trial, a_measurement
from tests.support.plans import LLAMA_1B3, a_random_plan
from train_entry.contract import GIB, Plan, Trial

ESTIMATES = 5000
EIGHT = tuple(
    Gpu(index=index, uuid=f"GPU-{index}", name="NVIDIA H200", memory_bytes=140 * GIB) for index in range(8)
)
MACHINE = Machine(device="cuda", nodes=1, ranks_per_node=8, gpus=EIGHT, host_memory_bytes=2048 * GIB)


def plans(count: int) -> list[Plan]:
    chooser = random.Random(0)
    return [a_random_plan(chooser) for _ in range(count)]


@pytest.fixture
def estimator() -> Estimator:
    gate = GateConfig()
    return Estimator(LLAMA_1B3, hardware_for(MACHINE), room_of(ClusterConfig(), gate, MACHINE), gate)


def ended(plan: Plan, estimator: Estimator) -> Trial:
    """Return a trial that needed a tenth more memory and twice the time of its estimate."""
    expected = estimator.estimate(plan)
    seen = a_measurement(peak_bytes=int(1.1 * expected.peak_bytes), step_s=2 * expected.step_s)
    return a_measured_trial(plan=plan, estimate=expected, outcome=seen)


def test_estimates_of_memory_time_and_fit(estimator: Estimator) -> None:
    asked = plans(ESTIMATES)
    began = time.process_time()
    fitting = sum(estimator.estimate(plan).fit == "fits" for plan in asked)
    spent = time.process_time() - began
    print(f"\n{ESTIMATES} whole estimates in {spent:.2f} s: {1e3 * spent / ESTIMATES:.3f} ms per plan")
    assert 0 < fitting < ESTIMATES


@pytest.mark.parametrize("count", [1, 8, 30, MOST_OBSERVATIONS])
def test_learning_from_trials(estimator: Estimator, count: int) -> None:
    estimator.learn([ended(plan, estimator) for plan in plans(count)])
    began = time.process_time()
    estimator.estimate(plans(1)[0])  # the first estimate after learning fits the factors
    print(f"\nfactors fitted to {count} trials in {time.process_time() - began:.2f} s")
    assert estimator.observations == count
