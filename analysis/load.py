"""A study directory as rows. Reading is tolerant: the study may be running, or half-written."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from statistics import fmean

from train_entry.contract import (
    Advice,
    Engine,
    Estimate,
    Failure,
    FailureKind,
    Measurement,
    MemoryKind,
    Origin,
    Outcome,
    Plan,
    Precision,
    Reason,
    Scalar,
    State,
    StepMetrics,
    StudyDir,
    StudyRecord,
    Trial,
    TrialDir,
    read_document,
    read_lines,
)

LOSS_STEPS = 5  # a loss is the mean over so many steps, as in Measurement.loss


class StudyUnreadable(ValueError):
    """There is no study where one was asked for; the message says what is there."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialRow:
    """One trial with the measurement that counts for it: its own, or that of the trial it reuses."""

    number: int
    state: State
    origin: Origin
    strategy: str | None  # from the plan; of a rejected trial, what was asked, if that varied
    overrides: tuple[str, ...] = ()
    values: Mapping[str, Scalar] = field(default_factory=dict)  # of the knobs that vary
    estimate: Estimate | None = None  # of its own plan, made before the launch
    failure: Failure | None = None
    reasons: tuple[Reason, ...] = ()  # why rejected
    advice: Advice | None = None  # after running out of memory
    reused_from: int | None = None
    gpu_s: float = 0.0
    starts_late: bool = False  # its first update is too small, by DeepSpeed's doing: its losses lag
    shared: bool = False  # another trial ran on the same node while this was timed
    objective: float | None = None  # what ranks it; None unless finite, with a finite loss
    tokens_per_s: float | None = None
    tokens_per_s_per_gpu: float | None = None
    step_s: float | None = None
    step_s_iqr: float | None = None
    peak_bytes: int | None = None
    memory_kind: MemoryKind | None = None
    mfu: float | None = None
    loss: float | None = None  # mean of the last steps at or before the study's loss_tokens
    loss_tokens: int | None = None  # seen by the last of those steps

    @property
    def is_refused(self) -> bool:
        return is_refused(self.state, self.failure)


@dataclass(frozen=True, kw_only=True, slots=True)
class Study:
    """All that is known of a study, in the order of the trials' numbers."""

    directory: StudyDir
    record: StudyRecord
    rows: tuple[TrialRow, ...]
    trials: tuple[Trial, ...]  # in the same order
    loss_tokens: int | None  # the most that every trial with a loss reached: where losses are compared
    checked: bool = False  # losses are those of checks, longer runs of the best; others have none
    warnings: tuple[str, ...] = ()

    @property
    def knobs(self) -> tuple[str, ...]:
        """Names of the knobs that vary: as asked, then those that only trials know."""
        names = dict.fromkeys(self.record.dimensions)
        for row in self.rows:
            names.update(dict.fromkeys(row.values))
        return tuple(names)


def is_refused(state: State, outcome: Outcome | None) -> bool:
    """Not launched, since by its estimate it cannot fit."""
    is_estimated = isinstance(outcome, Failure) and outcome.kind is FailureKind.INFEASIBLE
    return is_estimated and state is State.INFEASIBLE


def load_study(directory: StudyDir) -> Study:
    """The study in a directory. A trial that cannot be read is a warning. Raises StudyUnreadable."""
    record = _record(directory)
    trials, warnings = _trials(directory)
    if record.objective not in {known.name for known in fields(Measurement)}:
        warnings.append(
            f"{directory.record}: no measurement has the objective '{record.objective}': nothing is ranked"
        )
    checked = any(isinstance(trial.check, Measurement) for trial in trials.values())
    trained = {number: trial for number, trial in trials.items() if _has_loss(trial, checked)}
    streams = {number: _stream(directory.trial(number), trial, checked) for number, trial in trained.items()}
    tokens = _common_tokens(trained.values(), streams, checked)
    rows = []
    for trial in trials.values():
        source = _source(trial, trials)
        row = _measured(_row(trial), source, record.objective)
        if tokens is not None and source.number in streams:
            row = _with_loss(row, _run(source, checked), streams[source.number], tokens)
        rows.append(row)
    return Study(
        directory=directory,
        record=record,
        rows=tuple(rows),
        trials=tuple(trials.values()),
        loss_tokens=tokens,
        checked=checked,
        warnings=tuple(warnings),
    )


def _record(directory: StudyDir) -> StudyRecord:
    if not directory.path.is_dir():
        raise StudyUnreadable(f"no such directory: {directory.path}")
    try:
        record = read_document(directory.record, StudyRecord)
    except (ValueError, OSError) as error:
        raise StudyUnreadable(f"cannot read {directory.record}: {_one_line(error)}") from error
    if record is None:
        raise StudyUnreadable(f"no study.json in {directory.path}{_nearby(directory)}")
    return record


def _nearby(directory: StudyDir) -> str:
    """A way out for who named the directory of all studies."""
    studies = sorted(found.parent.name for found in directory.path.glob("*/study.json"))
    return f"; it holds the studies {', '.join(studies)}" if studies else ""


