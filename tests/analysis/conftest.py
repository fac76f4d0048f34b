"""Builds real study directories, with the files and the codec that a study uses."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.estimates import refused, too_large
from tests.support.examples import (
    a_measurement,
    a_plan,
    a_repeat,
    a_study_record,
    a_trial,
)
from train_entry.contract import (
    Advice,
    Estimate,
    ExitReason,
    Failure,
    FailureKind,
    Goal,
    Origin,
    Outcome,
    Plan,
    Purpose,
    RankExit,
    Reason,
    Standing,
    State,
    StepMetrics,
    StudyDir,
    Winner,
    append_line,
    dump,
    write_atomic,
)


def an_advice(overrides: Sequence[str], then: str) -> Advice:
    key, _, value = then.partition("=")
    return Advice(remedy="a_remedy", changes={key: value}, why="3 GiB less", overrides=(*overrides, then))


def measured_again(speeds: Mapping[float, float]) -> dict[str, Any]:
    """The changes that make a trial show drift: it closed at 1 s, when the machine had its first speed.

    `speeds`: by the time of a further measurement, the machine's speed then over that first one.
    """
    first_s = a_measurement().step_s
    looks = [
        a_repeat(Purpose.DRIFT, ended_at=at, outcome=a_measurement(step_s=first_s / speed))
        for at, speed in speeds.items()
    ]
    return {"closed_at": 1.0, "repeats": looks}


class StudyBuilder:
    def __init__(self, path: Path) -> None:
        self.directory = StudyDir(path)
        self.study()

    def study(self, **changes: Any) -> None:
        """`changes` replace fields of study.json."""
        write_atomic(self.directory.record, dump(a_study_record(**changes)))

    def seeks(self, *goals: Goal) -> None:
        """Give the study these goals; the first one ranks."""
        self.study(goals=goals)

    def trial(self, number: int, state: State, **changes: Any) -> None:
        """`changes` replace fields of trial.json, or give its outcome, which must fit the state."""
        trial = a_trial(number=number, state=state, **changes)
        assert trial.state is state
        write_atomic(self.directory.trial(number).record, dump(trial))

    def of_first_edition(self, number: int, outcome: Outcome, **changes: Any) -> None:
        """Write trial.json of a measured trial as the first edition did, with counts instead of attempts."""
        trial = json.loads(dump(a_trial(number=number)))
        del trial["closing"]
        known = {"state": "measured", "outcome": outcome, "attempts": 1, "measured_attempt": None}
        write_atomic(self.directory.trial(number).record, dump({**trial, **known, **changes}))

    def measured(
        self,
        number: int,
        *,
        state: State = State.MEASURED,
        gpu_s: float = 20.0,
        plan: Plan | None = None,
        trial: Mapping[str, Any] | None = None,
        **changes: Any,
    ) -> None:
        """`changes` replace fields of the measurement, `trial` those of trial.json."""
        known = {"gpu_s": gpu_s, "plan": plan or a_plan(), **(trial or {})}
        self.trial(number, state, outcome=a_measurement(**changes), **known)

    def reused(self, number: int, twin: int, outcome: Outcome | None = None) -> None:
        """Write a trial that reuses the result of another."""
        self.trial(number, State.REUSED, reused_from=twin, outcome=outcome or a_measurement())

    def baseline(self, number: int, name: str, speed: float, **changes: Any) -> None:
        """Write a baseline with these tokens/s/GPU; `changes` replace fields of trial.json."""
        trial = {"origin": Origin.BASELINE, "baseline": name, **changes}
        self.measured(number, tokens_per_s_per_gpu=speed, tokens_per_s=2 * speed, trial=trial)

    def confirmed(self, *values: tuple[int, float], **changes: Any) -> None:
        """Write winner.json: the first of these trials won, each known within 1%."""
        standings = tuple(
            Standing(trial=trial, value=value, low=0.99 * value, high=1.01 * value, repeats=3)
            for trial, value in values
        )
        record = Winner(goal="tokens_per_s_per_gpu", trial=values[0][0], confidence=0.95, standings=standings)
        write_atomic(self.directory.winner, dump(dataclasses.replace(record, **changes)))

    def exit(self, number: int, attempt: int, seconds: float, rank: int = 0) -> None:
        """Write how long a rank's process lived."""
        ended = RankExit(
            rank=rank, returncode=0, reason=ExitReason.EXITED, phase=None, silent_s=0.0, seconds=seconds
        )
        write_atomic(self.directory.trial(number).attempt(attempt).exit(rank), dump(ended))

    def failed(self, number: int, kind: FailureKind, message: str, state: State = State.FAILED) -> None:
        """Write a trial that failed after its launch."""
        self.trial(number, state, outcome=Failure(kind=kind, message=message))

    def estimated(
        self, number: int, estimate: Estimate, *, trial: dict[str, Any] | None = None, **seen: Any
    ) -> None:
        """Write a measured trial with its estimate; `trial` and `seen` replace their fields."""
        changes = {"outcome": a_measurement(**seen), "estimate": estimate} | (trial or {})
        self.trial(number, State.MEASURED, **changes)

    def refused(self, number: int, estimate: Estimate | None = None, **changes: Any) -> None:
        """Write a trial that was not launched, because it cannot fit."""
        self.trial(number, **refused(estimate or too_large(), **changes))

    def rejected(self, number: int, *texts: str) -> None:
        reasons = tuple(Reason(rule="a_rule", text=text) for text in texts)
        self.trial(number, State.REJECTED, plan=None, reasons=reasons)

    def out_of_memory(self, number: int, *overrides: str, then: str | None = None) -> None:
        """`then` is the override that is advised on top."""
        advice = None if then is None else an_advice(overrides, then)
        outcome = Failure(kind=FailureKind.GPU_OOM, message="full")
        self.trial(number, State.INFEASIBLE, outcome=outcome, overrides=overrides, advice=advice)

    def losses(
        self, number: int, losses: Sequence[float], *, tokens_per_step: int = 1000, attempt: int = 1
    ) -> None:
        """Write the stream of an attempt, one step for each loss."""
        path = self.directory.trial(number).attempt(attempt).metrics
        path.parent.mkdir(parents=True, exist_ok=True)
        for step, loss in enumerate(losses, 1):
            tokens = step * tokens_per_step
            append_line(
                path, StepMetrics(step=step, tokens=tokens, loss=loss, step_s=0.1, lr=0.1, timed=True)
            )


@pytest.fixture
def built(tmp_path: Path) -> StudyBuilder:
    """A study without trials, to be filled."""
    return StudyBuilder(tmp_path / "demo")
