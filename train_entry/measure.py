"""The step clock: what one optimizer step takes, whole and in parts."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from train_entry.contract import StepMetrics, StepSplit, TrialSpec
from train_entry.engine import TrainEngine
from train_entry.failures import DivergedError
from train_entry.progress import Progress


@dataclass(frozen=True, kw_only=True, slots=True)
class Timings:
    """What the clock saw."""

    step_s: tuple[float, ...]  # every timed step
    split: StepSplit | None


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroStepParts:
    """Seconds that the parts of one micro-batch took."""

    fetch_s: float
    forward_s: float
    backward_s: float
    update_s: float

    @property
    def total_s(self) -> float:
        return self.fetch_s + self.forward_s + self.backward_s + self.update_s


class Stopwatch:
    """Seconds between laps. The device has finished its work at each."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last_lap = self._now()

    def lap(self) -> float:
        now = self._now()
        seconds = now - self._last_lap
        self._last_lap = now
        return seconds

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


class StepClock:
    """Runs the steps of a trial in order: the first, warm-up and timed ones, then those taken apart.

    A step is timed from fetching its first micro-batch to the end of its update on the device. Reducing the
    loss, writing metrics and all else follows when the clock has stopped.
    """

    def __init__(
        self,
        engine: TrainEngine,
        batches: Iterator[torch.Tensor],
        spec: TrialSpec,
        device: torch.device,
        progress: Progress,
    ) -> None:
        self._engine = engine
        self._batches = batches
        self._plan = spec.plan
        self._measure = spec.measure
        self._device = device
        self._progress = progress
        self._seconds: list[float] = []  # of every whole step
        self._step = 0
        self._loss = torch.zeros((), device=device)  # of this rank's micro-batches, summed over a step

    def first_step(self) -> None:
        """It creates the optimizer's state, and is timed only where no warm-up was asked for."""
        self._whole_step()

    def remaining_steps(self) -> Timings:
        """Warm up, time, take apart."""
        last_timed = self._measure.warmup_steps + self._measure.steps
        for _ in range(self._step, last_timed):
            self._whole_step()
        split_steps = [self._split_step() for _ in range(self._measure.split_steps)]
        return Timings(
            step_s=tuple(self._seconds[self._measure.warmup_steps : last_timed]), split=medians(split_steps)
        )

    def _whole_step(self) -> None:
        lr = self._engine.lr()
        before = self._engine.parameters() if self._measure.update_norms else []
        self._line_up()
        watch = Stopwatch(self._device)
        self._loss.zero_()
        for _ in range(self._plan.grad_accum):
            loss = self._engine.forward(self._next_batch())
            self._loss += loss.detach()
            self._engine.backward(loss)
            self._engine.step()
        seconds = watch.lap()
        self._seconds.append(seconds)
        timed = self._measure.warmup_steps <= self._step < self._measure.warmup_steps + self._measure.steps
        update_norm = distance(before, self._engine.parameters()) if self._measure.update_norms else None
        self._report(lr, seconds, timed, update_norm)

    def _line_up(self) -> None:
        """Let all ranks start a step together, so that rank 0, which writes files between, sees all of it."""
        if self._device.type == "cuda":
            dist.barrier(device_ids=[self._device.index])  # NCCL would guess the device, and warn
        else:
            dist.barrier()

    def _split_step(self) -> list[MicroStepParts]:
        """A step of its own, never a timed one: waiting for the device between the parts costs time."""
        lr = self._engine.lr()
        self._loss.zero_()
        parts = [self._split_micro_step() for _ in range(self._plan.grad_accum)]
        self._report(lr, sum(part.total_s for part in parts), timed=False, update_norm=None)
        return parts

    def _split_micro_step(self) -> MicroStepParts:
        watch = Stopwatch(self._device)
        batch = self._next_batch()
        fetch_s = watch.lap()
        loss = self._engine.forward(batch)
        forward_s = watch.lap()
        self._loss += loss.detach()
        self._engine.backward(loss)
        backward_s = watch.lap()
        self._engine.step()
        return MicroStepParts(
            fetch_s=fetch_s, forward_s=forward_s, backward_s=backward_s, update_s=watch.lap()
        )

    def _next_batch(self) -> torch.Tensor:
        return next(self._batches).to(self._device)

    def _report(self, lr: float, step_s: float, timed: bool, update_norm: float | None) -> None:
        """Raises DivergedError on all ranks alike, since all see the same mean."""
        self._step += 1
        self._progress.beat()  # before a collective: a rank that is waited for has shown that it got here
        loss = self._global_loss()
        if not math.isfinite(loss):
            raise DivergedError(f"the loss of step {self._step} is {loss}, at a learning rate of {lr:g}")
        self._progress.step(
            StepMetrics(
                step=self._step,
                tokens=self._step * self._plan.tokens_per_step,
                loss=loss,
                step_s=step_s,
                lr=lr,
                timed=timed,
                grad_norm=_finite(self._engine.grad_norm()),
                update_norm=update_norm,
            )
        )

    def _global_loss(self) -> float:
        """Mean over the global batch: all micro-batches hold equally many tokens."""
        mean = self._loss / (self._plan.grad_accum * self._plan.data)
        dist.all_reduce(mean)
        return float(mean)


def distance(before: list[torch.Tensor], after: list[torch.Tensor]) -> float:
    """Norm of the difference of two models."""
    squares = [(new.double() - old.double()).square().sum() for old, new in zip(before, after, strict=True)]
    return math.sqrt(float(torch.stack(squares).sum()))


def medians(steps: list[list[MicroStepParts]]) -> StepSplit | None:
    """Medians over steps of each part's sum over micro-batches; None where no step was taken apart."""
    if not steps:
        return None
    return StepSplit(
        local_s=statistics.median(step[0].fetch_s + step[0].forward_s for step in steps),
        forward_s=statistics.median(sum(part.forward_s for part in step) for step in steps),
        backward_s=statistics.median(sum(part.backward_s for part in step) for step in steps),
        update_s=statistics.median(sum(part.update_s for part in step) for step in steps),
    )


def _finite(value: float | None) -> float | None:
    """None for the infinity that an overflowed fp16 step has for a norm: JSON knows no infinity."""
    return value if value is not None and math.isfinite(value) else None
