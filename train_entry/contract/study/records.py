"""What stays on record of a study and of each of its trials."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from train_entry.contract.job.results import Outcome
from train_entry.contract.job.spec import ModelShape, Plan
from train_entry.contract.shared.words import Fit, Origin, Purpose, State
from train_entry.contract.study.goals import Goal

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
class Repeat:
    """A measured trial, measured again in fresh processes."""

    attempt: int
    purpose: Purpose
    turn: int  # of the confirmation, from 1; repeats of one turn follow each other at once. 0: drift
    outcome: Outcome | None = None  # None: it runs
    started_at: float | None = None
    ended_at: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Elapsed:
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
    rung: str | None = None  # its name on the ladder of what is tried by hand; None: not of it
    is_yardstick: bool = False  # measured for comparison, on other ranks than the study asks: cannot win
    repeats: tuple[Repeat, ...] = ()
    drift: float = 1.0  # how fast the machine was when it was measured, over how fast it was at first
    check: Outcome | None = None  # of a longer run, at the study's number of tokens
    check_attempt: int | None = None
    shared: bool = False  # another trial ran on the same node meanwhile
    slots: tuple[str, ...] = ()  # leased for the latest attempt
    gpu_s: float = 0.0  # ranks x seconds, over all attempts
    elapsed: Elapsed | None = None
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
    objective: str  # the name of the first goal, which ranks the trials
    asked: Mapping[str, Scalar]  # dotted key to value: another value is another study
    dimensions: Mapping[str, str]  # knob to its range, in Hydra's grammar
    limits: Mapping[str, Scalar]  # may be raised on resume
    versions: Mapping[str, str]  # of what changes a timing
    model: ModelShape
    overrides: tuple[str, ...] = ()  # the command line that made it
    goals: tuple[Goal, ...] = ()  # what is sought, the most important first; none: `objective`, of old

    @property
    def goal(self) -> Goal:
        """What ranks the trials."""
        return self.goals[0] if self.goals else Goal(name=self.objective)


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """What repeats showed of one trial."""

    trial: int
    value: float  # of the goal, mean over its repeats
    low: float  # of the interval at Winner.confidence
    high: float
    repeats: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Winner:
    """winner.json: what the confirmation came to."""

    goal: str
    trial: int
    confidence: float
    standings: tuple[Standing, ...]  # of all that were repeated, the best first
    tied: tuple[
        int, ...
    ] = ()  # trials that cannot be told apart from the best; the winner needs least memory
    noise: float | None = None  # standard deviation of one repeat over its mean; None: too few
    rung: int | None = None  # the best rung of the ladder
    gain: float | None = None  # the winner's value over that rung's; None: not both repeated
    gain_low: float | None = None
    gain_high: float | None = None
