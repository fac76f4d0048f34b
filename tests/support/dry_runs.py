"""Listings and estimates for tests of the dry run and of `why`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from sweeps.config.compose import Composer
from sweeps.config.models import model_shape
from sweeps.config.schema import GateConfig
from sweeps.estimate.estimator import Estimator, hardware_for
from sweeps.estimate.fit import room_of
from sweeps.machine import Gpu, Machine
from sweeps.plan.planner import Planner
from sweeps.show.dry_run import Listing, list_plans
from sweeps.space.grammar import read_request, without_inactive
from train_entry.contract import Estimate, Fit, Goal, Plan

GIB = 2**30
CPU = Machine(device="cpu", nodes=1, ranks_per_node=2, cores=2)
H200 = Gpu(index=0, uuid="GPU-0", name="NVIDIA H200", memory_bytes=140 * GIB, capability=(9, 0))
TWO_H200 = Machine(device="cuda", nodes=1, ranks_per_node=2, gpus=(H200, H200), host_memory_bytes=500 * GIB)
GATE = GateConfig()
SPEED = Goal(name="tokens_per_s_per_gpu")


def listed(
    composer: Composer,
    *arguments: str,
    seed: int = 0,
    machine: Machine = CPU,
    estimate: Callable[[Plan], Estimate] | None = None,
    goal: Goal | None = None,
    basis: str = "",
) -> Listing:
    """Return the listing of a dry run of this command line, with real estimates unless others are given."""
    request = read_request(arguments, composer)
    config = request.composer.compose()
    model = model_shape(config.model)
    planner = Planner(request.composer, model, machine, "study")
    space = without_inactive(request, planner.is_active).space
    room = room_of(config.cluster, config.gate, machine)
    expect = estimate or Estimator(model, hardware_for(machine), room, config.gate).estimate
    return list_plans(space, planner.plan, planner.is_active, seed, expect, goal or SPEED, basis)


def an_estimate(**changes: Any) -> Estimate:
    """Return the estimate of a plan that fits: 8.5 of 10 GiB. All numbers differ from each other."""
    estimate = Estimate(
        fit=Fit.FITS,
        why="",
        peak_bytes=int(8.5 * GIB),
        needed_bytes=9 * GIB,
        limit_bytes=10 * GIB,
        reservable_bytes=int(9.5 * GIB),
        host_bytes=3 * GIB,
        host_limit_bytes=64 * GIB,
        nvme_bytes=0,
        phase="loss",
        components={"weights": int(1.5 * GIB), "moments": GIB, "activations": 6 * GIB},
        step_s=0.25,
        parts={"forward": 0.1, "backward": 0.15},
        tokens_per_s=4000.0,
        tokens_per_s_per_gpu=2000.0,
        observations=0,
    )
    return dataclasses.replace(estimate, **changes)


def too_large(needed_gib: float, **changes: Any) -> Estimate:
    """Return the estimate of a plan that needs more than 10 GiB."""
    needed = int(needed_gib * GIB)
    why = f"needs {needed_gib:.2f} GiB (loss) of 10.00 GiB, a card"
    return an_estimate(**{"fit": Fit.TOO_LARGE, "why": why, "needed_bytes": needed, **changes})
