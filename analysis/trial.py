"""One trial in full, as `python sweep.py` without -m prints it."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Iterator
from typing import TextIO

from rich.console import Console
from rich.text import Text

from analysis.row import TrialRow, came_from
from analysis.text import advised, figure, signed
from train_entry.contract import (
    GIB,
    Elapsed,
    Failure,
    Fit,
    Measurement,
    MemoryKind,
    Origin,
    Plan,
    StepSplit,
    TimingEnd,
    Trial,
    counted,
    gib,
    size_text,
)


def show_trial(trial: Trial, row: TrialRow, stream: TextIO) -> None:
    """Print a trial's measurement, or why it has none, line by line."""
    console = Console(file=stream, highlight=False, soft_wrap=True)
    why = f" ({came_from(row)})" if row.origin in (Origin.BASELINE, Origin.REMEDY) else ""
    console.print(Text(f"{row.name}: {trial.state}{why}", style="bold"))
    match trial.outcome:
        case Measurement() as seen:
            for name, text in (*_lines(seen, trial.plan, row), *_expected(trial, seen)):
                console.print(Text(f"{name:<15} {text}"))
        case None:
            for reason in trial.reasons:
                console.print(Text(f"rejected: {reason.text}"))
        case Failure() as failure:
            meaning = "" if row.is_refused else f" ({failure.kind.explanation})"
            console.print(Text(f"{failure.kind}: {failure.message}{meaning}"))
            for name, text in _expected(trial, None):
                console.print(Text(f"{name:<15} {text}"))
            console.print(Text(failure.evidence[-2000:]), soft_wrap=True)
    elapsed = trial.latest.elapsed if trial.latest else None
    if elapsed is not None and elapsed.queue_s is not None:
        console.print(Text(f"{'clock':<15} {_elapsed(elapsed)}"))
    if trial.advice is not None:
        console.print(Text(f"try next: {advised(trial.advice)}"))
        console.print(Text(f"command: {shlex.join(['python', 'sweep.py', *trial.advice.overrides])}"))
    console.print(Text(f"run it again: {shlex.join(['python', 'sweep.py', *trial.overrides])}"))


def _elapsed(elapsed: Elapsed) -> str:
    parts = (("in the queue", elapsed.queue_s), ("start-up", elapsed.startup_s), ("running", elapsed.run_s))
    return ", ".join(f"{seconds:.0f} s {where}" for where, seconds in parts if seconds is not None)


def _lines(seen: Measurement, plan: Plan | None, row: TrialRow) -> Iterator[tuple[str, str]]:
    spread = 100 * seen.step_s_iqr / seen.step_s
    total = f"{seen.tokens_per_s:,.0f} tokens/s in total"
    yield "throughput", f"{seen.tokens_per_s_per_gpu:,.0f} tokens/s/GPU, {total}"
    yield "", f"{seen.samples_per_s:,.2f} sequences/s in total"
    steps = f"{1e3 * seen.step_s:,.1f} ms, interquartile range {spread:.1f}%"
    steps += f", over {counted(seen.steps, 'step')}"
    yield "step", steps + _precision(seen)
    yield from _split(seen, plan)
    yield from () if plan is None else _sharing(seen, plan)
    if seen.mfu is not None:
        yield "MFU", f"{100 * seen.mfu:.1f}% of the GPUs' peak, by (6 P + 12 L h s) FLOPs a token"
    yield from _memory(seen)
    yield from _cards(row)
    yield "loss", f"{seen.loss:.4f} after {seen.tokens:,} tokens"
    yield "start-up", f"{seen.startup_s:.1f} s to the end of the first step"
    yield "GPU time", f"{figure(row.gpu_s)} GPU-seconds, all attempts"


def _precision(seen: Measurement) -> str:
    """Return the step time's relative error, and the reason why timing ended early."""
    known = "" if seen.relative_error is None else f", accurate to {seen.relative_error:.2%}"
    skipped = f"{counted(seen.spared_steps, 'step')} skipped"
    early = f"; {_ENDS[seen.ended]}, {skipped}" if seen.ended in _ENDS else ""
    return known + early


_ENDS = {
    TimingEnd.PRECISE: "as precise as asked",
    TimingEnd.FUTILE: "stopped: slower than the best",
    TimingEnd.ASKED: "ended on request",
}


def _cards(row: TrialRow) -> Iterator[tuple[str, str]]:
    if row.cards is None:
        return
    slowed = f"; slowed by {' and '.join(row.cards.throttled)}" if row.cards.throttled else ""
    yield (
        "GPUs",
        f"{row.cards.clock_mhz:,} of {row.cards.max_clock_mhz:,} MHz, the slowest; up to "
        f"{row.cards.temperature_c} °C; {row.cards.power_w:,.0f} W on average{slowed}",
    )


