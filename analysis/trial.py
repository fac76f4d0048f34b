"""One trial in full: what `python sweep.py` without -m prints."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import TextIO

from rich.console import Console
from rich.text import Text

from analysis.load import TrialRow
from analysis.text import advised, figure
from train_entry.contract import Failure, Measurement, MemoryKind, Trial

GIB = 2**30


def show_trial(trial: Trial, row: TrialRow, stream: TextIO) -> None:
    """Print a trial's measurement, or why it has none, line by line."""
    console = Console(file=stream, highlight=False, soft_wrap=True)
    console.print(Text(f"trial {trial.number}, {row.strategy}: {trial.state}", style="bold"))
    match trial.outcome:
        case Measurement() as seen:
            for name, text in _lines(seen, row):
                console.print(Text(f"{name:<15} {text}"))
        case None:
            for reason in trial.reasons:
                console.print(Text(f"rejected: {reason.text}"))
        case Failure() as failure:
            console.print(Text(f"{failure.kind}: {failure.message} ({failure.kind.explanation})"))
            console.print(Text(failure.evidence[-2000:]), soft_wrap=True)
    if trial.advice is not None:
        console.print(Text(f"next try {advised(trial.advice)}"))
        console.print(Text(f"that is: {shlex.join(['python', 'sweep.py', *trial.advice.overrides])}"))
    console.print(Text(f"again: {shlex.join(['python', 'sweep.py', *trial.overrides])}"))


def _lines(seen: Measurement, row: TrialRow) -> Iterator[tuple[str, str]]:
    spread = 100 * seen.step_s_iqr / seen.step_s
    yield "throughput", f"{seen.tokens_per_s_per_gpu:,.0f} tokens/s per GPU, {seen.tokens_per_s:,.0f} in all"
    yield "", f"{seen.samples_per_s:,.2f} sequences/s in all"
    yield "step", f"{1e3 * seen.step_s:,.1f} ms, quartiles {spread:.1f}% apart, over {seen.steps} steps"
    if (split := seen.ranks[0].split) is not None:
        parts = (split.forward_s, split.backward_s, split.update_s)
        forward, backward, update = (f"{1e3 * part:,.1f}" for part in parts)
        yield "  of which", f"forward {forward}, backward {backward}, update {update} ms (timed apart)"
        yield "  slowest rank", _slowest(seen)
    if seen.mfu is not None:
        yield "MFU", f"{100 * seen.mfu:.1f}% of the cards' peak, by (6 P + 12 L h s) FLOPs a token"
    yield from _memory(seen)
    yield "loss", f"{seen.loss:.4f} after {seen.tokens:,} tokens"
    yield (
        "start-up",
        f"{seen.startup_s:.1f} s to the end of the first step; {figure(row.gpu_s)} GPU-seconds in all",
    )


def _slowest(seen: Measurement) -> str:
    local = {rank.rank: rank.split.local_s for rank in seen.ranks if rank.split is not None}
    slowest = max(local, key=lambda rank: local[rank])
    ratio = local[slowest] / min(local.values()) if min(local.values()) > 0 else 1.0
    local_ms = 1e3 * local[slowest]
    return f"rank {slowest}: {local_ms:,.1f} ms before its first collective, {ratio:.2f} x the fastest"


def _memory(seen: Measurement) -> Iterator[tuple[str, str]]:
    fullest = max(seen.ranks, key=lambda rank: rank.peak.allocated_bytes)
    kind = "host RSS" if seen.memory_kind is MemoryKind.HOST_RSS else "allocated"
    phases = (("start-up", fullest.startup), ("first step", fullest.first_step), ("steady", fullest.steady))
    parts = ", ".join(f"{name} {peak.allocated_bytes / GIB:.2f}" for name, peak in phases)
    yield "peak memory", f"{seen.peak_bytes / GIB:.2f} GiB {kind} on rank {fullest.rank} ({parts})"
    if fullest.device_in_use_bytes is not None and fullest.device_total_bytes is not None:
        used, total = fullest.device_in_use_bytes / GIB, fullest.device_total_bytes / GIB
        yield (
            "",
            f"{seen.reserved_bytes / GIB:.2f} GiB reserved; {used:.2f} of {total:.2f} GiB in use on the card",
        )
        if seen.host_peak_bytes:  # 0: recorded before it was counted
            yield (
                "host memory",
                f"{seen.host_peak_bytes / GIB:.2f} GiB at most, all ranks of the fullest node",
            )
