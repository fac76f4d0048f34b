"""GPU-hours: what a study has spent, and on what; what it was spared, and by what. Pure.

What was spared is an estimate: what finding out would have cost, by what it did cost elsewhere in the study.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median

from analysis.load import Study
from analysis.text import hours
from train_entry.contract import Failure, FailureKind, Measurement, Purpose, State, Trial
from train_entry.contract.study.goal_text import digits

OUT_OF_MEMORY = (FailureKind.GPU_OOM, FailureKind.HOST_OOM)
PRICE_KEY = "cluster.price_per_gpu_hour"
Seconds = Mapping[tuple[int, int], float]  # by trial and attempt


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
    """What the records of a study say; where an attempt left no seconds, an equal share of its trial's."""
    parts = {trial.number: _parts(trial, study.attempt_gpu_s) for trial in study.trials}
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
    """`GPU-hours: 1.24 spent (0.11 on failures, 0.3 on confirmation); spared: 0.4 by the gate, ...`"""
    spent = {
        "on failures": found.failed_s,
        "out of memory": found.out_of_memory_s,
        "on start-up": found.startup_s,
        "on confirmation": found.confirmation_s,
        "on watching for drift": found.drift_s,
        "on checks": found.check_s,
    }
    spared = {"by the gate": found.gate_s, "by reuse": found.reuse_s, "by early ends": found.early_s}
    of_that = _listed(spent)
    line = f"GPU-hours: {hours(found.spent_s)} spent{f' ({of_that})' if of_that else ''}"
    if listed := _listed(spared):
        line += f"; spared: {listed}"
    if found.price_per_gpu_hour:
        line += f"; cost: {digits(found.money(found.spent_s))} spent"
        line += f", {digits(found.money(found.spared_s))} spared" if listed else ""
    return line


def _listed(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{hours(seconds)} {what}" for what, seconds in parts.items() if seconds > 0)


def _parts(trial: Trial, known: Seconds) -> _Parts:
    """Every attempt has one purpose; together they have what the trial has."""
    if trial.attempts < 2:
        return _Parts(own_s=trial.gpu_s)
    seconds = _attempt_s(trial, known)
    by_purpose = {repeat.attempt: repeat.purpose for repeat in trial.repeats}
    failed = {repeat.attempt for repeat in trial.repeats if isinstance(repeat.outcome, Failure)}
    own = trial.measured_attempt or _last_own(trial)
    found = {"confirmation_s": 0.0, "drift_s": 0.0, "check_s": 0.0, "lost_s": 0.0, "own_s": 0.0}
    for attempt, spent_s in seconds.items():
        if attempt == own:
            found["own_s"] += spent_s
        elif attempt == trial.check_attempt:
            found["check_s"] += spent_s
        elif attempt in failed or attempt not in by_purpose:
            found["lost_s"] += spent_s
        else:
            is_confirmed = by_purpose[attempt] is Purpose.CONFIRM
            found["confirmation_s" if is_confirmed else "drift_s"] += spent_s
    return _Parts(**found)


def _attempt_s(trial: Trial, known: Seconds) -> dict[int, float]:
    """GPU-seconds by attempt; those that left none share what the others leave of the trial's."""
    attempts = range(1, trial.attempts + 1)
    found = {number: known[trial.number, number] for number in attempts if (trial.number, number) in known}
    missing = [number for number in attempts if number not in found]
    rest_s = max(0.0, trial.gpu_s - sum(found.values()))
    return found | {number: rest_s / len(missing) for number in missing}


def _last_own(trial: Trial) -> int:
    """The last attempt that was for the trial's own outcome."""
    others = {repeat.attempt for repeat in trial.repeats} | {trial.check_attempt}
    return max((n for n in range(1, trial.attempts + 1) if n not in others), default=0)


def _ran_out(trial: Trial) -> bool:
    return isinstance(trial.outcome, Failure) and trial.outcome.kind in OUT_OF_MEMORY


def _ranks(trial: Trial) -> int:
    return trial.plan.ranks if trial.plan else 0


def _startup_s(trial: Trial) -> float:
    """Of a reused trial none: it started nothing."""
    seen = trial.outcome
    return _ranks(trial) * seen.startup_s if isinstance(seen, Measurement) and trial.attempts else 0.0


def _gate_s(trials: Iterable[Trial], parts: Mapping[int, _Parts]) -> float:
    """Each plan that was refused would have been launched once, to run out of memory."""
    known = list(trials)
    ran_out = [parts[trial.number].own_s for trial in known if _ran_out(trial) and trial.attempts]
    started = [started_s for trial in known if (started_s := _startup_s(trial)) > 0]
    refused = {trial.fingerprint or f"trial {trial.number}" for trial in known if trial.is_refused}
    return len(refused) * median(ran_out or started or [0.0])


def _reuse_s(trials: Iterable[Trial], parts: Mapping[int, _Parts]) -> float:
    """What the trial that it shares had cost by itself."""
    twins = [trial.reused_from for trial in trials if trial.state is State.REUSED]
    return sum((parts[twin].own_s for twin in twins if twin is not None and twin in parts), start=0.0)


def _early_s(trial: Trial) -> float:
    """Steps that were asked for and not timed, of the trial and of its repeats, at the speed seen."""
    own = trial.outcome if trial.state is not State.REUSED else None
    outcomes = (own, *(repeat.outcome for repeat in trial.repeats))
    seen = [outcome for outcome in outcomes if isinstance(outcome, Measurement)]
    return _ranks(trial) * sum(outcome.spared_steps * outcome.step_s for outcome in seen)


def _price(study: Study) -> float:
    """Per GPU-hour, in whatever currency; 0: nobody has said."""
    asked = study.record.asked.get(PRICE_KEY)
    said = [goal.price_per_gpu_hour for goal in study.goals]
    said += [float(asked)] if isinstance(asked, (int, float)) else []
    return max(said, default=0.0)
