"""What is expected of a plan before it runs, why a configuration is illegal, and what to try next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from train_entry.contract.shared.words import Fit, Scalar


@dataclass(frozen=True, kw_only=True, slots=True)
class Reason:
    """A rule that a configuration breaks."""

    rule: str  # its name
    text: str  # one line: the numbers, and what would be legal
    source: str = ""  # where it is written, or how it was seen


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """What to try after a trial that ran out of memory."""

    remedy: str  # its name
    changes: Mapping[str, Scalar]  # knobs and their new values
    why: str  # one line
    overrides: tuple[str, ...]  # `python sweep.py <overrides>` tries it


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """What was expected of a plan before it ran."""

    fit: Fit
    why: str  # one line: what there is too little of, with the numbers; empty where all fits
    peak_bytes: int  # allocated by torch on the fullest rank; resident memory of a rank on a CPU
    needed_bytes: int  # of that rank, with what fragments, the gate's margin, and the context if it counts
    limit_bytes: int  # what a rank may use
    reservable_bytes: int | None  # of it, by torch's allocator; None on a CPU, which has none
    host_bytes: int  # resident memory of all ranks of the fullest node
    host_limit_bytes: int | None
    nvme_bytes: int  # files of all ranks of the fullest node
    phase: str  # in which the peak lies
    components: Mapping[str, int]  # of the peak, in bytes
    step_s: float
    parts: Mapping[str, float]  # of the step, in seconds
    tokens_per_s: float
    tokens_per_s_per_gpu: float
    observations: int  # finished trials that it had learned from

    @property
    def excess(self) -> float:
        """By which share more is needed than there is, of what is shortest: 0.1 for a tenth too much."""
        host = self.host_bytes / max(1, self.host_limit_bytes) if self.host_limit_bytes is not None else 0.0
        return max(host, self.needed_bytes / max(1, self.limit_bytes)) - 1
