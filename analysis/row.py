"""One trial as a row of the table, with the measurement that counts for it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from train_entry.contract import (
    Advice,
    Engine,
    Estimate,
    Failure,
    FailureKind,
    Goal,
    Measurement,
    MemoryKind,
    Origin,
    Outcome,
    Plan,
    Precision,
    Purpose,
    Reason,
    Scalar,
    State,
    TimingEnd,
    Trial,
    undrifted,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class CardHealth:
    """The state of a trial's GPUs while its steps were timed."""

    throttled: tuple[str, ...]  # all reasons that slowed any of them, in NVML's words
    clock_mhz: int  # of the slowest GPU
    max_clock_mhz: int  # of that GPU
    temperature_c: int  # of the hottest GPU
    power_w: float  # mean over the GPUs


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialRow:
    """One trial with the measurement that counts for it: its own, or that of the trial it reuses."""

    number: int
    state: State
    origin: Origin
    strategy: str | None  # from the plan; of a rejected trial, what was asked, if that varied
    baseline: str | None = None  # its name among the baselines
    parent: int | None = None
    is_single_gpu: bool = False  # on other ranks, for comparison: cannot win
    can_win: bool = False  # it was measured, to a finite value of the first goal, on the ranks asked for
    ranks: int | None = None  # None: rejected
    overrides: tuple[str, ...] = ()
    values: Mapping[str, Scalar] = field(default_factory=dict)  # of the knobs that vary
    estimate: Estimate | None = None  # of its own plan, made before the launch
    failure: Failure | None = None
    reasons: tuple[Reason, ...] = ()  # why rejected
    advice: Advice | None = None  # after running out of memory
    reused_from: int | None = None
    gpu_s: float = 0.0
    starts_late: bool = False  # DeepSpeed makes its first update too small, so its losses lag
    repeats: int = 0  # measured again in the confirmation
    drift_repeats: int = 0  # measured again to see whether the machine has changed
    shared: bool = False  # another trial ran on the same node while this was timed
    drift: float = 1.0  # the machine's speed then / its speed at first
    # The study's goals, without drift; None where a value is not finite, or is a loss that nobody knows.
    sought: tuple[float | None, ...] = ()
    score: float | None = None  # of the first goal: larger is better
    tokens_per_s: float | None = None
    tokens_per_s_per_gpu: float | None = None
    step_s: float | None = None
    step_s_iqr: float | None = None
    steps: int | None = None  # timed
    ended: TimingEnd | None = None  # why no further step was timed
    spared_steps: int = 0
    relative_error: float | None = None
    peak_bytes: int | None = None
    memory_kind: MemoryKind | None = None
    mfu: float | None = None
    cards: CardHealth | None = None
    is_slowed: bool = False  # by heat or by the power supply
    is_mixed: bool = False  # its ranks ran on GPUs of different models
    loss: float | None = None  # mean of the last steps at or before the study's loss_tokens
    loss_tokens: int | None = None  # seen by the last of those steps

    @property
    def is_refused(self) -> bool:
        return is_refused(self.state, self.failure)

    @property
    def objective(self) -> float | None:
        """The value of the first goal."""
        return self.sought[0] if self.sought else None

    @property
    def name(self) -> str:
        """`trial 0003 (zero1)`"""
        return f"trial {self.number:04d}" + (f" ({self.strategy})" if self.strategy else "")


def is_refused(state: State, outcome: Outcome | None) -> bool:
    """True if the trial was not launched because its estimate says that it cannot fit."""
    is_estimated = isinstance(outcome, Failure) and outcome.kind is FailureKind.INFEASIBLE
    return is_estimated and state is State.INFEASIBLE


def row_of(trial: Trial, source: Trial, goals: Sequence[Goal], drift: float) -> TrialRow:
    """Return the row of a trial with the measurement of `source`, taken while the machine had this drift.

    The loss is not filled in yet.
    """
    row = _without_measurement(trial)
    seen = source.outcome
    return _with_measurement(row, source, seen, goals, drift) if isinstance(seen, Measurement) else row


def came_from(row: TrialRow) -> str:
    """Return the trial's origin: `baseline`, `remedy of 0003`, `prior`."""
    if row.is_single_gpu:
        return "single-GPU baseline"
    return row.origin.value if row.parent is None else f"{row.origin} of {row.parent:04d}"


def _without_measurement(trial: Trial) -> TrialRow:
    asked = trial.values.get("strategy")
    again = [repeat.purpose for repeat in trial.repeats if isinstance(repeat.outcome, Measurement)]
    return TrialRow(
        number=trial.number,
        state=trial.state,
        origin=trial.origin,
        strategy=trial.plan.strategy if trial.plan else None if asked is None else str(asked),
        baseline=trial.baseline,
        parent=trial.parent,
        is_single_gpu=trial.is_single_gpu,
        ranks=trial.plan.ranks if trial.plan else None,
        overrides=trial.overrides,
        values=trial.values,
        estimate=trial.estimate,
        failure=trial.outcome if isinstance(trial.outcome, Failure) else None,
        reasons=trial.reasons,
        advice=trial.advice,
        reused_from=trial.reused_from,
        gpu_s=trial.gpu_s,
        starts_late=trial.plan is not None and _starts_late(trial.plan),
        repeats=again.count(Purpose.CONFIRM),
        drift_repeats=again.count(Purpose.DRIFT),
    )


def _starts_late(plan: Plan) -> bool:
    """True if the first update is too small: in bf16 without ZeRO, DeepSpeed 0.19 takes an empty step first
    (initialize_optimizer_states)."""
    is_bf16 = plan.precision is Precision.BF16
    return plan.engine is Engine.DEEPSPEED and plan.zero.stage == 0 and is_bf16


def _with_measurement(
    row: TrialRow, source: Trial, seen: Measurement, goals: Sequence[Goal], drift: float
) -> TrialRow:
    sought = tuple(undrifted(goal, _value(goal, seen), drift) for goal in goals)
    return replace(
        row,
        shared=source.is_shared,
        drift=drift,
        sought=sought,
        score=None if sought[0] is None else goals[0].score(sought[0]),
        tokens_per_s=seen.tokens_per_s,
        tokens_per_s_per_gpu=seen.tokens_per_s_per_gpu,
        step_s=seen.step_s,
        step_s_iqr=seen.step_s_iqr,
        steps=seen.steps,
        ended=seen.ended,
        spared_steps=seen.spared_steps,
        relative_error=seen.relative_error,
        peak_bytes=seen.peak_bytes,
        memory_kind=seen.memory_kind,
        mfu=seen.mfu,
        cards=_card_health(seen),
        is_slowed=seen.is_suspect,
        is_mixed=seen.is_mixed,
    )


def _value(goal: Goal, seen: Measurement) -> float | None:
    """Return the score; None if training is broken, however fast it is."""
    return goal.value(seen) if math.isfinite(seen.loss) else None


def _card_health(seen: Measurement) -> CardHealth | None:
    found = [rank.health for rank in seen.ranks if rank.health is not None]
    if not found:
        return None
    slowest = min(found, key=lambda card: card.clock_mhz)
    return CardHealth(
        throttled=tuple(sorted({reason for card in found for reason in card.throttled})),
        clock_mhz=slowest.clock_mhz,
        max_clock_mhz=slowest.max_clock_mhz,
        temperature_c=max(card.temperature_c for card in found),
        power_w=sum(card.power_w for card in found) / len(found),
    )
