"""Remedies for a device that ran out of memory."""

from __future__ import annotations

from collections.abc import Iterator

from sweeps.search.remedies.base import Changes, Step, parameters, remedy, rounded_up
from train_entry.contract import Engine, ModelShape, Offload, Plan, Scalar

# In elements. transformers' `auto` sets a reduce bucket to hidden x hidden: 4e6 at a width of 2048.
SMALLEST_BUCKET = 5_000_000
ON_HOST, ON_DISK = "into host memory", "to the disk"
SHARED = {1: "the optimizer's states", 2: "the optimizer's states and gradients", 3: "all model states"}


@remedy(cost="one more forward pass per block: about a third more compute, 15 to 25% of the throughput")
def activation_checkpointing(plan: Plan, model: ModelShape) -> Iterator[Step]:
    """Each transformer block keeps only its input, and recomputes the rest in the backward pass."""
    if plan.checkpoint_every != 1:
        yield Step(changes={"activation_checkpointing": "full"}, how="each block keeps only its input")


@remedy(cost="smaller matrices keep the device less busy; stages 2 and 3 communicate more often")
def micro_batch(plan: Plan, model: ModelShape) -> Iterator[Step]:
    """A micro-batch has fewer sequences, and more of them accumulate: the global batch stays the same."""
    if plan.micro_batch == 1:
        return
    parts = next(part for part in range(2, plan.micro_batch + 1) if plan.micro_batch % part == 0)
    how = (
        f"activations are proportional to it; accumulates {plan.grad_accum * parts} instead of "
        f"{plan.grad_accum} times, so the global batch of {plan.global_batch} stays"
    )
    yield Step(changes={"micro_batch": plan.micro_batch // parts}, how=how)


@remedy(
    cost="more and smaller collectives; almost nothing while a bucket still saturates the link", is_minor=True
)
def buckets(plan: Plan, model: ModelShape) -> Iterator[Step]:
    """The buckets that gradients are reduced in are smaller; under ddp, gradients live in the buckets."""
    if plan.engine is Engine.DDP:
        yield from _ddp_buckets(plan)
        return
    own, before = parameters(plan, model), plan.zero.reduce_bucket_size
    how = "gradient buckets are allocated at full size"
    if before > own:
        whose = "the model" if own == model.parameters else "a rank's part of the model"
        how += f"; {whose} has only {own:,} parameters"
    for wanted in (own, before // 4):
        elements = max(rounded_up(wanted), min(SMALLEST_BUCKET, rounded_up(own)))
        if elements < before:
            yield Step(changes={"zero.reduce_bucket_size": elements}, how=how)


def _ddp_buckets(plan: Plan) -> Iterator[Step]:
    if plan.ranks > 1 and not plan.ddp.gradient_as_bucket_view:
        how = "gradients live in the buckets instead of being copied into them"
        yield Step(changes={"ddp.gradient_as_bucket_view": True}, how=how)


@remedy(cost="reducing gradients no longer overlaps with the backward pass", is_minor=True)
def overlap(plan: Plan, model: ModelShape) -> Iterator[Step]:
    """Without overlap_comm, stages 1 and 2 need one bucket instead of two."""
    if plan.zero.overlap_comm and plan.zero.stage in (1, 2):
        yield Step(changes={"zero.overlap_comm": False}, how="one bucket instead of two")


@remedy(cost="weights are gathered later and more often: communication overlaps less", is_minor=True)
def live_weights(plan: Plan, model: ModelShape) -> Iterator[Step]:
    """Stage 3 keeps fewer gathered weights in memory."""
    if plan.zero.stage < 3:
        return
    zero = plan.zero
    held = min(zero.max_live_parameters, parameters(plan, model))
    live = max(rounded_up(held / 4), SMALLEST_BUCKET)
    ahead = min(zero.prefetch_bucket_size, max(rounded_up(zero.prefetch_bucket_size / 4), SMALLEST_BUCKET))
    if live >= zero.max_live_parameters and ahead == zero.prefetch_bucket_size:
        return
    changes: Changes = {
        "zero.max_live_parameters": live,
        "zero.max_reuse_distance": min(live, zero.max_reuse_distance),
        "zero.prefetch_bucket_size": ahead,
    }
    yield Step(changes=changes, how=f"at most {live:,} parameters stay gathered")


@remedy(cost="nothing to speak of")
def allocator(plan: Plan, model: ModelShape) -> Iterator[Step]:
    """torch's CUDA allocator grows its segments, so fewer gaps remain that nothing fits into."""
    if not plan.expandable_segments:
        how = "memory that is free but fragmented becomes usable"
        yield Step(changes={"allocator.expandable_segments": True}, how=how)


@remedy(cost="a stage's communication: ddp's volume at 1, at 2 every micro-batch, at 3 half as much again")
def sharding(plan: Plan, model: ModelShape) -> Iterator[Step]:
    """The next ZeRO stage: a rank keeps a share of what all kept whole. Links between GPUs beat PCIe."""
    if plan.data == 1:
        return
    for then in range(plan.zero.stage + 1, 4):
        changes = _preset(plan, f"zero{then}", {"zero.stage": then})
        if plan.offload.devices:  # a preset without offload would undo it
            changes = {"zero.stage": then}
        elif then == 1 and plan.zero.reduce_bucket_size > (own := parameters(plan, model)):
            changes["zero.reduce_bucket_size"] = rounded_up(own)  # allocated at full size, filled or not
        yield Step(changes=changes, how=f"zero{then} divides {SHARED[then]} among {plan.data} ranks")


@remedy(cost="gradients and weights cross PCIe, the CPU updates: seconds a step for billions of parameters")
def optimizer_to_cpu(plan: Plan, model: ModelShape) -> Iterator[Step]:
    """The optimizer's states and its update move to the CPU."""
    if plan.offload.optimizer is not Offload.NONE:
        return
    changes: Changes = {"zero.offload_optimizer": "cpu"}
    if plan.zero.stage == 0:
        changes = _preset(plan, "zero2_offload", {"zero.stage": 2, **changes})
    yield Step(changes=changes, how=f"the optimizer's states go {ON_HOST}")


@remedy(cost="the weights cross PCIe twice every micro-batch, which only large micro-batches make up for")
def weights_to_cpu(plan: Plan, model: ModelShape) -> Iterator[Step]:
    """The weights move to the CPU, and return to the GPU a few layers at a time."""
    if plan.offload.param is not Offload.NONE:
        return
    how = f"the weights go {ON_HOST}"
    if plan.zero.stage == 3:
        yield Step(changes={"zero.offload_param": "cpu"}, how=how)
    elif plan.data == 1 and plan.offload.optimizer is Offload.CPU:  # sharding and optimizer_to_cpu come first
        knobs: Changes = {"zero.stage": 3, "zero.offload_optimizer": "cpu", "zero.offload_param": "cpu"}
        yield Step(changes=_preset(plan, "zero3_offload", knobs), how=how)


@remedy(cost="every update reads and writes the states on the disk, and is as fast as the disk")
def optimizer_to_nvme(plan: Plan, model: ModelShape) -> Iterator[Step]:
    """The optimizer's states move to a local disk."""
    if plan.offload.optimizer is not Offload.NONE:
        return
    if plan.zero.stage == 3:
        yield Step(changes={"zero.offload_optimizer": "nvme"}, how=f"the optimizer's states go {ON_DISK}")
    elif plan.data == 1:  # else sharding comes first
        knobs: Changes = {"zero.stage": 3, "zero.offload_optimizer": "nvme", "zero.offload_param": "nvme"}
        how = f"the optimizer's states, and the weights, go {ON_DISK}"
        yield Step(changes=_preset(plan, "zero3_nvme", knobs), how=how)


@remedy(cost="every micro-batch reads the weights from the disk twice")
def weights_to_nvme(plan: Plan, model: ModelShape) -> Iterator[Step]:
    """The weights move to a local disk."""
    if plan.offload.param is Offload.NONE and plan.zero.stage == 3:
        yield Step(changes={"zero.offload_param": "nvme"}, how=f"the weights go {ON_DISK}")


def _preset(plan: Plan, strategy: str, knobs: Changes) -> dict[str, Scalar]:
    """Return a strategy by name, or by its knobs where the plan has degrees, which a preset would undo."""
    return dict(knobs) if plan.tensor * plan.pipeline > 1 else {"strategy": strategy}
