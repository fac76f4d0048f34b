"""Remedies for a device that ran out of memory."""

from __future__ import annotations

import dataclasses

from sweeps.remedies import footprint
from sweeps.remedies.base import Changes, Step, remedy, rounded_up, size
from train_entry.contract import Engine, ModelShape, Offload, Plan, Scalar

# Elements. transformers' `auto` sets a reduce bucket to hidden x hidden: 4e6 at a width of 2048.
SMALLEST_BUCKET = 5_000_000
# What a saving must come to for a launch to be worth it: our choice.
WORTHWHILE_SHARE = 0.01  # of all that the plan holds
WORTHWHILE_BYTES = 64 * 2**20


@remedy(cost="a forward pass more for each block: about a third more compute, 15 to 25% of the throughput")
def activation_checkpointing(plan: Plan, model: ModelShape) -> Step | None:
    """Each transformer block keeps its input only, and computes the rest again in the backward pass."""
    if plan.checkpoint_every == 1:
        return None
    after = dataclasses.replace(plan, checkpoint_every=1)
    why = f"each block keeps its input only: {_fewer(plan, after, model)}"
    return Step(changes={"activation_checkpointing": "full"}, why=why)


@remedy(cost="smaller matrices keep the device less busy; stages 2 and 3 communicate once more often")
def micro_batch(plan: Plan, model: ModelShape) -> Step | None:
    """Fewer sequences at a time, accumulated more often: the global batch, and so the training, stays."""
    if plan.micro_batch == 1:
        return None
    parts = next(part for part in range(2, plan.micro_batch + 1) if plan.micro_batch % part == 0)
    after = dataclasses.replace(plan, micro_batch=plan.micro_batch // parts)
    why = (
        f"activations are proportional to it: {_fewer(plan, after, model)}; accumulates {after.grad_accum} "
        f"instead of {plan.grad_accum} times, so the global batch of {plan.global_batch} stays"
    )
    return Step(changes={"micro_batch": after.micro_batch}, why=why)


@remedy(cost="more and shorter collectives; next to nothing while a bucket still fills the link")
def buckets(plan: Plan, model: ModelShape) -> Step | None:
    """Smaller buffers for gradients on their way; under ddp, gradients that live in their buffers."""
    if plan.engine is Engine.DDP:
        return _ddp_buckets(plan, model)
    own = footprint.parameters(plan, model)
    for wanted in (own, plan.zero.reduce_bucket_size // 4):
        elements = max(rounded_up(wanted), min(SMALLEST_BUCKET, rounded_up(own)))
        zero = dataclasses.replace(plan.zero, reduce_bucket_size=elements)
        before, after = footprint.buckets(plan), footprint.buckets(dataclasses.replace(plan, zero=zero))
        if _is_worthwhile(before - after, plan, model):
            why = f"buffers for gradients, allocated whole: {size(after)} instead of {size(before)}"
            if plan.zero.reduce_bucket_size > own:
                whose = "the model" if own == model.parameters else "a rank's part of the model"
                why += f"; {whose} has {own:,} parameters only"
            return Step(changes={"zero.reduce_bucket_size": elements}, why=why)
    return None


def _ddp_buckets(plan: Plan, model: ModelShape) -> Step | None:
    if plan.ddp.gradient_as_bucket_view or plan.ranks == 1:
        return None
    copy = size(4 * model.parameters)
    why = f"gradients live in the buckets instead of being copied there: {copy} less"
    return Step(changes={"ddp.gradient_as_bucket_view": True}, why=why)


@remedy(cost="reducing gradients no longer hides behind the backward pass")
def overlap(plan: Plan, model: ModelShape) -> Step | None:
    """Without overlap_comm, stages 1 and 2 need one bucket instead of two."""
    after = dataclasses.replace(plan, zero=dataclasses.replace(plan.zero, overlap_comm=False))
    saved = footprint.buckets(plan) - footprint.buckets(after)
    if not _is_worthwhile(saved, plan, model):
        return None
    why = f"one bucket instead of two: {size(saved)} less"
    return Step(changes={"zero.overlap_comm": False}, why=why)


@remedy(cost="weights are gathered later and more often: communication hides less")
def live_weights(plan: Plan, model: ModelShape) -> Step | None:
    """Stage 3 keeps fewer whole weights at hand."""
    zero = plan.zero
    held = min(zero.max_live_parameters, model.parameters)
    live = max(rounded_up(held / 4), SMALLEST_BUCKET)
    ahead = min(zero.prefetch_bucket_size, max(rounded_up(zero.prefetch_bucket_size / 4), SMALLEST_BUCKET))
    smaller = dataclasses.replace(zero, max_live_parameters=live, prefetch_bucket_size=ahead)
    before = footprint.gathered_weights(plan, model)
    after = footprint.gathered_weights(dataclasses.replace(plan, zero=smaller), model)
    if not _is_worthwhile(before - after, plan, model):
        return None
    why = f"whole weights at hand: at most {size(after)} instead of {size(before)}"
    changes: Changes = {
        "zero.max_live_parameters": live,
        "zero.max_reuse_distance": min(live, zero.max_reuse_distance),
        "zero.prefetch_bucket_size": ahead,
    }
    return Step(changes=changes, why=why)


@remedy(cost="nothing to speak of")
def allocator(plan: Plan, model: ModelShape) -> Step | None:
    """torch's CUDA allocator grows its segments, and so leaves fewer gaps that nothing fits into."""
    if plan.expandable_segments:
        return None
    why = "memory that is free but lies in pieces becomes usable: a few percent of the card"
    return Step(changes={"allocator.expandable_segments": True}, why=why)


@remedy(cost="a stage's communication: ddp's volume at 1, at 2 every micro-batch, at 3 half as much again")
def sharding(plan: Plan, model: ModelShape) -> Step | None:
    """The next ZeRO stage: a rank keeps a share of what all kept whole. Links between GPUs beat PCIe."""
    stage = footprint.stage(plan) + 1
    if plan.data == 1 or stage > 3:
        return None
    zero = dataclasses.replace(plan.zero, stage=stage)
    after = dataclasses.replace(plan, engine=Engine.DEEPSPEED, zero=zero)
    changes = _preset(plan, f"zero{stage}", {"zero.stage": stage})
    if plan.offload.devices:  # which a preset without offload would undo
        changes = {"zero.stage": stage}
    elif stage == 1 and zero.reduce_bucket_size > (own := footprint.parameters(plan, model)):
        changes["zero.reduce_bucket_size"] = rounded_up(own)  # allocated whole, filled or not
    return _moved(plan, after, model, changes, f"zero{stage} shares them out over {plan.data} ranks")


@remedy(cost="gradients and weights cross PCIe, and the update runs on the CPU: seconds a step for billions")
def optimizer_to_cpu(plan: Plan, model: ModelShape) -> Step | None:
    """The optimizer's states, and its update, go to the CPU."""
    if plan.offload.optimizer is not Offload.NONE:
        return None
    if footprint.stage(plan) == 0:
        after = _offloaded(plan, stage=2, optimizer=Offload.CPU)
        knobs: Changes = {"zero.stage": 2, "zero.offload_optimizer": "cpu"}
        return _moved(plan, after, model, _preset(plan, "zero2_offload", knobs), ON_HOST)
    after = _offloaded(plan, stage=footprint.stage(plan), optimizer=Offload.CPU, param=plan.offload.param)
    return _moved(plan, after, model, {"zero.offload_optimizer": "cpu"}, ON_HOST)


@remedy(cost="the weights cross PCIe twice every micro-batch: only large ones pay for that")
def weights_to_cpu(plan: Plan, model: ModelShape) -> Step | None:
    """The weights go to the CPU, and come a few layers at a time."""
    if plan.offload.param is not Offload.NONE:
        return None
    after = _offloaded(plan, stage=3, optimizer=plan.offload.optimizer, param=Offload.CPU)
    if footprint.stage(plan) == 3:
        return _moved(plan, after, model, {"zero.offload_param": "cpu"}, ON_HOST)
    if plan.data > 1 or plan.offload.optimizer is not Offload.CPU:
        return None  # sharding, or the optimizer, comes first
    knobs: Changes = {"zero.stage": 3, "zero.offload_optimizer": "cpu", "zero.offload_param": "cpu"}
    return _moved(plan, after, model, _preset(plan, "zero3_offload", knobs), ON_HOST)


@remedy(cost="every update reads and writes the states on the disk, and is as fast as the disk")
def optimizer_to_nvme(plan: Plan, model: ModelShape) -> Step | None:
    """The optimizer's states go to a local disk."""
    if plan.offload.optimizer is not Offload.NONE:
        return None
    if footprint.stage(plan) == 3:
        after = _offloaded(plan, stage=3, optimizer=Offload.NVME, param=plan.offload.param)
        return _moved(plan, after, model, {"zero.offload_optimizer": "nvme"}, ON_DISK)
    if plan.data > 1:
        return None  # sharding comes first
    after = _offloaded(plan, stage=3, optimizer=Offload.NVME, param=Offload.NVME)
    knobs: Changes = {"zero.stage": 3, "zero.offload_optimizer": "nvme", "zero.offload_param": "nvme"}
    return _moved(plan, after, model, _preset(plan, "zero3_nvme", knobs), ON_DISK)


@remedy(cost="every micro-batch reads the weights from the disk twice")
def weights_to_nvme(plan: Plan, model: ModelShape) -> Step | None:
    """The weights go to a local disk."""
    if plan.offload.param is not Offload.NONE or footprint.stage(plan) < 3:
        return None
    after = _offloaded(plan, stage=3, optimizer=plan.offload.optimizer, param=Offload.NVME)
    return _moved(plan, after, model, {"zero.offload_param": "nvme"}, ON_DISK)


ON_HOST, ON_DISK = "the others lie in host memory", "the others lie on the disk"


def _preset(plan: Plan, strategy: str, knobs: Changes) -> dict[str, Scalar]:
    """A strategy by its name; by its knobs where the plan has degrees, which another preset would undo."""
    return dict(knobs) if plan.tensor * plan.pipeline > 1 else {"strategy": strategy}


def _is_worthwhile(saved: float, plan: Plan, model: ModelShape) -> bool:
    return saved >= max(WORTHWHILE_BYTES, WORTHWHILE_SHARE * footprint.total(plan, model))


def _offloaded(plan: Plan, stage: int, optimizer: Offload, param: Offload = Offload.NONE) -> Plan:
    zero = dataclasses.replace(plan.zero, stage=stage)
    offload = dataclasses.replace(plan.offload, optimizer=optimizer, param=param)
    return dataclasses.replace(plan, engine=Engine.DEEPSPEED, zero=zero, offload=offload)


def _moved(plan: Plan, after: Plan, model: ModelShape, changes: Changes, how: str) -> Step | None:
    before, left = footprint.states(plan, model).total, footprint.states(after, model).total
    if left >= before:
        return None
    why = f"weights, gradients and optimizer on a device: {size(left)} instead of {size(before)}; {how}"
    return Step(changes=changes, why=why)


def _fewer(plan: Plan, after: Plan, model: ModelShape) -> str:
    before, left = footprint.activations(plan, model), footprint.activations(after, model)
    return f"about {size(left)} instead of {size(before)} of activations"
