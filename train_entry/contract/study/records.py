"""study.json and winner.json: what a study was asked, and what its confirmation came to."""

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
    """study.json: what was asked."""

    name: str
    created_at: float
    asked: Mapping[str, Scalar]  # dotted key to value: another value is another study
    dimensions: Mapping[str, str]  # knob to its range, in Hydra's grammar
    limits: Mapping[str, Scalar]  # may be raised on resume
    versions: Mapping[str, str]  # of what changes a timing
    model: ModelShape
    goals: tuple[Goal, ...]  # what is sought, the most important first
    overrides: tuple[str, ...] = ()  # the command line that made it

    @staticmethod
    def upgraded(raw: Mapping[str, Any]) -> Mapping[str, Any]:
        return upgraded_study(raw)

    @property
    def goal(self) -> Goal:
        """The goal that ranks the trials."""
        return self.goals[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """What repeats showed of one trial."""

    trial: int
    value: float  # of the goal, mean over its repeats
    low: float  # of the interval at Winner.confidence
    high: float
    repeats: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Winner:
    """winner.json: what the confirmation came to."""

    goal: str
    trial: int
    confidence: float
    standings: tuple[Standing, ...]  # of all that were repeated, the best first
    # Trials that cannot be told apart from the best; of these the winner needs least memory.
    tied: tuple[int, ...] = ()
    noise: float | None = None  # standard deviation of one repeat over its mean; None: too few
    baseline: int | None = None  # the best baseline
    gain: float | None = None  # the winner's value over that baseline's; None: not both repeated
    gain_low: float | None = None
    gain_high: float | None = None

    @staticmethod
    def upgraded(raw: Mapping[str, Any]) -> Mapping[str, Any]:
        return upgraded_winner(raw)
