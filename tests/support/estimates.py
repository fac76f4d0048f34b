"""Example estimates, and a trial that was refused because of one."""

from __future__ import annotations

import dataclasses
from typing import Any

from tests.support.examples import a_trial
from train_entry.contract import Estimate, Failure, FailureKind, Fit, State, Trial

GIB = 2**30


def an_estimate(**changes: Any) -> Estimate:
    """Return the estimate of a plan that fits, with 3.3 GiB and 300 ms, before any trial was measured."""
    estimate = Estimate(
        fit=Fit.FITS,
        why="",
        peak_bytes=33 * GIB // 10,
        needed_bytes=4 * GIB,
        limit_bytes=40 * GIB,
        reservable_bytes=39 * GIB,
        host_bytes=2 * GIB,
        host_limit_bytes=100 * GIB,
        nvme_bytes=0,
        phase="first_step",
        components={"weights": GIB},
        step_s=0.3,
        parts={"compute": 0.3},
        tokens_per_s=20_000.0,
        tokens_per_s_per_gpu=10_000.0,
        observations=0,
    )
    return dataclasses.replace(estimate, **changes)


def too_large(needed_gib: int = 50, **changes: Any) -> Estimate:
    """Return the estimate of a plan that needs more memory than the GPU has."""
    why = f"needs {needed_gib}.00 GiB (first_step) of 40.00 GiB, H100"
    needed_bytes = needed_gib * GIB
    said = {"fit": Fit.TOO_LARGE, "why": why, "peak_bytes": 45 * GIB, "needed_bytes": needed_bytes}
    return an_estimate(**(said | changes))


def refused(estimate: Estimate, **changes: Any) -> dict[str, Any]:
    """Return the fields that the loop writes into a trial that it does not launch."""
    outcome = Failure(kind=FailureKind.INFEASIBLE, message=f"not launched: {estimate.why}")
    return {
        "state": State.INFEASIBLE,
        "estimate": estimate,
        "outcome": outcome,
        "closed_at": 9000.0,
    } | changes


def a_refused_trial(number: int, estimate: Estimate | None = None) -> Trial:
    return a_trial(number=number, **refused(estimate or too_large()))
