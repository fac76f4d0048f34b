"""What can go wrong before anything is launched. Failures of trials are not errors: they are outcomes."""

from __future__ import annotations

from collections.abc import Sequence


class SweepError(Exception):
    """The root: its text is for the person at the keyboard."""


class ConfigError(SweepError):
    """The configuration cannot be used; one line for each problem, all of them at once. Exit status 2."""

    def __init__(self, problems: Sequence[str] | str) -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))


class TrackingError(SweepError):
    """The tracking URI cannot be opened. Exit status 2."""


class StudyBusyError(SweepError):
    """Another orchestrator runs this study. Exit status 1."""
