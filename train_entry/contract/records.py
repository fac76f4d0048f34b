"""What stays on record of a study and of each of its trials."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from train_entry.contract.intent import ModelShape, Plan
from train_entry.contract.seen import Outcome
from train_entry.contract.words import Fit, Origin, State

Scalar = str | int | float | bool | None


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Spent:
    """Where the time of the latest attempt went, in seconds of the clock. None: not known."""

    queue_s: float | None  # the job waited for its nodes
    startup_s: float | None  # until the slowest rank's first step had ended
    run_s: float | None  # from then on


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """trial.json: one configuration and all that is known of it."""

    number: int
    state: State
    origin: Origin
    overrides: tuple[str, ...]  # `python sweep.py <overrides>` runs it alone
    values: Mapping[str, Scalar]  # of the knobs that vary in this study
    created_at: float
    plan: Plan | None = None  # None: rejected
    fingerprint: str | None = None
    estimate: Estimate | None = None  # made before the launch; None: rejected, or of an earlier version
    outcome: Outcome | None = None
    reasons: tuple[Reason, ...] = ()  # why rejected
    reused_from: int | None = None
    parent: int | None = None
    attempts: int = 0
    lost: int = 0  # attempts that ended for no fault of the trial, and were followed by another
    measured_attempt: int | None = None  # the attempt that the outcome is of
    advice: Advice | None = None  # after running out of memory
    check: Outcome | None = None  # of a longer run, at the study's number of tokens
    check_attempt: int | None = None
    shared: bool = False  # another trial ran on the same node meanwhile
    slots: tuple[str, ...] = ()  # leased for the latest attempt
    gpu_s: float = 0.0  # ranks x seconds, over all attempts
    spent: Spent | None = None
    closed_at: float | None = None

    @property
    def is_refused(self) -> bool:
        """Whether it was not launched, since by its estimate it cannot fit."""
        return self.state is State.INFEASIBLE and self.attempts == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyRecord:
    """study.json: what was asked."""

    name: str
    created_at: float
    objective: str  # a field of Measurement, to be maximized
    asked: Mapping[str, Scalar]  # dotted key to value: another value is another study
    dimensions: Mapping[str, str]  # knob to its range, in Hydra's grammar
    limits: Mapping[str, Scalar]  # may be raised on resume
    versions: Mapping[str, str]  # of what changes a timing
    model: ModelShape
    overrides: tuple[str, ...] = ()  # the command line that made it
