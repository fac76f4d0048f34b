"""Warn of plans that are legal but waste ranks, before a launch; never a reason to refuse one. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from train_entry.contract import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Caution:
    name: str  # a sentence that would be true of a plan without this caution
    text: str  # with the numbers, and a way out


def cautions(plan: Plan) -> tuple[Caution, ...]:
    """Return all cautions about a plan."""
    found = (_a_pipeline_is_filled(plan),)
    return tuple(caution for caution in found if caution is not None)


def _a_pipeline_is_filled(plan: Plan) -> Caution | None:
    """With fewer micro-batches than stages, the stages never all work at the same time."""
    stages, micro_batches = plan.pipeline, plan.grad_accum
    if micro_batches >= stages:
        return None
    text = (
        f"pipeline={stages} with {micro_batches} micro-batch{'es' * (micro_batches > 1)} per step (gradient "
        f"accumulation): each stage is idle at least {plan.bubble:.0%} of the time, and they never all work "
        f"at once; {_way_out(plan)}"
    )
    return Caution(name="a_pipeline_is_filled", text=text)


def _way_out(plan: Plan) -> str:
    """Suggest how to get as many micro-batches as stages: make them smaller, or take more samples."""
    share = plan.global_batch // plan.data
    sizes = [size for size in range(1, plan.micro_batch) if share % size == 0]
    fits = [size for size in sizes if share // size >= plan.pipeline]
    larger = f"global_batch={plan.pipeline * plan.micro_batch * plan.data} or more"
    return f"use micro_batch={max(fits)}, or {larger}" if fits else f"use {larger}"
