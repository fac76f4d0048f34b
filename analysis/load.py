"""Read a study directory as rows. The study may be running or half-written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from statistics import fmean

from analysis.row import TrialRow, row_of
from train_entry.contract import (
    GOALS,
    Goal,
    Measurement,
    Outcome,
    Ranking,
    State,
    StepMetrics,
    StudyDir,
    StudyRecord,
    Trial,
    TrialDir,
    Winner,
    read_document,
    read_lines,
    read_trial,
)

LOSS_STEPS = 5  # a loss is the mean over so many steps, as in Measurement.loss


class StudyUnreadable(ValueError):
    """The directory holds no study; the message says what it holds."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Study:
    """All that is known of a study, in the order of the trials' numbers."""

    directory: StudyDir
    record: StudyRecord
    rows: tuple[TrialRow, ...]
    trials: tuple[Trial, ...]  # in the same order
    loss_tokens: int | None  # the most that every trial with a loss reached: where losses are compared
    checked: bool = False  # losses are those of checks, longer runs of the best; others have none
    winner: Winner | None = None  # None: the study has no confirmation yet
    warnings: tuple[str, ...] = ()

    @property
    def goals(self) -> tuple[Goal, ...]:
        """The study's goals, the most important first."""
        return self.record.goals

    @property
    def goal(self) -> Goal:
        """The goal that ranks the trials."""
        return self.record.goal

    @property
    def ranking(self) -> Ranking:
        """The trials ranked by the first goal."""
        return Ranking(self.trials, self.goal)

    @property
    def knobs(self) -> tuple[str, ...]:
        """The knobs that vary: those asked for, then those that only trials name."""
        names = dict.fromkeys(self.record.dimensions)
        for row in self.rows:
            names.update(dict.fromkeys(row.values))
        return tuple(names)


def load_study(directory: StudyDir) -> Study:
    """Load the study in a directory. An unreadable trial becomes a warning. Raises StudyUnreadable."""
    record = _record(directory)
    trials, warnings = _trials(directory)
    warnings += _unknown_goals(directory, record)
    winner = _winner(directory, record.goal, warnings)
    checked = any(isinstance(_checked(trial), Measurement) for trial in trials.values())
    trained = {number: trial for number, trial in trials.items() if _has_loss(trial, checked)}
    streams = {number: _stream(directory.trial(number), trial, checked) for number, trial in trained.items()}
    tokens = _common_tokens(trained.values(), streams, checked)
    ranking = Ranking(trials.values(), record.goal)
    contenders = {trial.number for _, trial in ranking.contenders}
    rows = []
    for trial in trials.values():
        source = _source(trial, trials)
        row = row_of(trial, source, record.goals, ranking.drift(source))
        row = replace(row, can_win=trial.number in contenders)
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
        winner=winner,
        warnings=tuple(warnings),
    )


def _unknown_goals(directory: StudyDir, record: StudyRecord) -> list[str]:
    known = {*GOALS, *(known.name for known in fields(Measurement))}
    return [
        f"{directory.record}: no measurement has the objective '{goal.name}': nothing is ranked by it"
        for goal in record.goals
        if goal.name not in known
    ]


def _winner(directory: StudyDir, goal: Goal, warnings: list[str]) -> Winner | None:
    """Read the winner by the goal that ranks; add a warning if it cannot be read."""
    try:
        found = read_document(directory.winner, Winner)
    except (ValueError, OSError) as error:
        warnings.append(_one_line(error))
        return None
    return found if found is not None and found.goal == goal.name else None


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
    """Suggest what to give instead, if the user gave the directory of all studies."""
    studies = sorted(found.parent.name for found in directory.path.glob("*/study.json"))
    return f"; it holds the studies {', '.join(studies)}" if studies else ""


def _trials(directory: StudyDir) -> tuple[dict[int, Trial], list[str]]:
    """Return the readable trials by number, and a warning for each other one."""
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
    trial = read_trial(place)
    if trial is None:
        raise FileNotFoundError(f"{place.record}: it has just gone")
    if directory.trial(trial.number) != place:
        raise ValueError(f"{place.record}: it says that it is trial {trial.number}")
    return trial


def _run(trial: Trial, checked: bool) -> Outcome | None:
    """Return the attempt whose loss counts."""
    return _checked(trial) if checked else trial.outcome


def _checked(trial: Trial) -> Outcome | None:
    return trial.check.outcome if trial.check else None


def _has_loss(trial: Trial, checked: bool) -> bool:
    return isinstance(_run(trial, checked), Measurement) or (not checked and trial.state is State.STOPPED)


def _stream(place: TrialDir, trial: Trial, checked: bool) -> tuple[StepMetrics, ...]:
    """Return the steps of the attempt whose loss counts, or of the latest attempt at the same measurement."""
    attempt = trial.check if checked else trial.counted
    if attempt is None:
        return ()
    numbers = [one.number for one in trial.attempts if one.is_replaced and one.number < attempt.number]
    for number in (attempt.number, *reversed(numbers)):
        steps = tuple(read_lines(place.attempt(number).metrics, StepMetrics))
        if steps:
            return steps
    return ()


def _common_tokens(
    trials: Iterable[Trial], streams: Mapping[int, tuple[StepMetrics, ...]], checked: bool
) -> int | None:
    """Return the largest token count that every measured trial reached."""
    reached = [
        streams[trial.number][-1].tokens if streams[trial.number] else run.tokens
        for trial in trials
        if trial.state is State.MEASURED and isinstance(run := _run(trial, checked), Measurement)
    ]
    return min(reached, default=None)


def _source(trial: Trial, trials: Mapping[int, Trial]) -> Trial:
    """Return the trial whose measurement counts for this one: itself, unless it reuses another's."""
    visited = {trial.number}
    while trial.state is State.REUSED and trial.reused_from is not None:
        if trial.reused_from in visited or trial.reused_from not in trials:
            break  # damaged or unreadable: the trial shows what its own file holds
        trial = trials[trial.reused_from]
        visited.add(trial.number)
    return trial


def _with_loss(row: TrialRow, run: Outcome | None, stream: tuple[StepMetrics, ...], tokens: int) -> TrialRow:
    if stream and stream[-1].tokens >= tokens:
        last = [step for step in stream if step.tokens <= tokens][-LOSS_STEPS:]
        return replace(row, loss=fmean(s.loss for s in last), loss_tokens=last[-1].tokens) if last else row
    if not stream and isinstance(run, Measurement) and run.tokens == tokens:
        return replace(row, loss=run.loss, loss_tokens=tokens)
    return row


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
