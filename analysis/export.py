"""A study as a table for replays: a JSON object a line, the first about the study, each other about a trial.

From it a scripted cluster can answer as the machine did: how long start-up took, every step, what failed and
when. docs/tables.md describes the fields; `table` in the first line is the version of this format.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from analysis.account import OUT_OF_MEMORY
from analysis.load import Study
from train_entry.contract import (
    Attempt,
    AttemptDir,
    Failure,
    Measurement,
    Outcome,
    Plan,
    StepMetrics,
    Trial,
    TrialSpec,
    dump,
    read_document,
    read_lines,
)

VERSION = 1
Line = Mapping[str, Any]  # as JSON has it


def export_lines(study: Study) -> Iterator[str]:
    """Yield JSON lines: the study, then every trial that ran to its end, by number."""
    yield _text(_header(study))
    for trial in study.trials:
        if trial.plan is not None and trial.shown is not None and trial.outcome is not None:
            yield _text(_row(study, trial, trial.plan, trial.shown, trial.outcome))


def _header(study: Study) -> Line:
    record = study.record
    return {
        "table": VERSION,
        "study": record.name,
        "model": record.model,
        "goal": record.goal,
        "goals": study.goals,
        "device": record.versions.get("device"),
        "versions": record.versions,
        "dimensions": record.dimensions,
        "asked": record.asked,
    }


def _row(study: Study, trial: Trial, plan: Plan, shown: Attempt, outcome: Outcome) -> Line:
    place = study.directory.trial(trial.number)
    attempt = place.attempt(shown.number)
    spec = _spec(attempt)
    return {
        "number": trial.number,
        "values": trial.values,
        "strategy": plan.strategy,
        "plan": plan,
        "fingerprint": trial.fingerprint,
        "state": trial.state,
        "origin": trial.origin,
        "rung": trial.baseline,
        "yardstick": trial.is_single_gpu,
        "drift": study.ranking.drift(trial),
        "shared": trial.is_shared,
        **_seen(attempt, plan, outcome),
        "seconds": _seconds(shown, plan),
        "gpu_s": trial.gpu_s,
        "memory_limit_bytes": spec.memory_limit_bytes if spec else None,
        "measure": spec.measure if spec else None,
        "estimate": trial.estimate,
        "repeats": [
            line
            for repeat in trial.repeats
            if (line := _repeat(place.attempt(repeat.number), plan, repeat)) is not None
        ],
    }


def _repeat(directory: AttemptDir, plan: Plan, repeat: Attempt) -> Line | None:
    """Return a repeat's line; None while it runs."""
    if repeat.outcome is None:
        return None
    about = {"attempt": repeat.number, "purpose": repeat.purpose, "turn": repeat.round}
    return {**about, "seconds": _seconds(repeat, plan), **_seen(directory, plan, repeat.outcome)}


def _seen(attempt: AttemptDir, plan: Plan, outcome: Outcome) -> Line:
    """Return what an attempt measured; for a failure, its kind and the steps before it."""
    stream = list(read_lines(attempt.metrics, StepMetrics))
    first_timed = next((at for at, step in enumerate(stream) if step.timed), len(stream))
    found: dict[str, Any] = {
        "outcome": _word(outcome),
        "kind": outcome.kind if isinstance(outcome, Failure) else None,
        "step_s": [step.step_s for step in stream if step.timed],
        "warmup_s": [step.step_s for step in stream[:first_timed]],
        "split_s": [step.step_s for step in stream[first_timed:] if not step.timed],
    }
    if isinstance(outcome, Failure):
        nothing = dict.fromkeys(("startup_s", "peak_bytes", "reserved_bytes", "loss", "tokens"))
        return {**found, **nothing, "phase": outcome.phase, "message": outcome.message}
    return {
        **found,
        "step_s": _steps_s(plan, outcome) or found["step_s"] or [outcome.step_s],
        "startup_s": outcome.startup_s,
        "peak_bytes": outcome.peak_bytes,
        "reserved_bytes": outcome.reserved_bytes,
        "host_peak_bytes": outcome.host_peak_bytes,
        "memory_kind": outcome.memory_kind,
        "loss": outcome.loss,
        "tokens": outcome.tokens,
        "ended": outcome.ended,
        "spared_steps": outcome.spared_steps,
    }


def _seconds(attempt: Attempt, plan: Plan) -> float | None:
    """Return how long the attempt's processes lived; None if their supervisors left no record."""
    return attempt.gpu_s / plan.ranks or None


def _word(outcome: Outcome) -> str:
    if isinstance(outcome, Measurement):
        return "ok"
    return "oom" if outcome.kind in OUT_OF_MEMORY else outcome.kind.value


def _steps_s(plan: Plan, seen: Measurement) -> list[float]:
    """Return the timed steps that count: rank 0's; in a pipeline, those of the rank that ends last."""
    ranks = sorted(seen.ranks, key=lambda rank: rank.rank)
    if not ranks or plan.pipeline == 1:
        return list(ranks[0].step_s) if ranks else []
    return [max(together) for together in zip(*(rank.step_s for rank in ranks), strict=False)]


def _spec(attempt: AttemptDir) -> TrialSpec | None:
    try:
        return read_document(attempt.spec, TrialSpec)
    except (ValueError, OSError):
        return None


def _text(line: Line) -> str:
    """Return one line of strict JSON, which has no NaN."""
    return json.dumps(_finite(json.loads(dump(line, indent=None))))


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
