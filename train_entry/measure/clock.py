"""The step clock: it measures the time of optimizer steps, as a whole and in parts."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from train_entry.contract import DeviceHealth, StepMetrics, StepSplit, TimingEnd, TrialSpec
from train_entry.engines.base import Held, Part, TrainEngine
from train_entry.failures import DivergedError
from train_entry.measure import health, stopping
from train_entry.progress import Heartbeats

PartTime = tuple[Part, float]  # seconds
ENDS: tuple[TimingEnd | None, ...] = (None, *TimingEnd)  # rank 0 broadcasts an index; None: timing goes on


@dataclass(frozen=True, kw_only=True, slots=True)
class Timings:
    """The results of the step clock."""

    step_s: tuple[float, ...]  # every timed step
    split: StepSplit | None
    ended: TimingEnd
    half_width_s: float | None  # of the mean step time's interval; see stopping
    health: DeviceHealth | None


class Stopwatch:
    """Measure the seconds between laps. Each lap waits until the device has finished its work."""

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
    """Run a trial's steps in order: the first step, warm-up steps, timed steps, split steps.

    A step is timed from fetching its first micro-batch to the end of its update on the device. Reducing the
    loss and writing metrics follow after the clock has stopped.
    """

    def __init__(
        self,
        engine: TrainEngine,
        batches: Iterator[torch.Tensor],
        spec: TrialSpec,
        device: torch.device,
        progress: Heartbeats,
    ) -> None:
        self._engine = engine
        self._batches = (batch.to(device) for batch in batches)
        self._plan = spec.plan
        self._measure = spec.measure
        self._device = device
        self._progress = progress
        self._seconds: list[float] = []  # of every step except split steps
        self._step = 0

    def first_step(self) -> None:
        """Run the first step. It creates the optimizer's states and counts as timed only without warm-up."""
        self._whole_step()

    def remaining_steps(self) -> Timings:
        """Warm up, time steps until that suffices, then run the split steps unless the trial is futile."""
        watch = health.Watch(health.card_of(self._device))
        ended = self._time_steps(watch)
        half_width_s = stopping.half_width_s(self._step_s_over_ranks(), self._measure.confidence)
        split_steps = 0 if ended is TimingEnd.FUTILE else self._measure.split_steps
        return Timings(
            step_s=self._timed,
            split=medians([self._split_step() for _ in range(split_steps)]),
            ended=ended,
            half_width_s=half_width_s,
            health=watch.health,
        )

    def _time_steps(self, watch: health.Watch) -> TimingEnd:
        """Time steps until the cap or an early end.

        Between steps, and never inside a timed span, look at the GPU and decide whether to go on.
        """
        while (timed := len(self._seconds) - self._measure.warmup_steps) < self._measure.steps:
            self._whole_step()
            if stopping.is_due(timed + 1, self._measure):
                watch.look()
                if (ended := self._agree()) is not None:
                    return ended
        if watch.health is None:
            watch.look()
        return TimingEnd.CAP

    @property
    def _timed(self) -> tuple[float, ...]:
        """Seconds of the timed steps so far, without split steps."""
        return tuple(self._seconds[self._measure.warmup_steps :])

    def _agree(self) -> TimingEnd | None:
        """Return why timing ends now, or None. Collective.

        Rank 0 decides for all: computed on different hosts, the last digit may differ.
        """
        ended: TimingEnd | None = None
        if stopping.depends_on_times(self._measure):
            ended = stopping.decide(self._step_s_over_ranks(), self._measure)
        if self._progress.is_asked_to_stop:
            ended = TimingEnd.ASKED
        choice = torch.tensor([ENDS.index(ended)], device=self._device)
        dist.broadcast(choice, src=0)
        return ENDS[int(choice.item())]

    def _step_s_over_ranks(self) -> tuple[float, ...]:
        """Return the seconds of each timed step on the slowest rank. Collective.

        Only a pipeline needs the maximum over ranks: elsewhere a step ends on all ranks together.
        """
        if self._plan.pipeline == 1:
            return self._timed
        step_s = torch.tensor(self._timed, dtype=torch.float64, device=self._device)
        dist.all_reduce(step_s, op=dist.ReduceOp.MAX)
        return tuple(step_s.tolist())

    def _whole_step(self) -> None:
        lr = self._engine.lr()
        before = self._engine.held() if self._measure.update_norms else []
        self._line_up()
        watch = Stopwatch(self._device)
        loss = self._engine.step(self._batches, lambda part: None)
        seconds = watch.lap()
        self._seconds.append(seconds)
        timed = self._measure.warmup_steps <= self._step < self._measure.warmup_steps + self._measure.steps
        update_norm = (
            distance(before, self._engine.held(), self._device) if self._measure.update_norms else None
        )
        self._report(loss, lr, seconds, timed, update_norm)

    def _line_up(self) -> None:
        """Let all ranks start a step together.

        Rank 0 writes files between steps. If the others started before it, it would time only part of a step.
        """
        if self._device.type == "cuda":
            dist.barrier(device_ids=[self._device.index])  # without it NCCL guesses the device and warns
        else:
            dist.barrier()

    def _split_step(self) -> list[PartTime]:
        """Run a split step and return its parts. It is never a timed step: the laps wait for the device."""
        lr = self._engine.lr()
        self._line_up()
        watch = Stopwatch(self._device)
        parts: list[PartTime] = []
        loss = self._engine.step(self._batches, lambda part: parts.append((part, watch.lap())))
        self._report(loss, lr, sum(seconds for _, seconds in parts), timed=False, update_norm=None)
        return parts

    def _report(
        self, own_loss: torch.Tensor, lr: float, step_s: float, timed: bool, update_norm: float | None
    ) -> None:
        """Record a step. Raise DivergedError if the mean loss is not finite: on all ranks, which share it."""
        self._step += 1
        self._progress.beat()  # before the collective, to show which rank has got this far
        loss = mean_over_ranks(own_loss)
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