def _split(seen: Measurement, plan: Plan | None) -> Iterator[tuple[str, str]]:
    """Yield the split of the step by pipeline stage, since each stage has work of its own."""
    stages: defaultdict[int, dict[int, StepSplit]] = defaultdict(dict)
    for rank in seen.ranks:
        if rank.split is not None:
            stages[plan.coordinates(rank.rank).stage if plan else 0][rank.rank] = rank.split
    name = "  of which"
    for stage, splits in sorted(stages.items()):
        first = _parts(splits[min(splits)], exchanges=len(stages) > 1)
        yield name, f"stage {stage}: {first}" if len(stages) > 1 else first
        name = ""
    if any(len(splits) > 1 for splits in stages.values()):
        yield "  slowest rank", max(map(_slowest, stages.values()))[1]


def _parts(split: StepSplit, *, exchanges: bool) -> str:
    seconds = {"forward": split.forward_s, "backward": split.backward_s}
    seconds |= {"exchange": split.exchange_s} if exchanges else {}
    seconds |= {"update": split.update_s}
    return f"{', '.join(f'{part} {1e3 * spent:,.1f}' for part, spent in seconds.items())} ms (timed apart)"


def _slowest(splits: dict[int, StepSplit]) -> tuple[float, str]:
    """Return how far the slowest rank lags behind ranks with the same work, and a line that says so."""
    slowest = max(splits, key=lambda rank: splits[rank].local_s)
    local_s, fastest_s = splits[slowest].local_s, min(split.local_s for split in splits.values())
    ratio = local_s / fastest_s if fastest_s > 0 else 1.0
    text = f"rank {slowest}: {1e3 * local_s:,.1f} ms to the end of its first forward pass, {ratio:.2f} times"
    return ratio, f"{text} that of the fastest rank with the same work"


def _sharing(seen: Measurement, plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield how a divided model lies on its ranks, and what the division costs."""
    if plan.pipeline > 1:
        waits = f"ranks wait {plan.bubble:.1%} of forward and backward at best"
        measured = "" if seen.bubble is None else f", {seen.bubble:.1%} as measured"
        batches = "1 micro-batch" if plan.grad_accum == 1 else f"{plan.grad_accum} micro-batches"
        yield "pipeline", f"{plan.pipeline} stages, {batches} a step: {waits}{measured}"
    if plan.tensor > 1:
        sent = size_text(seen.tensor_volume_bytes)
        yield "tensor", f"{plan.tensor} ranks share each matrix: each sends {sent} for that in a step"
    if plan.data > 1 and plan.data < plan.ranks:
        yield (
            "samples",
            f"{plan.data} copies of the model: each sees {plan.global_batch // plan.data} of the "
            f"{plan.global_batch} sequences of a step",
        )


def _memory(seen: Measurement) -> Iterator[tuple[str, str]]:
    fullest = max(seen.ranks, key=lambda rank: rank.peak.allocated_bytes)
    kind = "host RSS" if seen.memory_kind is MemoryKind.HOST_RSS else "allocated"
    phases = (("start-up", fullest.startup), ("first step", fullest.first_step), ("steady", fullest.steady))
    parts = ", ".join(f"{name} {gib(peak.allocated_bytes)}" for name, peak in phases)
    yield "peak memory", f"{gib(seen.peak_bytes)} GiB {kind} on rank {fullest.rank} ({parts})"
    if fullest.device_in_use_bytes is not None and fullest.device_total_bytes is not None:
        used, total = fullest.device_in_use_bytes / GIB, fullest.device_total_bytes / GIB
        yield (
            "",
            f"{gib(seen.reserved_bytes)} GiB reserved; {used:.2f} of {total:.2f} GiB in use on the GPU",
        )
        if seen.host_peak_bytes:  # 0: recorded before it was counted
            yield (
                "host memory",
                f"{gib(seen.host_peak_bytes)} GiB at most, all ranks of the fullest node",
            )


def _expected(trial: Trial, seen: Measurement | None) -> Iterator[tuple[str, str]]:
    """Yield the estimate made before the launch, and its error where there is a measurement."""
    said = trial.estimate
    if said is None:
        return
    peak, step = f"peak {gib(said.peak_bytes)} GiB", f"step {1e3 * said.step_s:,.1f} ms"
    if seen is not None and seen.peak_bytes > 0:
        peak += f" ({signed(said.peak_bytes / seen.peak_bytes - 1)})"
    if seen is not None and seen.step_s > 0 and not trial.is_shared:
        step += f" ({signed(said.step_s / seen.step_s - 1)})"
    trials = "1 trial" if said.observations == 1 else f"{said.observations} trials"
    yield "estimate", f"{peak}, {step}, from formulas {f'and {trials}' if said.observations else 'alone'}"
    if said.fit is not Fit.FITS:
        yield "", f"{_DOUBTS[said.fit]}: {said.why}"


_DOUBTS = {Fit.BORDERLINE: "borderline", Fit.TOO_LARGE: "cannot fit"}
