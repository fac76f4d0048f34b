"""Estimate the time of a plan's optimizer step, part by part, before it has run. Pure.

`work_of` computes the seconds of the work from the constants. `assemble` scales them by factors of this
machine and model (`fitting` learns these from finished trials) and combines the parts.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from sweeps.estimate import flops
from sweeps.estimate.hardware import Hardware
from sweeps.estimate.time.collectives import pipeline_group, tensor_group
from sweeps.estimate.time.compute import MicroBatch, micro_batch_of
from sweeps.estimate.time.exchange import Exchange, exchange_of
from sweeps.estimate.time.update import Update, update_of
from train_entry.contract import ModelShape, Plan

# Share of a pass that can hide communication: the rest has run before the first bucket is full.
OVERLAP = 0.9
# Device and host work at the same time, and now and then one waits for the other: (a^10 + b^10)^(1/10) is 7%
# more than the larger if both take equally long, and 1% more if one takes four fifths of the other's time.
# CUDA queues about a thousand kernels, so short delays go unnoticed.
SIDE_BY_SIDE = 10
MICRO_BATCH_HOST_S = 1e-3  # the data loader, and the engine's calls around forward, backward and step


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeFactors:
    """Time of each part relative to the constants: 1 is as expected, 2 twice as long."""

    compute: float = 1.0  # kernels of forward and backward passes
    launch: float = 1.0  # the host: Python and dispatch, and a step's fixed part
    hooks: float = 1.0  # stage 3's Python, on top of `launch`
    communication: float = 1.0
    offload: float = 1.0
    update: float = 1.0  # the optimizer on the device
    spread: float = 0.25  # standard deviation of the logarithm of measured over estimated time

    @property
    def named(self) -> dict[str, float]:
        """The factors without the spread."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "spread"}