def _trials(directory: StudyDir) -> tuple[dict[int, Trial], list[str]]:
    """Readable trials by number, and a line for each other."""
    trials: list[Trial] = []
    warnings: list[str] = []
    for place in directory.trials():
        try:
            trials.append(_trial(directory, place))
        except (ValueError, TypeError, OSError) as error:
            text = _one_line(error)
            warnings.append(text if str(place.record) in text else f"{place.record}: {text}")
    return {trial.number: trial for trial in sorted(trials, key=lambda trial: trial.number)}, warnings


def _trial(directory: StudyDir, place: TrialDir) -> Trial:
    trial = read_document(place.record, Trial)
    if trial is None:
        raise FileNotFoundError(f"{place.record}: it has just gone")
    if directory.trial(trial.number) != place:
        raise ValueError(f"{place.record}: it says that it is trial {trial.number}")
    return trial


def _run(trial: Trial, checked: bool) -> Outcome | None:
    """The run whose loss counts."""
    return trial.check if checked else trial.outcome


def _has_loss(trial: Trial, checked: bool) -> bool:
    return isinstance(_run(trial, checked), Measurement) or (not checked and trial.state is State.STOPPED)


def _stream(place: TrialDir, trial: Trial, checked: bool) -> tuple[StepMetrics, ...]:
    """Steps of the attempt whose loss counts; where that is not known, of the latest that recorded any."""
    attempt = trial.check_attempt if checked else trial.measured_attempt
    latest_first = range(trial.attempts, 0, -1)
    for number in latest_first if attempt is None else (attempt,):
        steps = tuple(read_lines(place.attempt(number).metrics, StepMetrics))
        if steps:
            return steps
    return ()


def _common_tokens(
    trials: Iterable[Trial], streams: Mapping[int, tuple[StepMetrics, ...]], checked: bool
) -> int | None:
    """The largest token count that every measured trial reached."""
    reached = [
        streams[trial.number][-1].tokens if streams[trial.number] else run.tokens
        for trial in trials
        if trial.state is State.MEASURED and isinstance(run := _run(trial, checked), Measurement)
    ]
    return min(reached, default=None)


def _source(trial: Trial, trials: Mapping[int, Trial]) -> Trial:
    """The trial whose measurement counts for this one: itself, unless it reuses another's."""
    visited = {trial.number}
    while trial.state is State.REUSED and trial.reused_from is not None:
        if trial.reused_from in visited or trial.reused_from not in trials:
            break  # damaged, or not readable: it shows what its own file holds
        trial = trials[trial.reused_from]
        visited.add(trial.number)
    return trial


def _row(trial: Trial) -> TrialRow:
    asked = trial.values.get("strategy")
    return TrialRow(
        number=trial.number,
        state=trial.state,
        origin=trial.origin,
        strategy=trial.plan.strategy if trial.plan else None if asked is None else str(asked),
        overrides=trial.overrides,
        values=trial.values,
        estimate=trial.estimate,
        failure=trial.outcome if isinstance(trial.outcome, Failure) else None,
        reasons=trial.reasons,
        advice=trial.advice,
        reused_from=trial.reused_from,
        gpu_s=trial.gpu_s,
        starts_late=trial.plan is not None and _starts_late(trial.plan),
    )


def _starts_late(plan: Plan) -> bool:
    """Without ZeRO in bf16 DeepSpeed 0.19 takes an empty step first (initialize_optimizer_states)."""
    is_bf16 = plan.precision is Precision.BF16
    return plan.engine is Engine.DEEPSPEED and plan.zero.stage == 0 and is_bf16


def _measured(row: TrialRow, source: Trial, objective: str) -> TrialRow:
    seen = source.outcome
    if not isinstance(seen, Measurement):
        return row
    return replace(
        row,
        shared=source.shared,
        objective=_objective(seen, objective),
        tokens_per_s=seen.tokens_per_s,
        tokens_per_s_per_gpu=seen.tokens_per_s_per_gpu,
        step_s=seen.step_s,
        step_s_iqr=seen.step_s_iqr,
        peak_bytes=seen.peak_bytes,
        memory_kind=seen.memory_kind,
        mfu=seen.mfu,
    )


def _objective(seen: Measurement, name: str) -> float | None:
    """What ranks a measurement; none where training is broken, however fast it is."""
    value = getattr(seen, name, None)
    if not isinstance(value, (int, float)) or not math.isfinite(value) or not math.isfinite(seen.loss):
        return None
    return float(value)


def _with_loss(row: TrialRow, run: Outcome | None, stream: tuple[StepMetrics, ...], tokens: int) -> TrialRow:
    if stream and stream[-1].tokens >= tokens:
        last = [step for step in stream if step.tokens <= tokens][-LOSS_STEPS:]
        return replace(row, loss=fmean(s.loss for s in last), loss_tokens=last[-1].tokens) if last else row
    if not stream and isinstance(run, Measurement) and run.tokens == tokens:
        return replace(row, loss=run.loss, loss_tokens=tokens)
    return row


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
