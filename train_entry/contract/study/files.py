"""The directories of a study and of its trials, and reading a trial."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from train_entry.contract.job.files import AttemptDir
from train_entry.contract.job.results import RankExit
from train_entry.contract.shared.codec import ContractError, load
from train_entry.contract.shared.files import read_document
from train_entry.contract.study.trial import Trial
from train_entry.contract.study.upgrade import is_first_edition


@dataclass(frozen=True, slots=True)
class StudyDir:
    path: Path

    @property
    def record(self) -> Path:
        return self.path / "study.json"

    @property
    def lock(self) -> Path:
        return self.path / "orchestrator.lock"

    @property
    def winner(self) -> Path:
        return self.path / "winner.json"

    @property
    def table(self) -> Path:
        return self.path / "table.csv"

    @property
    def best(self) -> Path:
        return self.path / "best"

    def trial(self, number: int) -> TrialDir:
        return TrialDir(self.path / "trials" / f"{number:04d}")

    def trials(self) -> list[TrialDir]:
        """The trial directories that hold a record, in the order of their numbers."""
        return [TrialDir(found.parent) for found in sorted(self.path.glob("trials/[0-9]*/trial.json"))]


@dataclass(frozen=True, slots=True)
class TrialDir:
    path: Path

    @property
    def record(self) -> Path:
        return self.path / "trial.json"

    def attempt(self, number: int) -> AttemptDir:
        return AttemptDir(self.path / f"attempt-{number}")


def read_trial(folder: TrialDir) -> Trial | None:
    """Return a folder's trial, or None if it has no record. Raise ContractError if it is unreadable."""
    try:
        text = folder.record.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    try:
        trial = load(Trial, text)
    except ContractError as error:
        raise ContractError(f"{folder.record}: {error}") from error
    return _with_seconds(trial, folder) if is_first_edition(text) else trial


def _with_seconds(trial: Trial, folder: TrialDir) -> Trial:
    """Return the trial with the GPU-seconds of each attempt, which its supervisors recorded.

    The first edition recorded only the trial's total. Attempts without a record share the remainder equally.
    """
    if trial.plan is None or len(trial.attempts) < 2:
        return trial
    total_s, ranks = trial.gpu_s, trial.plan.ranks
    seconds = {attempt.number: _seconds(folder.attempt(attempt.number), ranks) for attempt in trial.attempts}
    known = {number: ranks * found for number, found in seconds.items() if found is not None}
    kept = trial.counted or trial.attempts[-1]
    silent = [number for number in seconds if number not in known] or [kept.number]
    missing_s = max(0.0, total_s - sum(found for number, found in known.items() if number not in silent))
    for attempt in trial.attempts:
        gpu_s = missing_s / len(silent) if attempt.number in silent else known[attempt.number]
        trial = trial.with_attempt(dataclasses.replace(attempt, gpu_s=gpu_s))
    return trial


def _seconds(attempt: AttemptDir, ranks: int) -> float | None:
    """The longest lifetime of a rank's process, in seconds; None if no supervisor recorded one."""
    found = []
    for rank in range(ranks):
        try:
            ended = read_document(attempt.exit(rank), RankExit)
        except (ContractError, OSError):
            continue
        found += [ended.seconds] if ended is not None else []
    return max(found, default=None)
