"""The step clock: what one optimizer step takes, whole and in parts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from train_entry.contract import MeasureSpec, Plan, StepMetrics, StepSplit
from train_entry.engine import TrainEngine
from train_entry.failures import DivergedError
from train_entry.progress import Progress


@dataclass(frozen=True, kw_only=True, slots=True)
class Timings:
    """What the clock saw."""

    step_s: tuple[float, ...]  # every timed step
    split: StepSplit | None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Parts:
    """Seconds of one step's parts, summed over its micro-batches."""

    local_s: float
    forward_s: float
    backward_s: float
    update_s: float


class StepClock:
    """Runs the steps of a trial in order: the first, warm-up and timed ones, then those taken apart."""

    def __init__(
        self,
        engine: TrainEngine,
        batches: Iterator[torch.Tensor],
        plan: Plan,
        device: torch.device,
        progress: Progress,
        spec: MeasureSpec,
    ) -> None:
        self._engine = engine
        self._batches = batches
        self._plan = plan
        self._device = device
        self._progress = progress
        self._spec = spec
        self._step = 0
        self._loss = torch.zeros((), device=device)  # of this rank's micro-batches, summed over a step

    def first_step(self) -> None:
        """Untimed unless no warm-up was asked for; lazily created optimizer state appears here."""
        self._first_s = self._measured_step()

    def remaining_steps(self) -> Timings:
        """Warm up, time, take apart."""
        seconds = [self._first_s]
        for _ in range(self._spec.warmup_steps + self._spec.steps - 1):
            seconds.append(self._measured_step())
        parts = [self._split_step() for _ in range(self._spec.split_steps)]
        return Timings(step_s=tuple(seconds[self._spec.warmup_steps :]), split=_medians(parts))

    def _measured_step(self) -> float:
        """Seconds of one step; metrics, and whatever they cost, come after the clock has stopped."""
        lr = self._engine.lr()
        before = self._engine.parameters() if self._spec.update_norms else []
        self._synchronize()
        started = time.perf_counter()
        self._loss.zero_()
        for _ in range(self._plan.grad_accum):
            loss = self._engine.forward(self._next_batch())
            self._loss += loss.detach()
            self._engine.backward(loss)
            self._engine.step()
        self._synchronize()
        seconds = time.perf_counter() - started
        self._end_step(seconds, lr, self._update_norm(before))
        return seconds

    def _split_step(self) -> _Parts:
        """A step of its own, never a timed one: waiting for the device between the parts costs time."""
        lr = self._engine.lr()
        local_s = forward_s = backward_s = update_s = 0.0
        self._synchronize()
        self._loss.zero_()
        for micro_step in range(self._plan.grad_accum):
            fetch_s, batch = self._timed(self._next_batch)
            one_forward_s, loss = self._timed(lambda batch=batch: self._engine.forward(batch))
            self._loss += loss.detach()
            local_s += fetch_s + one_forward_s if micro_step == 0 else 0.0
            forward_s += one_forward_s
            backward_s += self._timed(lambda loss=loss: self._engine.backward(loss))[0]
            update_s += self._timed(self._engine.step)[0]
        parts = _Parts(local_s=local_s, forward_s=forward_s, backward_s=backward_s, update_s=update_s)
        self._end_step(forward_s + backward_s + update_s, lr, None)
        return parts
