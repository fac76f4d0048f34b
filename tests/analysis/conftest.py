"""Builds real study directories, with the files and the codec that a study uses."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.estimates import refused, too_large
from tests.support.examples import a_measurement, a_plan, a_study_record, a_trial
from train_entry.contract import (
    Advice,
    Estimate,
    ExitReason,
    Failure,
    FailureKind,
    Goal,
    Origin,
    Plan,
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


class StudyBuilder:
    def __init__(self, path: Path) -> None:
        self.directory = StudyDir(path)
        self.study()

    def study(self, objective: str = "tokens_per_s_per_gpu", **changes: Any) -> None:
        """`changes` replace fields of study.json."""
        write_atomic(self.directory.record, dump(a_study_record(objective=objective, **changes)))

    def seeks(self, *goals: Goal) -> None:
        """The first ranks."""
        self.study(goals[0].name, goals=goals)

    def trial(self, number: int, state: State, **changes: Any) -> None:
        """`changes` replace fields of trial.json."""
        trial = a_trial(number=number, state=state, **changes)
        write_atomic(self.directory.trial(number).record, dump(trial))

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
        known = {"attempts": 1, "gpu_s": gpu_s, "plan": plan or a_plan(), **(trial or {})}
        self.trial(number, state, outcome=a_measurement(**changes), **known)

    def rung(self, number: int, name: str, speed: float, **changes: Any) -> None:
        """A trial of the ladder, by its tokens/s/GPU; `changes` replace fields of trial.json."""
        trial = {"origin": Origin.LADDER, "rung": name, **changes}
        self.measured(number, tokens_per_s_per_gpu=speed, tokens_per_s=2 * speed, trial=trial)

    def confirmed(self, *values: tuple[int, float], **changes: Any) -> None:
        """winner.json: the first of these trials won, each known within 1%; `changes` replace fields."""
        standings = tuple(
            Standing(trial=trial, value=value, low=0.99 * value, high=1.01 * value, repeats=3)
            for trial, value in values
        )
        record = Winner(goal="tokens_per_s_per_gpu", trial=values[0][0], confidence=0.95, standings=standings)
        write_atomic(self.directory.winner, dump(dataclasses.replace(record, **changes)))

    def exit(self, number: int, attempt: int, seconds: float, rank: int = 0) -> None:
        """How long a rank's process lived."""
        ended = RankExit(
            rank=rank, returncode=0, reason=ExitReason.EXITED, phase=None, silent_s=0.0, seconds=seconds
        )
        write_atomic(self.directory.trial(number).attempt(attempt).exit(rank), dump(ended))

    def failed(self, number: int, kind: FailureKind, message: str, state: State = State.FAILED) -> None:
        self.trial(number, state, outcome=Failure(kind=kind, message=message), attempts=1)

    def estimated(
        self, number: int, estimate: Estimate, *, trial: dict[str, Any] | None = None, **seen: Any
    ) -> None:
        """A measured trial with its estimate; `trial` replaces fields of it, `seen` of the measurement."""
        changes = {"attempts": 1, "outcome": a_measurement(**seen), "estimate": estimate} | (trial or {})
        self.trial(number, State.MEASURED, **changes)

    def refused(self, number: int, estimate: Estimate | None = None, **changes: Any) -> None:
        """Not launched, as it cannot fit."""
        self.trial(number, **refused(estimate or too_large(), **changes))

    def rejected(self, number: int, *texts: str) -> None:
        reasons = tuple(Reason(rule="a_rule", text=text) for text in texts)
        self.trial(number, State.REJECTED, plan=None, reasons=reasons)

    def out_of_memory(self, number: int, *overrides: str, then: str | None = None) -> None:
        """`then` is the override that is advised on top."""
        advice = None if then is None else an_advice(overrides, then)
        outcome = Failure(kind=FailureKind.GPU_OOM, message="full")
        self.trial(number, State.INFEASIBLE, outcome=outcome, attempts=1, overrides=overrides, advice=advice)

    def losses(
        self, number: int, losses: Sequence[float], *, tokens_per_step: int = 1000, attempt: int = 1
    ) -> None:
        """The stream of an attempt, one step a loss."""
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
