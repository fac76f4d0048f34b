"""A plan's estimate before it runs, reasons why a configuration is illegal, and advice on what to try."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from train_entry.contract.shared.words import Fit, Scalar


@dataclass(frozen=True, kw_only=True, slots=True)
class Reason:
    """A rule that a configuration breaks."""

    rule: str  # its name
    text: str  # one line: the numbers, and what would be legal
    source: str = ""  # the document or code that states the rule, or the observation behind it


@dataclass(frozen=True, kw_only=True, slots=True)
class Advice:
    """A change to try after a trial that ran out of memory."""

    remedy: str  # its name
    changes: Mapping[str, Scalar]  # knobs and their new values
    why: str  # one line
    overrides: tuple[str, ...]  # `python sweep.py <overrides>` tries it


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A plan's predicted memory and step time, made before it runs."""

    fit: Fit
    why: str  # one line: which memory is too small, with the numbers; empty if the plan fits
    peak_bytes: int  # allocated by torch on the fullest rank; on a CPU, the rank's resident memory
    needed_bytes: int  # peak + fragmentation + safety margin, + CUDA context if the limit includes it
    limit_bytes: int  # what a rank may use
    reservable_bytes: int | None  # the part of it that torch's allocator may reserve; None on a CPU
    host_bytes: int  # resident memory of all ranks of the fullest node
    host_limit_bytes: int | None
    nvme_bytes: int  # files of all ranks of the fullest node
    phase: str  # the phase in which the peak occurs
    components: Mapping[str, int]  # of the peak, in bytes
    step_s: float
    parts: Mapping[str, float]  # of the step, in seconds
    tokens_per_s: float
    tokens_per_s_per_gpu: float
    observations: int  # finished trials from which the estimator had learned

    @property
    def excess(self) -> float:
        """The share by which the plan exceeds the scarcest memory: 0.1 is a tenth too much."""
        host = self.host_bytes / max(1, self.host_limit_bytes) if self.host_limit_bytes is not None else 0.0
        return max(host, self.needed_bytes / max(1, self.limit_bytes)) - 1
