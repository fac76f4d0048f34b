"""The observer of a study, and the thread that keeps a slow or broken one away from it."""

from __future__ import annotations

import logging
import queue
import threading
from pathlib import Path
from typing import Protocol

from train_entry.contract import AttemptDir, Trial

log = logging.getLogger(__name__)


class Tracker(Protocol):
    """An observer of a study."""

    def record(self, trial: Trial, attempt: AttemptDir | None, drift: float = 1.0) -> None:
        """Show a trial that has ended; `attempt` is its latest. Again: show it as it is now."""

    def close(self, timeout_s: float = 30.0) -> None:
        """Finish what is under way, within this time."""


class NoTracker:
    """tracking=none"""

    def record(self, trial: Trial, attempt: AttemptDir | None, drift: float = 1.0) -> None:
        pass

    def close(self, timeout_s: float = 30.0) -> None:
        pass


class BackgroundTracker:
    """Keeps a slow or broken tracker away from the study: its own thread, few warnings, a bounded end."""

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
        """Wait for what is queued; what is not written by then is given up, with a warning."""
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
            except Exception as error:  # an observer must not end what it observes, whatever happens to it
                self._miss(str(error) or repr(error))

    def _miss(self, reason: str) -> None:
        self.missed += 1
        if self.missed == 1:
            log.warning("MLflow: %s. The study goes on; `%s` fills it in later", reason, self._replay_line)

    @property
    def _replay_line(self) -> str:
        return f"python -m sweeps replay {self._study_dir}"
