"""Find trials of other studies with the same model and machine, for estimates to learn from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeVar

from sweeps.config.keys import KEYS, is_marked
from sweeps.config.knob import Mark
from sweeps.study.record import asked_value
from train_entry.contract import (
    Failure,
    FailureKind,
    Measurement,
    ModelShape,
    State,
    StudyDir,
    StudyRecord,
    Trial,
    read_document,
    read_trial,
)

MOST_TRIALS = 100
BESIDE_PLANS = [name for name in KEYS if is_marked(name, Mark.BESIDE_PLANS)]

Record = TypeVar("Record")


def earlier_trials(studies_dir: Path, record: StudyRecord) -> list[Trial]:
    """Return trials of other studies that show how good their estimate was: the newest, oldest first.

    Only reads. A directory that is no study or cannot be read is skipped.
    """
    found = (
        trial
        for directory in _newest_first(studies_dir)
        if directory.path.name != record.name and _is_alike(_record_of(directory), record)
        for trial in _telling(directory)
    )
    return list(islice(found, MOST_TRIALS))[::-1]


def _record_of(directory: StudyDir) -> StudyRecord | None:
    return _tolerant(lambda: read_document(directory.record, StudyRecord))


def _newest_first(studies_dir: Path) -> list[StudyDir]:
    """Sort studies by when they were last started or resumed, precisely enough for an order."""
    dated: list[tuple[float, StudyDir]] = []
    for path in studies_dir.glob("*/study.json"):
        try:
            dated.append((path.stat().st_mtime, StudyDir(path.parent)))
        except OSError:
            continue
    return [directory for _, directory in sorted(dated, key=lambda pair: pair[0], reverse=True)]


def _is_alike(other: StudyRecord | None, record: StudyRecord) -> bool:
    """True if the other study's trials would need as much memory and time in this study.

    False for a copy of this study, which has its name.
    """
    if other is None or other.name == record.name:
        return False
    return (
        _shape(other.model) == _shape(record.model)
        and dict(other.versions) == dict(record.versions)
        and all(asked_value(other, key) == asked_value(record, key) for key in BESIDE_PLANS)
    )


def _shape(model: ModelShape) -> ModelShape:
    """Return the shape without its name and the path of its weights, which make no difference."""
    return dataclasses.replace(model, name="", path=None)


def _telling(directory: StudyDir) -> Iterator[Trial]:
    """Yield the study's trials that tell about their estimate, the latest first, read one at a time."""
    for place in reversed(directory.trials()):
        trial = _tolerant(partial(read_trial, place))
        if trial is not None and _tells(trial):
            yield trial


def _tells(trial: Trial) -> bool:
    """True if the trial was estimated, and ended in a way that shows its memory; a job counts once."""
    if trial.estimate is None or trial.plan is None or not trial.state.is_closed:
        return False
    if trial.state in (State.REUSED, State.SUSPECT):
        return False
    match trial.outcome:
        case Measurement() | Failure(kind=FailureKind.GPU_OOM):
            return True
    return False


def _tolerant(read: Callable[[], Record | None]) -> Record | None:
    """Return what `read` returns; None for a torn, non-UTF-8, foreign-version or forbidden file."""
    try:
        return read()
    except (OSError, ValueError):
        return None
