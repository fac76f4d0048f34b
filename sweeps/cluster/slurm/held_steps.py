"""End steps of held allocations, for the study itself or for `python -m sweeps cancel`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence

from sweeps.cluster.slurm.held_request import step_name
from sweeps.cluster.slurm.holder import Hold, HoldDir, Holder
from sweeps.cluster.slurm.queries import JobWatch
from sweeps.cluster.slurm.submit import cancel_jobs
from train_entry.contract import AttemptDir, ContractError, read_document

CANCEL_S = 60.0  # for a holder to end a step
LOOK_S = 0.2

Step = tuple[HoldDir, str, str]  # its allocation's directory, its name, its allocation's job id


def cancel_steps(steps: Sequence[Step], watch: JobWatch) -> list[str]:
    """End steps, all at once, and wait until they are gone. Return a line for each job that may not be.

    If a holder does not end its steps, end its allocation.
    """
    for directory, name, _ in steps:
        directory.cancel(name).touch()
    deadline, left = time.monotonic() + CANCEL_S, list(steps)
    while left and time.monotonic() < deadline:
        left = [step for step in left if not _is_gone(step, watch)]
        if left:
            time.sleep(LOOK_S)
    return cancel_jobs(sorted({job_id for _, _, job_id in left}), watch)


def _is_gone(step: Step, watch: JobWatch) -> bool:
    directory, name, job_id = step
    names = directory.names()
    never_begins = directory.over.name in names and directory.begun(name).name not in names
    if directory.ended(name).name in names or never_begins:
        return True
    facts = watch.facts(job_id)
    return facts is not None and (facts.is_over or facts.is_waiting)


def cancel_attempts(attempts: Sequence[AttemptDir]) -> list[str]:
    """End attempts' steps, whoever ordered them. Their allocations go on."""
    return cancel_steps([step for attempt in attempts for step in _steps(attempt)], JobWatch())


def _steps(attempt: AttemptDir) -> Iterator[Step]:
    study, name = attempt.path.resolve().parents[2], step_name(attempt)
    for path in sorted((study / "holds").glob("[0-9]*")):
        directory = HoldDir(path)
        record = read_hold(directory)
        if record is not None and directory.order(name).exists():
            yield directory, name, record.job_id


def read_holder(directory: HoldDir) -> Holder | None:
    os.listdir(directory.path)  # makes NFS look again
    try:
        return read_document(directory.holder, Holder)
    except ContractError:
        return None


def read_hold(directory: HoldDir) -> Hold | None:
    try:
        return read_document(directory.record, Hold)
    except ContractError:
        return None
