"""study.json and winner.json: a study's settings, and the result of its confirmation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from train_entry.contract.job.spec import ModelShape
from train_entry.contract.shared.words import Scalar
from train_entry.contract.study.goals import Goal
from train_entry.contract.study.upgrade import upgraded_study, upgraded_winner


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyRecord:
    """study.json: the study's settings."""

    name: str
    created_at: float  # time of day
    asked: Mapping[str, Scalar]  # dotted key to value: another value means another study
    dimensions: Mapping[str, str]  # knob to its range, in Hydra's grammar
    limits: Mapping[str, Scalar]  # may be raised on resume
    versions: Mapping[str, str]  # of everything that changes timings
    model: ModelShape
    goals: tuple[Goal, ...]  # the most important first
    overrides: tuple[str, ...] = ()  # the command line that started the study

    @staticmethod
    def upgraded(raw: Mapping[str, Any]) -> Mapping[str, Any]:
        return upgraded_study(raw)

    @property
    def goal(self) -> Goal:
        """The goal that ranks the trials."""
        return self.goals[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """One trial's result over its repeats."""

    trial: int
    value: float  # of the goal, mean over the repeats
    low: float  # bounds of the interval at Winner.confidence
    high: float
    repeats: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Winner:
    """winner.json: the result of the confirmation."""

    goal: str
    trial: int
    confidence: float
    standings: tuple[Standing, ...]  # of all repeated trials, best first
    # Trials that the repeats cannot distinguish from the best. Of these the winner needs the least memory.
    tied: tuple[int, ...] = ()
    noise: float | None = None  # standard deviation of one repeat over the mean; None: too few repeats
    baseline: int | None = None  # the best baseline
    gain: float | None = None  # the winner's gain over that baseline, as a factor; None: not both repeated
    gain_low: float | None = None
    gain_high: float | None = None

    @staticmethod
    def upgraded(raw: Mapping[str, Any]) -> Mapping[str, Any]:
        return upgraded_winner(raw)
