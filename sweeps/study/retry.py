"""Decide if another attempt takes the place of one that ended. Pure."""

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
    """True if another attempt follows one of this kind that had this outcome.

    One follows a failure that says nothing about the plan, while the trial has retries left. An attempt whose
    nodes were taken back uses up no retry, and a cancelled repeat or check is always replaced. No attempt
    follows one that Ctrl-C cancelled. A user's own trial is retried only while it is the only one that runs.
    """
    if not isinstance(outcome, Failure) or VERDICTS[outcome.kind] is not Verdict.RETRY:
        return False
    is_cancelled = outcome.kind is FailureKind.CANCELLED
    if is_cancelled and kind not in TRIES:
        return True
    if trial.origin is Origin.USER and not is_alone:
        return False
    if is_cancelled:  # by Ctrl-C, or by hand while no orchestrator ran
        return not is_interrupted
    return outcome.kind in NOBODYS_FAULT or trial.used_retries < retries
