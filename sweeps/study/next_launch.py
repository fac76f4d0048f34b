"""Decide what a study launches next: first runs, retries, drift repeats, confirmations, checks. Pure.

The loop asks after every change and carries out the answer. It proposes new trials itself, and asks again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from sweeps.config.schema import ConfirmConfig
from sweeps.search.confirmation import next_repeat
from sweeps.study.limits import StopReason
from train_entry.contract import AttemptKind, Goal, Purpose, Ranking, State, Trial
from train_entry.contract.study.drift import due


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """The answer to launch this trial now, once."""

    trial: Trial
    kind: AttemptKind
    purpose: Purpose | None = None  # for a repeat only
    round: int = 0  # of the confirmation, counted from 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Wait:
    """The answer to launch nothing: a running trial decides what is next, or the search proposes one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """The answer that nothing is left to launch."""

    reason: StopReason


@dataclass(frozen=True, kw_only=True, slots=True)
class Situation:
    """The state of the loop that the decision depends on."""

    running: Collection[int]  # trials with a running job
    search_end: StopReason | None  # why no trial is proposed any more; None: the search goes on
    is_spent: bool = False  # whether a limit forbids every further launch, even for the confirmation


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """The launches of a study beside the first runs of its trials."""

    confirm: ConfirmConfig
    check_best: int  # the number of best trials that are trained longer


def next_launch(trials: Sequence[Trial], goal: Goal, policy: Policy, now: Situation) -> Launch | Wait | Done:
    """Return what to launch next, given all trials of the study."""
    queued = [trial for trial in trials if trial.state is State.QUEUED]
    for trial in queued:
        if trial.reused_from is None:
            return Launch(trial=trial, kind=AttemptKind.RETRY if trial.is_launched else AttemptKind.FIRST)
    if now.search_end is None:
        reference = due(trials, goal, Ranking(trials, goal).best_baseline, policy.confirm.drift_every)
        if reference is None or reference.number in now.running:
            return Wait()
        return Launch(trial=reference, kind=AttemptKind.REPEAT, purpose=Purpose.DRIFT)
    if now.running or queued:
        return Wait()
    if now.is_spent:
        return Done(reason=now.search_end)
    return _after_the_search(trials, goal, policy) or Done(reason=now.search_end)


def _after_the_search(trials: Sequence[Trial], goal: Goal, policy: Policy) -> Launch | None:
    """Return the next repeat of the confirmation, alone on the machine; then the next check."""
    if (repeat := next_repeat(trials, goal, policy.confirm)) is not None:
        trial, number = repeat
        return Launch(trial=trial, kind=AttemptKind.REPEAT, purpose=Purpose.CONFIRM, round=number)
    for _, trial in Ranking(trials, goal).contenders[: policy.check_best]:
        if trial.check is None:
            return Launch(trial=trial, kind=AttemptKind.CHECK)
    return None
