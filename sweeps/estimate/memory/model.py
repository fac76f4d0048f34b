"""Estimate the memory of a plan by phase and pipeline stage. Pure.

A rank's peak is the largest of its phases, never their sum: the loss with all activations, the backward pass
with the first bucket, the reduction of a bucket, the conversion of gradients, the optimizer's step. None of
them falls with every ZeRO stage. The first step lacks the optimizer's moments until it ends, so it peaks no
higher than later ones. The estimate counts tensors as torch's allocator hands them out; `needed_bytes` adds
fragmentation, which is free memory in gaps that are too small.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import NormalDist

from sweeps.estimate.hardware import Hardware
from sweeps.estimate.memory import buffers
from sweeps.estimate.memory.account import (
    ACTIVATIONS,
    LOGITS,
    NOTHING,
    STEP,
    Component,
    Memory,
    PhaseMemory,
    StageMemory,
    enlarged,
    phase,
    scaled,
)
from sweeps.estimate.memory.activations import FP32_BYTES, Saved, saved
from sweeps.estimate.memory.classes import PlanClass, class_of
from sweeps.estimate.memory.host import PROCESS_BYTES, host_bytes, nvme_bytes, offloaded_bytes, process_bytes
from sweeps.estimate.memory.share import Share, shares
from sweeps.estimate.memory.states import States, Wrapper, states
from train_entry.contract import ModelShape, Plan

# Memory outside of torch's allocator, besides CUDA's context: kernels, which are loaded on first use, and
# NCCL's buffers, for the world and for each degree. A single H200 that ran out of memory had 1.2 to 1.6 GiB
# there (its capacity less what was free and what torch held); a second H200 added 0.4.
KERNELS_BYTES = 600 * 2**20
COMMUNICATOR_BYTES = 400 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryFactors:
    """Factors that measurements correct, none negative. The defaults hold before any measurement."""

    activations: float = 1.0  # scales what blocks keep
    logits: float = 1.0
    optimizer_step: float = 1.0  # scales what an update allocates temporarily
    unseen_bytes: float = 0.0  # on every rank, in every phase
    # Memory that must be free besides the allocated memory, as a share of it. Under a cap of 40 GiB torch
    # ran out with up to 1.6 GiB neither allocated nor enough for the request, once with 3.7; the fullest
    # plan that ran left 4.6.
    fragmentation: float = 0.05
    context: float = 1.0  # scales memory outside of torch's allocator
    # The remaining ratio for each class of plans, once the factors above are set.
    by_class: tuple[tuple[PlanClass, float], ...] = ()
    spread: float = 0.03  # standard deviation of the logarithm of measured over estimated
    observations: int = 0


PIPELINE_BUFFERS = 2  # DeepSpeed gives each stage at least so many
COLD = MemoryFactors()
# Expandable segments grow in place, so gaps are rare (PyTorch's notes on its CUDA allocator).
EXPANDABLE_GAPS = 0.3


def memory_of(plan: Plan, model: ModelShape, hardware: Hardware, factors: MemoryFactors = COLD) -> Memory:
    """Estimate all memory that a plan needs: of its devices, of the fullest node's host, and of its disk."""
    kept = saved(plan, model)
    ratio = dict(factors.by_class).get(class_of(plan), 1.0)
    stages = []
    for share in shares(plan, model):
        held = states(plan, share)
        parts = _Parts(
            plan=plan,
            share=share,
            held=held,
            kept=kept,
            vocab=model.vocab,
            hardware=hardware,
            factors=factors,
        )
        phases = tuple(parts.phases())
        if ratio != 1:
            phases = tuple([enlarged(each, ratio) for each in phases])
        stages.append(StageMemory(stage=share.stage, phases=phases))
    peak = max([stage.peak.total for stage in stages])
    return Memory(
        stages=tuple(stages),
        context_bytes=int(_context_bytes(plan, hardware) * factors.context),
        host_bytes=host_bytes(plan, model, hardware, peak),
        nvme_bytes=nvme_bytes(plan, model, hardware),
        process_bytes=process_bytes(plan, hardware),
        gaps=EXPANDABLE_GAPS if plan.expandable_segments else 1.0,
    )


def needed_bytes(memory: Memory, factors: MemoryFactors = COLD, quantile: float = 0.5) -> int:
    """Return the bytes that suffice for torch's allocator with this probability.

    Compare them with a per-process limit, which counts what torch reserves. A GPU must hold `card_bytes`.
    """
    margin = NormalDist(sigma=factors.spread).inv_cdf(quantile) if factors.spread > 0 else 0.0
    return int(memory.peak_bytes * (1 + factors.fragmentation * memory.gaps) * (1 + max(-0.9, margin)))


def card_bytes(memory: Memory, factors: MemoryFactors = COLD, quantile: float = 0.5) -> int:
    """Return the bytes that a GPU must hold: needed_bytes + CUDA's context, kernels and NCCL's buffers."""
    return needed_bytes(memory, factors, quantile) + memory.context_bytes


