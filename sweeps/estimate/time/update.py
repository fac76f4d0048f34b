"""Estimate the time of the optimizer's update: on the device, or offloaded to host memory and disk. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sweeps.estimate import flops
from sweeps.estimate.hardware import Hardware
from sweeps.estimate.time.exchange import gathers, held_parameters
from train_entry.contract import Engine, ModelShape, Offload, Plan, Precision

# Bytes per parameter that an update reads and writes on the device, in fp32, one operation after the other:
# torch's multi-tensor AdamW decays (8), updates two moments (12 + 8 + 12), takes the root, divides and adds
# epsilon (8 + 8 + 8), and applies the update (16). The fused kernel reads four numbers and writes three.
ADAMW_BYTES = 80
SGD_BYTES = 40  # decay into the gradient, momentum, parameter
FUSED_BYTES = 28
# DeepSpeed adds norms in double precision (18), a check for infinities (10), gradients flattened, cast to
# fp32 and clipped (4 + 6 + 8), weights cast back (6), gradients cleared (2).
WRAPPER_BYTES = 54
DDP_CLIP_BYTES = 12  # norm and scaling of fp32 gradients
# Kernels over lists of tensors reach less of the memory's rate than kernels over one tensor: 49 ms per 1e9
# parameters on an H200 were more than twice the time that the bytes above take at full rate.
UPDATE_SHARE = 0.6
# On the host DeepSpeed computes norms per parameter, nine in a block: 13 ms for 24 blocks (two H200s).
ZERO_BLOCK_HOST_S = 0.5e-3
DDP_BLOCK_HOST_S = 0.1e-3
STEP_HOST_S = 2e-3

# DeepSpeedCPUAdam, per parameter: reads four numbers and writes three (28), clips (8), casts weights (6).
CPU_ADAM_BYTES = 42
# Its share of the host's memory bandwidth: 1.35e9 parameters took 480 ms on 16 cores of a two-socket server.
CPU_ADAM_SHARE = 0.4
# Gradients go to the host tensor by tensor, on the compute stream: at 36 to 45 GB/s of 55 on an H200.
PIECES_SHARE = 0.67
# From or to memory that is not page-locked the driver copies twice: 3 to 6 GB/s are common. zero2_offload of
# llama_160m lost 190 ms per step to this (two H200s).
PAGEABLE_BYTES_PER_S = 4.5e9
# An update on NVMe reads master weights, two moments and gradients (16), and writes as many bytes back.
NVME_BYTES = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """Seconds of the update, per step."""

    device_s: float  # the optimizer on the device
    streamed_s: float  # copies between device and host that are queued like kernels, during the passes
    offload_s: float  # the optimizer on the CPU, the disk, and copies for which everything waits
    host_s: float  # Python, parameter by parameter


def update_of(plan: Plan, model: ModelShape, hardware: Hardware) -> Update:
    part = held_parameters(plan, model) / (plan.data if plan.zero.stage else 1)
    on_cpu = _cpu_share(plan, part)
    blocks = math.ceil(model.layers / plan.pipeline)
    per_block = DDP_BLOCK_HOST_S if plan.engine is Engine.DDP else ZERO_BLOCK_HOST_S
    rate = hardware.memory_bytes_per_s * UPDATE_SHARE
    copies_s = 0.0 if hardware.is_cpu else _copies_s(plan, model, hardware, part)
    is_queued = plan.offload.pin_memory  # the host waits for copies of other memory
    offload_s = _optimizer_offload_s(plan, hardware, part, on_cpu) + _disk_s(plan, model, hardware, part)
    return Update(
        device_s=part * (1 - on_cpu) * _update_bytes(plan) / rate,
        streamed_s=copies_s if is_queued else 0.0,
        offload_s=offload_s + (0.0 if is_queued else copies_s),
        host_s=blocks * per_block + STEP_HOST_S,
    )


def _update_bytes(plan: Plan) -> int:
    plain = ADAMW_BYTES if plan.optimizer.name == "adamw" else SGD_BYTES
    update = FUSED_BYTES if plan.optimizer.fused else plain
    if plan.engine is Engine.DDP:
        return update + (DDP_CLIP_BYTES if plan.gradient_clipping else 0)
    return update + WRAPPER_BYTES


def _cpu_share(plan: Plan, part: float) -> float:
    """Share of a rank's parameters that the CPU updates.

    `ratio` leaves the first sub-groups on the device, rounded down: none if there is only one sub-group
    (stage3.py, _create_fp16_partitions_with_defragmentation).
    """
    if plan.offload.optimizer is Offload.NONE:
        return 0.0
    if plan.zero.stage < 3 or plan.offload.ratio >= 1:
        return 1.0
    groups = math.ceil(part / plan.zero.sub_group_size)
    return 1 - int((1 - plan.offload.ratio) * groups) / groups


def _copies_s(plan: Plan, model: ModelShape, hardware: Hardware, part: float) -> float:
    """Seconds to copy gradients to the host as they come, and weights to the device for every gathering."""
    rate = _copy_rate(plan, hardware)
    narrow = part * flops.element_bytes(plan.precision)
    gradients = 0.0 if plan.offload.optimizer is Offload.NONE else _gradient_trips(plan) * narrow + part * 4
    weights = 0.0 if plan.offload.param is Offload.NONE else gathers(plan, model) * plan.grad_accum * narrow
    return (gradients + weights) / rate


def _gradient_trips(plan: Plan) -> int:
    """Number of copies of a gradient per step, besides the last one, which is in fp32.

    Stages 2 and 3 keep the sum of micro-batches on the host: each micro-batch copies it to the device, adds
    to it, and copies it back.
    """
    if plan.zero.stage < 2:
        return 0
    return 2 * (plan.grad_accum - 1) + (1 if plan.zero.stage == 3 else 0)


def _optimizer_offload_s(plan: Plan, hardware: Hardware, part: float, on_cpu: float) -> float:
    """Seconds of the update on the CPU, and of copying its result back."""
    if plan.offload.optimizer is Offload.NONE:
        return 0.0
    cpu_rate = hardware.host_memory_bytes_per_s * CPU_ADAM_SHARE / _neighbours(plan, hardware)
    return part * on_cpu * CPU_ADAM_BYTES / cpu_rate + _return_s(plan, hardware, part)


def _return_s(plan: Plan, hardware: Hardware, part: float) -> float:
    """Seconds to copy updated weights to the device.

    Stage 3 copies fp32 into 16 bits: torch casts on the host, into memory that is not page-locked.
    """
    if hardware.is_cpu or plan.offload.param is not Offload.NONE:
        return 0.0  # weights stay there; casting them is counted with the optimizer
    is_cast = plan.zero.stage == 3 and plan.precision is not Precision.FP32
    rate = PAGEABLE_BYTES_PER_S if is_cast else _copy_rate(plan, hardware)
    return part * flops.element_bytes(plan.precision) / rate


def _disk_s(plan: Plan, model: ModelShape, hardware: Hardware, part: float) -> float:
    size = 0.0
    if plan.offload.optimizer is Offload.NVME:
        size += part * NVME_BYTES
    if plan.offload.param is Offload.NVME:
        on_disk = max(0.0, 1 - plan.offload.max_in_cpu / part)
        times = gathers(plan, model) * plan.grad_accum + 1  # read for each gathering, written once
        size += part * on_disk * flops.element_bytes(plan.precision) * times
    return size * _neighbours(plan, hardware) / hardware.nvme_bytes_per_s


def _neighbours(plan: Plan, hardware: Hardware) -> int:
    """Number of ranks that share a host's memory and disk."""
    return min(plan.ranks, hardware.ranks_per_node)


def _copy_rate(plan: Plan, hardware: Hardware) -> float:
    pinned = hardware.host_link_bytes_per_s * PIECES_SHARE
    return pinned if plan.offload.pin_memory else min(pinned, PAGEABLE_BYTES_PER_S)
