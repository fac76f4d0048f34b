"""MLflow that is down, slow or mistyped costs one line at once, and the study goes on. Loopback only."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from sweeps.errors import TrackingError
from sweeps.tracking.background import BackgroundTracker, NoTracker, Tracker
from sweeps.tracking.location import mask_password
from sweeps.tracking.mlflow import MlflowTracker
from tests.support.tracking import measured, study_record
from train_entry.contract import AttemptDir, Trial


@pytest.fixture
def closed_port(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


# URIs that cannot be opened


UNOPENABLE = {
    "carrier-pigeon://loft/7": "unsupported URI 'carrier-pigeon://loft/7'",
    "file://FOLDER/mlruns": "The filesystem tracking backend",
    "sqlite:///FOLDER/none/mlflow.db": "there is no directory FOLDER/none",
    "sqlite:///FOLDER": "FOLDER is a directory, not a file",
    "sqlite:///FOLDER/text.db": "file is not a database",
    # Nobody may write there, not even root.
    "sqlite:////proc/mlflow.db": "No such file or directory: '/proc/mlflow.db.lock'",
    "postgresql://me:secret@127.0.0.1:PORT/db": "Connection refused",
    "http://me:secret@127.0.0.1:PORT": "Connection refused",
}


@pytest.mark.parametrize("uri", UNOPENABLE)
def test_a_uri_that_cannot_be_opened_gives_one_line_at_once(
    uri: str, tmp_path: Path, closed_port: int
) -> None:
    (tmp_path / "text.db").write_text("no database, and long enough to be seen to be none" * 100)
    reason = UNOPENABLE[uri].replace("FOLDER", str(tmp_path))
    uri = uri.replace("FOLDER", str(tmp_path)).replace("PORT", str(closed_port))
    started = time.monotonic()

    with pytest.raises(TrackingError) as caught:
        MlflowTracker(uri, tmp_path / "mlartifacts", study_record("unopenable")).open()

    message = str(caught.value)
    assert message.startswith(f"cannot open the tracking URI {mask_password(uri)}: ")
    assert reason in message and "tracking=none" in message
    assert "\n" not in message and "secret" not in message
    assert time.monotonic() - started < 15  # seconds; importing MLflow is most of it


def test_a_server_that_is_no_mlflow_gives_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with loopback_server() as port:
        tracker = MlflowTracker(f"http://127.0.0.1:{port}", tmp_path, study_record("other"))

        with pytest.raises(
            TrackingError, match=rf"cannot open the tracking URI http://127\.0\.0\.1:{port}: "
        ):
            tracker.open()


@contextmanager
def loopback_server() -> Iterator[int]:
    """A server that answers every request by 404."""

    class NotFound(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(404)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), NotFound) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


# A study is never held up


class Stuck(NoTracker):
    """A tracker that blocks in its first trial until it is released."""

    def __init__(self) -> None:
        self.entered, self.released = threading.Event(), threading.Event()

    def record(self, trial: Trial, attempt: AttemptDir | None, drift: float = 1.0) -> None:
        self.entered.set()
        self.released.wait()


class Raising(NoTracker):
    def record(self, trial: Trial, attempt: AttemptDir | None, drift: float = 1.0) -> None:
        raise KeyError("an error nobody thought of")


class Remembering(NoTracker):
    def __init__(self) -> None:
        self.numbers: list[int] = []

    def record(self, trial: Trial, attempt: AttemptDir | None, drift: float = 1.0) -> None:
        self.numbers.append(trial.number)


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_closing_waits_for_what_is_queued() -> None:
    inner = Remembering()
    tracker = BackgroundTracker(inner, Path("studies/s"))

    for number in range(100):
        tracker.record(measured(number), None)
    tracker.close()

    assert inner.numbers == list(range(100))
    assert tracker.missed == 0


def test_a_stuck_tracker_neither_blocks_recording_nor_closing(caplog: pytest.LogCaptureFixture) -> None:
    inner = Stuck()
    tracker = BackgroundTracker(inner, Path("studies/s"))
    started = time.monotonic()

    for number in range(100):
        tracker.record(measured(number), None)
    tracker.close(timeout_s=0.2)

    assert time.monotonic() - started < 5
    assert inner.entered.is_set()
    (warning,) = warnings_in(caplog)
    assert warning.startswith("MLflow: not done after 0.2 s. The study goes on; ")
    assert "`python -m sweeps replay studies/s`" in warning
    inner.released.set()


def test_a_raising_tracker_costs_one_warning_and_a_count_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    tracker = BackgroundTracker(Raising(), Path("studies/s"))

    for number in range(3):
        tracker.record(measured(number), None)
    tracker.close()

    first, last = warnings_in(caplog)
    assert "an error nobody thought of" in first
    assert last == "MLflow: 3 trials were not recorded; `python -m sweeps replay studies/s` adds them"
    assert tracker.missed == 3


def test_a_single_miss_is_not_counted_out(caplog: pytest.LogCaptureFixture) -> None:
    tracker = BackgroundTracker(Raising(), Path("studies/s"))

    tracker.record(measured(0), None)
    tracker.close()

    assert len(warnings_in(caplog)) == 1


def test_a_server_that_is_down_costs_one_warning_and_a_count(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, closed_port: int
) -> None:
    uri = f"http://me:secret@127.0.0.1:{closed_port}"
    inner = MlflowTracker(uri, tmp_path, study_record("down"))
    tracker = BackgroundTracker(inner, tmp_path)

    for number in range(3):
        tracker.record(measured(number), None)
    tracker.close(timeout_s=20)

    first, last = warnings_in(caplog)
    assert "Connection refused" in first and "secret" not in first + last
    assert "3 trials were not recorded" in last
    assert tracker.missed == 3


def test_no_tracker_does_nothing(tmp_path: Path) -> None:
    tracker: Tracker = NoTracker()
    tracker.record(measured(0), None)
    tracker.close()


def test_importing_the_module_does_not_import_mlflow() -> None:
    program = "import sys, sweeps.tracking.mlflow; sys.exit('mlflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
