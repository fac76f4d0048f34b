"""What is legal and still wastes ranks. Pure: said before a launch, never a reason to refuse one."""

from __future__ import annotations

from dataclasses import dataclass

from train_entry.contract import Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Caution:
    name: str  # a sentence that would be true of a plan without this caution
    text: str  # with the numbers, and what would do


def cautions(plan: Plan) -> tuple[Caution, ...]:
    """All that there is to say of a plan."""
    found = (_a_pipeline_is_filled(plan),)
    return tuple(caution for caution in found if caution is not None)


def _a_pipeline_is_filled(plan: Plan) -> Caution | None:
    """With fewer micro-batches than stages, never are all stages at work."""
    stages, micro_batches = plan.pipeline, plan.grad_accum
    if micro_batches >= stages:
        return None
    text = (
        f"pipeline={stages} with {micro_batches} micro-batch{'es' * (micro_batches > 1)} a step (gradient "
        f"accumulation): each stage waits {plan.bubble:.0%} of the time at least, and never are all at work; "
        f"{_way_out(plan)}"
    )
    return Caution(name="a_pipeline_is_filled", text=text)


def _way_out(plan: Plan) -> str:
    """As many micro-batches as stages: of smaller ones, or of more samples."""
    share = plan.global_batch // plan.data
    sizes = [size for size in range(1, plan.micro_batch) if share % size == 0]
    fits = [size for size in sizes if share // size >= plan.pipeline]
    larger = f"global_batch={plan.pipeline * plan.micro_batch * plan.data} or more"
    return f"micro_batch={max(fits)} would do, or {larger}" if fits else f"{larger} would do"
