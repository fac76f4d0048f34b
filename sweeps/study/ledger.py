"""The record of a study: every trial, written before anyone else hears of it. The files are the truth."""

from __future__ import annotations

import dataclasses
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager

from sweeps.errors import ConfigError, StudyBusyError
from sweeps.study.record import asked_value
from train_entry.contract import (
    AttemptDir,
    ContractError,
    Scalar,
    State,
    StudyDir,
    StudyRecord,
    Trial,
    TrialDir,
    TrialSpec,
    dump,
    read_document,
    read_trial,
    write_atomic,
)


class Ledger:
    """The trials of one study. Numbers count from 1 and are never reused."""

    def __init__(self, directory: StudyDir) -> None:
        self.directory = directory
        self._trials: dict[int, Trial] = {}
        for trial_dir in directory.trials():
            trial = _read_trial(trial_dir)
            self._trials[trial.number] = trial

    @property
    def trials(self) -> list[Trial]:
        return [self._trials[number] for number in sorted(self._trials)]

    def __getitem__(self, number: int) -> Trial:
        return self._trials[number]

    def next_number(self) -> int:
        return max(self._trials, default=0) + 1

    def put(self, trial: Trial) -> Trial:
        """Record a trial in its current state."""
        write_atomic(self.directory.trial(trial.number).record, dump(trial))
        self._trials[trial.number] = trial
        return trial

    def open_attempt(self, spec: TrialSpec, ds_config: str | None) -> AttemptDir:
        """Make a directory for one launch, with all that the job is told. Fails where it exists already."""
        attempt = self.directory.trial(spec.trial).attempt(spec.attempt)
        attempt.path.mkdir(parents=True)
        write_atomic(attempt.spec, dump(spec))
        if ds_config is not None:
            write_atomic(attempt.ds_config, ds_config)
        return attempt

    def attempt(self, trial: int, attempt: int) -> AttemptDir:
        return self.directory.trial(trial).attempt(attempt)

    def twin(self, fingerprint: str) -> Trial | None:
        """Return an earlier trial of the very same job that runs, or that ended with a telling result."""
        telling = (State.RUNNING, State.MEASURED, State.INFEASIBLE)
        for trial in self.trials:
            if trial.fingerprint == fingerprint and trial.state in telling and not trial.is_refused:
                return trial
        return None


def _read_trial(folder: TrialDir) -> Trial:
    try:
        trial = read_trial(folder)
    except ContractError as error:
        raise ConfigError(f"{error}; repair or remove this file so that the study can continue") from error
    assert trial is not None, "trials() lists directories that have a record"
    return trial


def open_study(directory: StudyDir, asked: StudyRecord, accept_versions: bool) -> StudyRecord:
    """Start a study, or continue the one of that name.

    Limits may be raised on resume; settings that make trials comparable may not change. Raises ConfigError
    with each difference.
    """
    try:
        known = read_document(directory.record, StudyRecord)
    except ContractError as error:
        raise ConfigError(str(error)) from error
    if known is None:
        write_atomic(directory.record, dump(asked))
        return asked
    if problems := list(differences(known, asked, accept_versions)):
        raise ConfigError(problems)
    record = dataclasses.replace(known, limits=asked.limits)
    if accept_versions:
        record = dataclasses.replace(record, versions=asked.versions)
    write_atomic(directory.record, dump(record))
    return record


def differences(known: StudyRecord, asked: StudyRecord, accept_versions: bool) -> Iterator[str]:
    """Yield the reasons why a study cannot continue as asked, one line each."""
    pairs: list[tuple[str, Scalar, Scalar]] = [("objective", _sought(known), _sought(asked))]
    keys = {**known.asked, **asked.asked}
    pairs += [(key, asked_value(known, key), asked_value(asked, key)) for key in keys]
    pairs += [
        (f"the range of {key}", known.dimensions.get(key), asked.dimensions.get(key))
        for key in {**known.dimensions, **asked.dimensions}
    ]
    for name, before, now in pairs:
        if before != now:
            yield f"study {known.name}: {name} was {before}, now {now}; choose another study=NAME"
    if accept_versions:
        return
    for name in {**known.versions, **asked.versions}:
        before, now = known.versions.get(name, "absent"), asked.versions.get(name, "absent")
        if before != now:
            yield (
                f"study {known.name}: {name} was {before}, now {now}, which changes timings; "
                "accept_versions=true continues nevertheless"
            )


def _sought(record: StudyRecord) -> str:
    goals = record.goals
    budgets = sorted({goal.tokens for goal in goals if goal.tokens})
    return ", ".join((*(goal.name for goal in goals), *(f"for {tokens:,.0f} tokens" for tokens in budgets)))


@contextmanager
def exclusive(directory: StudyDir) -> Iterator[None]:
    """Lock a study for one orchestrator at a time. The lock ends with the process, however it ends."""
    directory.path.mkdir(parents=True, exist_ok=True)
    with directory.lock.open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.seek(0)
            holder = lock.read().strip() or "another process"
            raise StudyBusyError(f"study {directory.path.name} is being run by {holder}") from error
        lock.truncate(0)
        lock.write(f"pid {os.getpid()} on {os.uname().nodename}\n")
        lock.flush()
        yield
