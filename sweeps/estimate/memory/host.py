"""Estimate host memory and disk space of all ranks of the fullest node. Pure.

Page-locked buffers count as resident memory of the process, and torch rounds each up to a power of two
(CachingHostAllocator; pytorch issues 95823 and 150517).
"""

from __future__ import annotations

import math
from dataclasses import replace

from sweeps.estimate.hardware import Hardware
from sweeps.estimate.memory.activations import FP32_BYTES, element_bytes
from sweeps.estimate.memory.share import Share, shares
from sweeps.estimate.memory.states import MASTER_BYTES, MOMENT_BYTES, moments_of, sub_group, summed_bytes
from train_entry.contract import ModelShape, Offload, Plan

# Resident memory of a rank before it trains anything, by device: torch, DeepSpeed and transformers imported
# (VmHWM with torch's CPU build: 0.5 GiB); with CUDA also its context and the kernels' libraries (1.9 to 2.2
# GiB on two H200s, over ddp, pipeline and tensor parallelism of three models).
PROCESS_BYTES = {"cpu": 600 * 2**20, "cuda": 2400 * 2**20}
# Average growth of many buffers of all sizes, each rounded up to a power of two: 1 / ln 2.
MANY_ROUNDED = 1.44
# deepspeed/runtime/zero/offload_config.py: buffers for optimizer states on their way to disk and back.
OPTIMIZER_SWAP_BUFFERS = 4


def host_bytes(plan: Plan, model: ModelShape, hardware: Hardware, device_bytes: int) -> int:
    """Resident memory of a node's ranks. On a CPU, it is the device memory: `device_bytes` of each rank."""
    ranks = min(plan.ranks, hardware.ranks_per_node)
    if hardware.device == "cpu":
        return ranks * device_bytes
    largest = max(_offloaded(plan, share) for share in shares(plan, model)) if plan.offload.devices else 0.0
    return process_bytes(plan, hardware) + int(ranks * max(largest, _whole_model(plan, model)))


def offloaded_bytes(plan: Plan, share: Share) -> float:
    """Bytes that one rank of a CPU keeps of offloaded states: in ordinary memory, never page-locked."""
    if not plan.offload.devices:
        return 0.0
    return _offloaded(replace(plan, offload=replace(plan.offload, pin_memory=False)), share)


def process_bytes(plan: Plan, hardware: Hardware) -> int:
    """The part of host_bytes that processes take before they train; on a CPU, device memory has it."""
    ranks = min(plan.ranks, hardware.ranks_per_node)
    return 0 if hardware.device == "cpu" else ranks * PROCESS_BYTES["cuda"]


def _whole_model(plan: Plan, model: ModelShape) -> float:
    """Bytes that a rank has in host memory until DeepSpeed splits its matrices: see engine.sharding_for."""
    return element_bytes(plan) * model.parameters if plan.tensor > 1 and plan.pipeline == 1 else 0.0


def nvme_bytes(plan: Plan, model: ModelShape, hardware: Hardware) -> int:
    """Bytes of a node's files (swap_tensor/): fp32 weights, moments and gradients; half-precision weights."""
    if Offload.NVME not in plan.offload.devices:
        return 0
    ranks = min(plan.ranks, hardware.ranks_per_node)
    largest = max(_on_disk(plan, share) for share in shares(plan, model))
    return int(ranks * largest)


def pinned(count: float, is_pinned: bool = True) -> float:
    """Bytes that a buffer takes: the next power of two if it is page-locked."""
    return 2.0 ** math.ceil(math.log2(count)) if is_pinned and count > 0 else count


def _offloaded(plan: Plan, share: Share) -> float:
    """Bytes of offloaded states of one rank."""
    part = share.parameters / plan.data
    optimizer = _zero3_optimizer(plan, part) if plan.zero.stage == 3 else _optimizer(plan, share, part)
    return optimizer + _weights(plan, part)


def _optimizer(plan: Plan, share: Share, part: float) -> float:
    """Bytes of an offloaded optimizer in stages 1 and 2.

    stage_1_and_2.py: master weights, their gradients and the weights on their way back are page-locked.
    """
    if plan.offload.optimizer is Offload.NONE:
        return 0.0
    is_pinned, wide = plan.offload.pin_memory, element_bytes(plan)
    locked = (MASTER_BYTES * part, FP32_BYTES * part, wide * part, wide * share.largest_parameter)
    accumulated = wide * part if plan.grad_accum > 1 else 0.0  # a buffer for every parameter
    rounded = MANY_ROUNDED if is_pinned else 1.0
    return sum(pinned(each, is_pinned) for each in locked) + accumulated * rounded + _moments(plan, part)


def _zero3_optimizer(plan: Plan, part: float) -> float:
    """Bytes of an offloaded optimizer in stage 3.

    stage3.py: gradients are page-locked, by sub-group in fp32 and flat as they are accumulated.
    """
    is_pinned, group = plan.offload.pin_memory, sub_group(plan, part)
    if plan.offload.optimizer is Offload.NONE:
        return 0.0
    flat = pinned(summed_bytes(plan) * part, is_pinned)
    if plan.offload.optimizer is Offload.NVME:
        return flat + OPTIMIZER_SWAP_BUFFERS * pinned(FP32_BYTES * group)
    full, rest = divmod(part, group)
    groups = int(full) + (rest > 0)
    here = groups - int((1 - plan.offload.ratio) * groups)  # the first ones stay on the device
    sizes = ([group] * int(full) + [rest] * (rest > 0))[groups - here :]
    gradients = sum([pinned(FP32_BYTES * size, is_pinned) for size in sizes])
    count = sum(sizes)
    return flat + gradients + MASTER_BYTES * count + _moments(plan, count)


def _weights(plan: Plan, part: float) -> float:
    """Bytes of offloaded weights.

    stage3.py, _create_param_groups_fp16_flat_cpu_memory: they are page-locked, whatever pin_memory says.
    """
    wide, offload = element_bytes(plan), plan.offload
    if offload.param is Offload.CPU:
        return pinned(wide * part)
    if offload.param is Offload.NVME:
        buffers = offload.buffer_count * offload.buffer_size
        return pinned(wide * min(part, offload.max_in_cpu)) + pinned(wide * buffers)
    return 0.0


def _moments(plan: Plan, count: float) -> float:
    return MOMENT_BYTES * moments_of(plan) * count


def _on_disk(plan: Plan, share: Share) -> float:
    part, offload = share.parameters / plan.data, plan.offload
    optimizer = (MASTER_BYTES + FP32_BYTES) * part + _moments(plan, part)
    weights = element_bytes(plan) * max(0.0, part - offload.max_in_cpu)
    return optimizer * (offload.optimizer is Offload.NVME) + weights * (offload.param is Offload.NVME)
