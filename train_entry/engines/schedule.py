"""The learning rate over the updates, exactly as in DeepSpeed 0.19 (runtime/lr_schedules.py)."""

from __future__ import annotations

import math

from train_entry.contract import Schedule, SchedulePlan

LEAST_WARMUP_STEPS = 2  # DeepSpeed's schedulers warm up over at least two steps


def rate(peak: float, schedule: SchedulePlan, updates: int) -> float:
    """Return the learning rate of the update that follows `updates` others.

    DeepSpeed counts iterations from -1 and uses the rate at the start of the warm-up both at -1 and at 0, so
    the first two updates have the same rate. Only the cosine schedule begins at rate 0, whatever
    `warmup_from` is.
    """
    if schedule.kind is Schedule.CONSTANT and not schedule.warmup_steps:
        return peak
    iteration = updates - 1
    if iteration < 0:
        return 0.0 if schedule.kind is Schedule.COSINE else schedule.warmup_from
    if schedule.kind is Schedule.COSINE:
        return peak * _cosine_ratio(peak, schedule, iteration)
    return schedule.warmup_from + (peak - schedule.warmup_from) * _linear_share(schedule, iteration)


def _linear_share(schedule: SchedulePlan, iteration: int) -> float:
    """The position between `warmup_from` (0) and the peak (1). A linear decay ends at `warmup_from` again."""
    warmup_steps = max(LEAST_WARMUP_STEPS, schedule.warmup_steps)
    if iteration < warmup_steps:
        return iteration / warmup_steps
    if schedule.kind is Schedule.CONSTANT:
        return 1.0
    return max(0.0, (schedule.total_steps - iteration) / max(1, schedule.total_steps - warmup_steps))


def _cosine_ratio(peak: float, schedule: SchedulePlan, iteration: int) -> float:
    """The rate as a share of the peak. The first step after the warm-up has already decayed by one step."""
    warmup_steps = max(LEAST_WARMUP_STEPS, schedule.warmup_steps)
    if iteration < warmup_steps:
        begin = schedule.warmup_from / peak
        return begin + iteration / warmup_steps * (1.0 - begin)
    end = schedule.end / peak
    decay_steps = max(1, schedule.total_steps - warmup_steps)
    progress = min(1.0, (iteration - warmup_steps + 1) / decay_steps)
    return max(0.0, end + (1.0 - end) * (1 + math.cos(math.pi * progress)) / 2)