def _context_bytes(plan: Plan, hardware: Hardware) -> int:
    if hardware.is_cpu:
        return 0
    groups = 1 + sum(degree > 1 for degree in (plan.data, plan.tensor, plan.pipeline))
    return hardware.context_bytes + KERNELS_BYTES + COMMUNICATOR_BYTES * groups


@dataclass(frozen=True, kw_only=True, slots=True)
class _Parts:
    """The inputs from which one rank's phases are built."""

    plan: Plan
    share: Share
    held: States
    kept: Saved
    vocab: int
    hardware: Hardware
    factors: MemoryFactors

    def phases(self) -> Iterator[PhaseMemory]:
        """Yield every phase that may be the peak. Only the last pipeline stage computes a loss."""
        plan, share, held = self.plan, self.share, self.held
        base = self._base()
        yield self._start(base)
        passing = [
            *base,
            scaled("gathered weights", buffers.gathered_weights(plan, held, share)),
            scaled("cast weights", buffers.cast_weights(plan, held, share)),
        ]
        between = scaled("accumulated gradients", held.between if plan.grad_accum > 1 else 0)
        is_early = held.wrapper is Wrapper.ZERO12
        bucket = self._buckets() if is_early else NOTHING
        if share.has_head:
            # ZeRO-1 releases its buckets only with the last micro-batch (setup_buckets at the first one,
            # _release_ipg_buffers where gradients are reduced); ZeRO-2 with each.
            stays = [bucket] if plan.zero.stage == 1 and plan.grad_accum > 1 else []
            yield phase("loss", passing, between, *stays, *self._kept(1.0), self._logits())
        yield from self._backward(passing, between, bucket)
        yield from self._reduction(passing, bucket)
        gradients = scaled("gradients for the step", buffers.step_gradients(held))
        copies = scaled("gradient copies", buffers.conversion(held) * self.factors.optimizer_step, STEP)
        yield phase("conversion", base, gradients, copies)
        temporaries = buffers.optimizer_temporaries(plan, held, self.hardware)
        yield phase("step", base, gradients, self._temporaries(temporaries))

    def _backward(
        self, passing: list[Component], between: Component, bucket: Component
    ) -> Iterator[PhaseMemory]:
        """Yield the backward pass of a micro-batch's last block, with the gradients of earlier micro-batches.

        If all micro-batches of a step are in flight at once, there are no such gradients yet: the first phase
        has all activations, the second has gradients and one micro-batch less.
        """
        in_flight, working = self.share.in_flight, self._working(at_head=True)
        adds_nothing = self.held.wrapper is not Wrapper.BF16  # it keeps gradients from step to step
        if 1 < in_flight == self.plan.grad_accum and adds_nothing:
            yield phase("backward", passing, bucket, *self._kept(1.0), *working)
            in_flight -= 1
        yield phase("backward", passing, between, bucket, *self._kept(1.0, in_flight), *working)

    def _base(self) -> list[Component]:
        plan, held, share = self.plan, self.held, self.share
        is_cpu = self.hardware.is_cpu
        is_lasting = held.wrapper is Wrapper.ZERO3
        return [
            scaled("weights", held.weights),
            scaled("second weights", held.second_weights),
            scaled("master weights", held.master),
            scaled("moments", held.moments),
            scaled("gradients", held.gradients),
            self._buckets() if is_lasting else NOTHING,
            scaled("offload buffer", buffers.offload_buffer(plan, held, share)),
            scaled("workspace", buffers.workspace(self.hardware)),
            scaled("process", PROCESS_BYTES["cpu"] if is_cpu else 0),
            scaled("offloaded", offloaded_bytes(plan, share) if is_cpu else 0),
            scaled("unseen", self.factors.unseen_bytes),
        ]

    def _buckets(self) -> Component:
        return self._buffer("buckets", buffers.buckets(self.plan, self.held, self.share))

    def _buffer(self, name: str, size: float) -> Component:
        """Return a buffer: whole on a GPU; on a CPU, memory that is never written to is not resident."""
        written = self.share.parameters * max(self.held.wide, self.held.summed)
        return scaled(name, min(size, written) if self.hardware.is_cpu else size)

    def _start(self, base: list[Component]) -> PhaseMemory:
        """Return the start-up phase, until the engine is built. The first step creates the moments."""
        held, count = self.held, self.share.parameters
        fixed = [part for part in base if part.name in ("weights", "workspace", "process", "unseen")]
        match held.wrapper:
            case Wrapper.DDP:
                return phase("start", fixed, scaled("gradients", held.gradients))
            case Wrapper.ZERO3:
                # stage3.py, _create_fp32_partitions: each sub-group in fp32, and once more while it is
                # cloned. A parameter is initialized in fp32 before it is sharded.
                made = held.master + FP32_BYTES * max(held.group, self.share.largest_parameter)
                return phase(
                    "start", fixed, scaled("second weights", held.second_weights), scaled("copies", made)
                )
            case Wrapper.PLAIN | Wrapper.UNFUSED:
                # unfused_optimizer.py steps once with gradients of zero to create the moments.
                first = held.moments + 2 * held.temporary
                return phase("start", fixed, scaled("copies", held.master + first))
            case _:
                # The model is built in fp32. stage_1_and_2.py flattens the weights, then clones the rank's
                # part and casts it to fp32.
                wide = held.wide
                made = max(count * (FP32_BYTES - wide), count * wide, held.part * (wide + FP32_BYTES))
                return phase("start", fixed, scaled("copies", made))

    def _kept(self, left: float, in_flight: int | None = None) -> list[Component]:
        """Return the activations when the backward pass still has this share of the blocks to go through."""
        plan, share, kept = self.plan, self.share, self.kept
        every, factor = plan.checkpoint_every, self.factors.activations
        recomputed = -(-share.blocks // every) if every else 0
        passes = (in_flight or share.in_flight) - 1 + left
        whole = (share.blocks - recomputed) * kept.block * passes
        outside = kept.outside if share.has_head and left == 1 else 0.0
        # deepspeed/runtime/pipe/engine.py keeps each micro-batch's output, and its input unless it is tokens;
        # one more buffer receives inputs, and one receives gradients.
        ends = (not share.has_embedding) + (not share.has_head)
        sent = ends * (share.in_flight + 1) * kept.hidden
        if share.has_head and plan.pipeline > 1:
            sent += self._kept_logits()
        return [
            scaled("activations", (whole + outside) * factor, ACTIVATIONS),
            scaled("block inputs", recomputed * kept.block_input * passes * factor, ACTIVATIONS),
            scaled("pipeline buffers", sent),
        ]

    def _kept_logits(self) -> float:
        """Bytes of logits, as computed, that stay until their buffer's next use.

        deepspeed/runtime/pipe/engine.py never frees the last stage's outputs. That stage has two buffers
        (runtime/pipe/schedule.py, num_pipe_buffers).
        """
        plan = self.plan
        logits = plan.micro_batch * plan.seq_len * self.vocab * self.held.wide
        return min(PIPELINE_BUFFERS, plan.grad_accum) * logits

    def _working(self, at_head: bool) -> list[Component]:
        """Return the working memory of the backward pass through the head, and then through a block."""
        kept, share, factor = self.kept, self.share, self.factors.activations
        again = kept.block if self.plan.checkpoint_every else 0.0
        head = share.head_parameters * self.held.wide if at_head else 0.0
        working = max(head, (again + kept.backward) * factor)
        gradient = kept.hidden * factor if share.has_head else 0.0  # else it is in the receive buffer
        return [scaled("backward", gradient + working, ACTIVATIONS)]

    def _logits(self) -> Component:
        return scaled("logits", self.kept.logits * self.factors.logits, LOGITS)

    def _temporaries(self, count: float) -> Component:
        return scaled("optimizer temporaries", count * self.factors.optimizer_step, STEP)

    def _reduction(self, passing: list[Component], bucket: Component) -> Iterator[PhaseMemory]:
        """Yield the reduction of the first full bucket: while gradients still come, or after the last one.

        Gradients move into the bucket one by one, which frees the memory where they were.
        """
        plan, held, share = self.plan, self.held, self.share
        added = [
            scaled("gradients of the part", buffers.partition_copy(plan, held)),
            scaled("reduction copy", buffers.reduction_copy(plan, held, share)),
        ]
        is_zero1 = held.wrapper is Wrapper.ZERO12 and plan.zero.stage == 1
        filled = min(float(plan.zero.reduce_bucket_size), share.parameters)
        waiting = held.between * (1 - filled / share.parameters if is_zero1 else 1)
        if held.wrapper in (Wrapper.PLAIN, Wrapper.UNFUSED, Wrapper.BF16):
            # By then BF16_Optimizer has added the weights' own gradients to its flat ones.
            whole = share.parameters * held.wide if held.wrapper is Wrapper.BF16 else held.between
            yield phase("reduction", passing, scaled("accumulated gradients", whole), bucket, *added)
        elif is_zero1 and not plan.zero.overlap_comm:
            again = self._buffer("pipeline bucket", buffers.pipeline_bucket(plan, held))
            buckets = [bucket, again]
            yield phase("reduction", passing, scaled("accumulated gradients", held.between), *buckets)
            yield phase("reduction", passing, scaled("accumulated gradients", waiting), *buckets, *added)
        else:
            gone = (filled - share.head_parameters) / max(1.0, share.blocks * share.block_parameters)
            left = 1 - min(1.0, max(0.0, gone))
            between = scaled("accumulated gradients", waiting if plan.grad_accum > 1 else 0)
            blocks = [*self._kept(left), *self._working(at_head=False)]
            yield phase("reduction", passing, between, bucket, *added, *blocks)
