"""GPU-hours that a study spent and was spared, by purpose. Pure.

Spared GPU-hours are an estimate: the study's other trials tell what a trial that was not run would have cost.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median

from analysis.load import Study
from analysis.text import hours
from train_entry.contract import (
    Attempt,
    AttemptKind,
    Failure,
    FailureKind,
    Measurement,
    Purpose,
    State,
    Trial,
    digits,
)
from train_entry.contract.study.trial import TRIES

OUT_OF_MEMORY = (FailureKind.GPU_OOM, FailureKind.HOST_OOM)
PRICE_KEY = "cluster.price_per_gpu_hour"


@dataclass(frozen=True, kw_only=True, slots=True)
class Account:
    """GPU-seconds."""

    spent_s: float
    # Of these:
    out_of_memory_s: float
    failed_s: float  # for another reason, or for none of the trial's own
    startup_s: float  # of first measurements: to the end of the first step
    confirmation_s: float
    drift_s: float
    check_s: float
    # Spared:
    gate_s: float  # plans that were not launched
    reuse_s: float  # plans that another trial had run
    early_s: float  # steps that were not timed
    price_per_gpu_hour: float = 0.0

    @property
    def spared_s(self) -> float:
        return self.gate_s + self.reuse_s + self.early_s

    def money(self, gpu_s: float) -> float:
        return gpu_s / 3600 * self.price_per_gpu_hour


@dataclass(frozen=True, kw_only=True, slots=True)
class _Parts:
    """GPU-seconds of one trial by purpose; what is left of them is its own measurement."""

    confirmation_s: float = 0.0
    drift_s: float = 0.0
    check_s: float = 0.0
    lost_s: float = 0.0  # attempts that were followed by another, or repeats that failed
    own_s: float = 0.0


def account(study: Study) -> Account:
    """GPU-seconds by what they were spent on, from the records of all attempts."""
    parts = {trial.number: _parts(trial) for trial in study.trials}
    failures = {trial.number: trial for trial in study.trials if isinstance(trial.outcome, Failure)}
    ran_out = {number for number, trial in failures.items() if _ran_out(trial)}
    lost_s = sum(part.lost_s for part in parts.values())
    return Account(
        spent_s=sum(trial.gpu_s for trial in study.trials),
        out_of_memory_s=sum(parts[number].own_s for number in ran_out),
        failed_s=lost_s + sum(parts[number].own_s for number in failures.keys() - ran_out),
        startup_s=sum(_startup_s(trial) for trial in study.trials),
        confirmation_s=sum(part.confirmation_s for part in parts.values()),
        drift_s=sum(part.drift_s for part in parts.values()),
        check_s=sum(part.check_s for part in parts.values()),
        gate_s=_gate_s(study.trials, parts),
        reuse_s=_reuse_s(study.trials, parts),
        early_s=sum(map(_early_s, study.trials)),
        price_per_gpu_hour=_price(study),
    )


def account_line(found: Account) -> str:
    """`GPU-hours: 1.24 spent (0.11 on failures, 0.3 on confirmation); saved: 0.4 by reuse, ...`"""
    spent = {
        "on failures": found.failed_s,
        "on out-of-memory trials": found.out_of_memory_s,
        "on start-up": found.startup_s,
        "on confirmation": found.confirmation_s,
        "on drift repeats": found.drift_s,
        "on checks": found.check_s,
    }
    spared = {
        "on plans not launched": found.gate_s,
        "by reuse": found.reuse_s,
        "by ending trials early": found.early_s,
    }
    of_that = _listed(spent)
    line = f"GPU-hours: {hours(found.spent_s)} spent{f' ({of_that})' if of_that else ''}"
    if listed := _listed(spared):
        line += f"; saved: {listed}"
    if found.price_per_gpu_hour:
        line += f"; cost: {digits(found.money(found.spent_s))} spent"
        line += f", {digits(found.money(found.spared_s))} saved" if listed else ""
    return line


def _listed(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{hours(seconds)} {what}" for what, seconds in parts.items() if seconds > 0)


def _parts(trial: Trial) -> _Parts:
    """Divide a trial's GPU-seconds by purpose; every attempt has exactly one."""
    own = trial.counted or next((attempt for attempt in trial.attempts[::-1] if attempt.kind in TRIES), None)
    found: defaultdict[str, float] = defaultdict(float)
    for attempt in trial.attempts:
        found[_purpose(attempt, own)] += attempt.gpu_s
    return _Parts(**found)


def _purpose(attempt: Attempt, own: Attempt | None) -> str:
    if attempt is own:
        return "own_s"
    if attempt.kind is AttemptKind.CHECK and not attempt.is_replaced:
        return "check_s"
    if attempt.is_replaced or isinstance(attempt.outcome, Failure):
        return "lost_s"
    return "confirmation_s" if attempt.purpose is Purpose.CONFIRM else "drift_s"


def _ran_out(trial: Trial) -> bool:
    return isinstance(trial.outcome, Failure) and trial.outcome.kind in OUT_OF_MEMORY


def _ranks(trial: Trial) -> int:
    return trial.plan.ranks if trial.plan else 0


def _startup_s(trial: Trial) -> float:
    """Return the GPU-seconds of the trial's start-up; 0 for a reused trial, which started nothing."""
    seen = trial.outcome
    return _ranks(trial) * seen.startup_s if isinstance(seen, Measurement) and trial.is_launched else 0.0


def _gate_s(trials: Iterable[Trial], parts: Mapping[int, _Parts]) -> float:
    """Return the GPU-seconds spared by the gate: each refused plan would have run out of memory once."""
    known = list(trials)
    ran_out = [parts[trial.number].own_s for trial in known if _ran_out(trial) and trial.is_launched]
    started = [started_s for trial in known if (started_s := _startup_s(trial)) > 0]
    refused = {trial.fingerprint or f"trial {trial.number}" for trial in known if trial.is_refused}
    return len(refused) * median(ran_out or started or [0.0])


def _reuse_s(trials: Iterable[Trial], parts: Mapping[int, _Parts]) -> float:
    """Return the GPU-seconds of the trials whose results were reused, each as often as it was."""
    twins = [trial.reused_from for trial in trials if trial.state is State.REUSED]
    return sum((parts[twin].own_s for twin in twins if twin is not None and twin in parts), start=0.0)


def _early_s(trial: Trial) -> float:
    """Return the GPU-seconds of the steps that the trial and its repeats were asked for and did not time."""
    own = trial.outcome if trial.state is not State.REUSED else None
    outcomes = (own, *(repeat.outcome for repeat in trial.repeats))
    seen = [outcome for outcome in outcomes if isinstance(outcome, Measurement)]
    return _ranks(trial) * sum(outcome.spared_steps * outcome.step_s for outcome in seen)


def _price(study: Study) -> float:
    """Return the price per GPU-hour, in the user's currency; 0 if the study has none."""
    asked = study.record.asked.get(PRICE_KEY)
    said = [goal.price_per_gpu_hour for goal in study.goals]
    said += [float(asked)] if isinstance(asked, (int, float)) else []
    return max(said, default=0.0)