COLD = TimeFactors()


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Seconds of one optimizer step by part; they sum to `step_s`."""

    tokens: int  # per step, over all ranks
    ranks: int
    forward_s: float
    backward_s: float
    recompute_s: float
    tensor_s: float  # tensor-parallel all-reduces
    reduce_s: float  # gradients and updated weights, as far as no computing hides it
    gather_s: float  # weights in stage 3, as far as no computing hides it
    waiting_s: float  # the device waits for the host to launch kernels
    bubble_s: float  # pipeline stages wait for the first and the last micro-batch
    send_s: float  # activations between pipeline stages
    offload_s: float  # copies, the optimizer on the CPU, the disk
    update_s: float  # the optimizer on the device
    fixed_s: float  # Python that runs once per step

    @property
    def parts(self) -> dict[str, float]:
        """The seconds of each part by its name without the unit."""
        return {
            field.name.removesuffix("_s"): getattr(self, field.name)
            for field in fields(self)
            if field.name.endswith("_s")
        }

    @property
    def step_s(self) -> float:
        computing_s = self.forward_s + self.backward_s + self.recompute_s
        exchange_s = self.tensor_s + self.reduce_s + self.gather_s + self.send_s + self.offload_s
        return computing_s + exchange_s + self.waiting_s + self.bubble_s + self.update_s + self.fixed_s

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.step_s

    @property
    def tokens_per_s_per_gpu(self) -> float:
        return self.tokens_per_s / self.ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """The work of a plan, before any factor is applied."""

    tokens: int
    ranks: int
    micro_batches: int
    pipeline: int
    is_cpu: bool
    passes: MicroBatch
    tensor_s: float  # per micro-batch
    send_s: float  # per micro-batch
    exchange: Exchange
    update: Update


def time_of(plan: Plan, model: ModelShape, hardware: Hardware, factors: TimeFactors = COLD) -> StepTime:
    """Estimate the time of one optimizer step."""
    return assemble(work_of(plan, model, hardware), factors)


def work_of(plan: Plan, model: ModelShape, hardware: Hardware) -> Work:
    return Work(
        tokens=plan.tokens_per_step,
        ranks=plan.ranks,
        micro_batches=plan.grad_accum,
        pipeline=plan.pipeline,
        is_cpu=hardware.is_cpu,
        passes=micro_batch_of(plan, model, hardware),
        tensor_s=_tensor_s(plan, model, hardware),
        send_s=2 * pipeline_group(plan, hardware).send_s(_activation_bytes(plan, model)),
        exchange=exchange_of(plan, model, hardware),
        update=update_of(plan, model, hardware),
    )


def assemble(work: Work, factors: TimeFactors) -> StepTime:
    """Combine the parts of a step. Each of p pipeline stages waits for p - 1 micro-batches (1F1B, GPipe)."""
    passes, exchange, many = work.passes, work.exchange, work.micro_batches
    computing_s = factors.compute * (passes.forward_s + passes.backward_s + passes.recompute_s)
    tensor_s = factors.communication * work.tensor_s
    host_s = factors.launch * (passes.launch_s + MICRO_BATCH_HOST_S + factors.hooks * passes.hooks_s)
    window_s = _beside(computing_s + tensor_s, host_s, work.is_cpu)
    gather_s = _exposed(factors.communication * exchange.gather_s, 0.0, window_s, exchange.gather_overlaps)
    reduce_s = _reduce_s(work, factors, window_s)
    each_time_s = reduce_s if exchange.reductions > 1 else 0.0
    copying_s = factors.offload * work.update.streamed_s / many
    device_s = computing_s + tensor_s + gather_s + each_time_s + copying_s
    micro_s = _beside(device_s, host_s, work.is_cpu)
    send_s = factors.communication * work.send_s
    return StepTime(
        tokens=work.tokens,
        ranks=work.ranks,
        forward_s=many * factors.compute * passes.forward_s,
        backward_s=many * factors.compute * passes.backward_s,
        recompute_s=many * factors.compute * passes.recompute_s,
        tensor_s=many * tensor_s,
        reduce_s=exchange.reductions * reduce_s + factors.communication * exchange.update_s,
        gather_s=many * gather_s,
        waiting_s=many * max(0.0, micro_s - device_s),
        bubble_s=(work.pipeline - 1) * (micro_s + send_s),
        send_s=many * send_s,
        offload_s=factors.offload * (work.update.streamed_s + work.update.offload_s),
        update_s=factors.update * work.update.device_s,
        fixed_s=factors.launch * work.update.host_s,
    )


def _reduce_s(work: Work, factors: TimeFactors, window_s: float) -> float:
    """Seconds of one reduction that the backward pass does not hide."""
    passes, exchange = work.passes, work.exchange
    backward = passes.backward_s + passes.recompute_s
    share = backward / (backward + passes.forward_s)
    return _exposed(
        factors.communication * exchange.reduce_s,
        factors.communication * exchange.tail_s,
        share * window_s,
        exchange.reduce_overlaps,
    )


def _exposed(whole_s: float, tail_s: float, window_s: float, overlaps: bool) -> float:
    return max(tail_s, whole_s - OVERLAP * window_s) if overlaps else whole_s


def _beside(device_s: float, host_s: float, is_cpu: bool) -> float:
    """Combine both times: a GPU works while the host launches, a CPU does one after the other."""
    if is_cpu:
        return device_s + host_s
    larger = max(device_s, host_s)
    smaller = min(device_s, host_s)
    excess: float = (1 + (smaller / larger) ** SIDE_BY_SIDE) ** (1 / SIDE_BY_SIDE)
    return larger * excess


def _tensor_s(plan: Plan, model: ModelShape, hardware: Hardware) -> float:
    """Seconds of all-reduces: two per block forward, two backward, two if recomputed. Nothing hides them."""
    if plan.tensor == 1:
        return 0.0
    passes = 2.0 + (1 / plan.checkpoint_every if plan.checkpoint_every else 0)
    each_s = tensor_group(plan, hardware).all_reduce_s(_activation_bytes(plan, model))
    return 2 * passes * each_s * model.layers / plan.pipeline


def _activation_bytes(plan: Plan, model: ModelShape) -> float:
    """Bytes between two blocks, for one micro-batch."""
    return plan.micro_batch * plan.seq_len * model.hidden * flops.element_bytes(plan.precision)