def mean_over_ranks(loss: torch.Tensor) -> float:
    """Return the mean loss over the global batch. Collective.

    The mean over ranks is exact: each part of the batch has the same number of tokens and of ranks.
    """
    mean = loss / dist.get_world_size()
    dist.all_reduce(mean)
    return float(mean)


def distance(before: list[Held], after: list[Held], device: torch.device) -> float:
    """Return the norm of the difference of two states of the whole model, over all ranks. Collective."""
    squares = torch.zeros((), dtype=torch.float64, device=device)
    for old, new in zip(before, after, strict=True):
        squares += (new.values.double() - old.values.double()).square().sum().to(device) / new.copies
    dist.all_reduce(squares)
    return math.sqrt(float(squares))


def medians(steps: list[list[PartTime]]) -> StepSplit | None:
    """Return each part's median over split steps of its sum over micro-batches; None without split steps."""
    if not steps:
        return None

    def median_of(part: Part) -> float:
        return statistics.median(sum(spent for name, spent in step if name is part) for step in steps)

    return StepSplit(
        local_s=statistics.median(map(local_s, steps)),
        forward_s=median_of(Part.FORWARD),
        backward_s=median_of(Part.BACKWARD),
        exchange_s=median_of(Part.EXCHANGE),
        update_s=median_of(Part.UPDATE),
    )


def local_s(step: list[PartTime]) -> float:
    """Return the seconds until the end of the first forward pass, without waiting for other ranks."""
    end = next(index for index, (part, _) in enumerate(step) if part is Part.FORWARD) + 1
    return sum(seconds for part, seconds in step[:end] if part is not Part.EXCHANGE)


def _finite(value: float | None) -> float | None:
    """Return None instead of infinity, an overflowed fp16 step's norm: JSON has no infinity."""
    return value if value is not None and math.isfinite(value) else None
