"""Errors that occur before anything is launched. A trial's failure is no error, but an outcome."""

from __future__ import annotations

from collections.abc import Sequence


class SweepError(Exception):
    """The base class. Its text is for the person at the keyboard."""


class ConfigError(SweepError):
    """The configuration cannot be used. One line for each problem, all at once. Exit status 2."""

    def __init__(self, problems: Sequence[str] | str) -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))


class TrackingError(SweepError):
    """The tracking URI cannot be opened. Exit status 2."""


class StudyBusyError(SweepError):
    """Another orchestrator runs this study. Exit status 1."""
