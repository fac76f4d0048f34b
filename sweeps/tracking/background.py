"""The interface of a tracker, and the thread that keeps a slow or broken tracker from holding up a study."""

from __future__ import annotations

import logging
import queue
import threading
from pathlib import Path
from typing import Protocol

from train_entry.contract import AttemptDir, Trial

log = logging.getLogger(__name__)


class Tracker(Protocol):
    """An observer that records the trials of a study."""

    def record(self, trial: Trial, attempt: AttemptDir | None, drift: float = 1.0) -> None:
        """Record a trial that has ended; `attempt` is its latest. A second call records its present state."""

    def close(self, timeout_s: float = 30.0) -> None:
        """Finish what is under way, in at most this time."""


class NoTracker:
    """The tracker for tracking=none: it records nothing."""

    def record(self, trial: Trial, attempt: AttemptDir | None, drift: float = 1.0) -> None:
        pass

    def close(self, timeout_s: float = 30.0) -> None:
        pass


class BackgroundTracker:
    """A tracker that calls another one in its own thread, so that it cannot hold up the study.

    It warns about failures at most twice, and ends within a bounded time.
    """

    def __init__(self, tracker: Tracker, study_dir: Path) -> None:
        self._tracker = tracker
        self._study_dir = study_dir
        self._queue: queue.SimpleQueue[tuple[Trial, AttemptDir | None, float] | None] = queue.SimpleQueue()
        self.missed = 0  # trials that could not be recorded
        # A daemon, so that a tracker that never returns cannot keep the process alive after close().
        self._thread = threading.Thread(target=self._run, name="tracker", daemon=True)
        self._thread.start()

    def record(self, trial: Trial, attempt: AttemptDir | None, drift: float = 1.0) -> None:
        self._queue.put((trial, attempt, drift))

    def close(self, timeout_s: float = 30.0) -> None:
        """Wait until the queued trials are recorded; after the timeout give up, with a warning."""
        self._queue.put(None)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._miss(f"not done after {timeout_s:g} s")
        elif self.missed > 1:
            log.warning("MLflow: %d trials were not recorded; `%s` adds them", self.missed, self._replay_line)

    def _run(self) -> None:
        is_over = False
        while not is_over:
            item = self._queue.get()
            is_over = item is None
            try:
                if item is None:
                    self._tracker.close()
                else:
                    self._tracker.record(*item)
            except Exception as error:  # no failure of an observer may end the study
                self._miss(str(error) or repr(error))

    def _miss(self, reason: str) -> None:
        self.missed += 1
        if self.missed == 1:
            log.warning("MLflow: %s. The study goes on; `%s` records it later", reason, self._replay_line)

    @property
    def _replay_line(self) -> str:
        return f"python -m sweeps replay {self._study_dir}"
