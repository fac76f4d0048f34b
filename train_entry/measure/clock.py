"""The step clock: what one optimizer step takes, whole and in parts."""

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
ENDS: tuple[TimingEnd | None, ...] = (None, *TimingEnd)  # as rank 0 sends them; None: timing goes on


@dataclass(frozen=True, kw_only=True, slots=True)
class Timings:
    """What the clock saw."""

    step_s: tuple[float, ...]  # every timed step
    split: StepSplit | None
    ended: TimingEnd
    half_width_s: float | None  # of the mean step time's interval; see stopping
    health: DeviceHealth | None


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
        progress: Heartbeats,
    ) -> None:
        self._engine = engine
        self._batches = (batch.to(device) for batch in batches)
        self._plan = spec.plan
        self._measure = spec.measure
        self._device = device
        self._progress = progress
        self._seconds: list[float] = []  # of every whole step
        self._step = 0

    def first_step(self) -> None:
        """It creates the optimizer's state, and is timed only where no warm-up was asked for."""
        self._whole_step()

    def remaining_steps(self) -> Timings:
        """Warm up, time until that is enough, take apart what is not known to be futile."""
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
        """Looks at the card, and whether to go on, between steps: never inside a timed span."""
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
        """Seconds of the timed steps so far; those taken apart are not among them."""
        return tuple(self._seconds[self._measure.warmup_steps :])

    def _agree(self) -> TimingEnd | None:
        """Whether timing ends here, as rank 0 says: hosts may differ in a last digit. Collective."""
        ended: TimingEnd | None = None
        if stopping.depends_on_times(self._measure):
            ended = stopping.decide(self._step_s_over_ranks(), self._measure)
        if self._progress.is_asked_to_stop:
            ended = TimingEnd.ASKED
        choice = torch.tensor([ENDS.index(ended)], device=self._device)
        dist.broadcast(choice, src=0)
        return ENDS[int(choice.item())]

    def _step_s_over_ranks(self) -> tuple[float, ...]:
        """Of the timed steps: each ends with all ranks, but in a pipeline with its last stage. Collective."""
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
        """Let all ranks start a step together, so that rank 0, which writes files between, sees all of it."""
        if self._device.type == "cuda":
            dist.barrier(device_ids=[self._device.index])  # NCCL would guess the device, and warn
        else:
            dist.barrier()

    def _split_step(self) -> list[PartTime]:
        """A step of its own, never a timed one: waiting for the device between the parts costs time."""
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
        """Raises DivergedError on all ranks alike, since all see the same mean."""
        self._step += 1
        self._progress.beat()  # before a collective: a rank that is waited for has shown that it got here
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
    """The global batch's: equally many ranks have seen each part of it, of equally many tokens."""
    mean = loss / dist.get_world_size()
    dist.all_reduce(mean)
    return float(mean)


def distance(before: list[Held], after: list[Held], device: torch.device) -> float:
    """Norm of the difference of two states of the whole model, wherever its parts lie. Collective."""
    squares = torch.zeros((), dtype=torch.float64, device=device)
    for old, new in zip(before, after, strict=True):
        squares += (new.values.double() - old.values.double()).square().sum().to(device) / new.copies
    dist.all_reduce(squares)
    return math.sqrt(float(squares))


def medians(steps: list[list[PartTime]]) -> StepSplit | None:
    """Medians over steps of each part's sum over micro-batches; None where no step was taken apart."""
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
    """Seconds until the first forward pass has ended, without waiting for other ranks."""
    end = next(index for index, (part, _) in enumerate(step) if part is Part.FORWARD) + 1
    return sum(seconds for part, seconds in step[:end] if part is not Part.EXCHANGE)


def _finite(value: float | None) -> float | None:
    """None for the infinity that an overflowed fp16 step has for a norm: JSON knows no infinity."""
    return value if value is not None and math.isfinite(value) else None
