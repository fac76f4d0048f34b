"""Whether a trial is retried: whether another attempt takes the place of one that ended. Pure."""

from __future__ import annotations

from sweeps.search.verdicts import VERDICTS, Verdict
from train_entry.contract import AttemptKind, Failure, FailureKind, Origin, Outcome, Trial
from train_entry.contract.study.trial import NOBODYS_FAULT, TRIES


def is_replaced(
    trial: Trial,
    kind: AttemptKind,
    outcome: Outcome,
    retries: int,
    is_interrupted: bool = False,
    is_alone: bool = False,
) -> bool:
    """Whether an attempt of this kind, ended so, is followed by another.

    It is after a failure that tells nothing of the plan, while the trial has retries left. An attempt whose
    nodes were taken back uses up none, and a repeat or check that was cancelled never counts. What Ctrl-C
    cancelled is not followed by another; a trial of the user's own has retries only while it alone runs.
    """
    if not isinstance(outcome, Failure) or VERDICTS[outcome.kind] is not Verdict.RETRY:
        return False
    is_cancelled = outcome.kind is FailureKind.CANCELLED
    if is_cancelled and kind not in TRIES:
        return True
    if trial.origin is Origin.USER and not is_alone:
        return False
    if is_cancelled:  # by Ctrl-C, or by hand while no orchestrator was there
        return not is_interrupted
    return outcome.kind in NOBODYS_FAULT or trial.used_retries < retries
