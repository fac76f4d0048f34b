"""Write the comparison table to MLflow: one run per trial. Only the orchestrator writes it.

The only module that imports mlflow. Study directories are the truth; MLflow only observes them:

    uri = default_uri(studies_dir)                         # or the user's own
    mlflow = MlflowTracker(uri, artifact_root(studies_dir), study, study_dir)
    mlflow.open()                                          # raises TrackingError; record() opens otherwise
    tracker = BackgroundTracker(mlflow, study_dir.path)    # NoTracker() for tracking=none
    tracker.record(trial, attempt)                         # returns at once, never raises
    tracker.close()
    replay(study_dir, uri)                                 # fills in whatever MLflow missed

The tag `shardsweep.trial` identifies a trial's run. A digest of the content is written to the run last. If
the digest is missing (we were killed while writing) or differs (the trial was measured again), the whole run
is replaced; else nothing is written. So recording and replaying may be repeated at will.
"""

from __future__ import annotations

import http.client
import importlib.metadata
import itertools
import logging
import os
import socket
import sqlite3
import tempfile
import urllib.error
import urllib.request
import warnings
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from sweeps.errors import TrackingError
from sweeps.tracking.content import VIEW_TAG, VIEW_VERSIONS, RunContent, run_content, runs_url, shared_view
from sweeps.tracking.location import (
    PROBE_S,
    artifact_root,
    is_server,
    mask_password,
    server_version,
    sole_process,
    sqlite_path,
)
from train_entry.contract import (
    AttemptDir,
    Ranking,
    StudyDir,
    StudyRecord,
    Trial,
    TrialDir,
    Winner,
    read_document,
    read_trial,
)

T = TypeVar("T")
Digests = dict[str, str | None]  # digests of one trial's runs by run id; None: not completely written
log = logging.getLogger(__name__)

TRIAL_TAG = "shardsweep.trial"
DIGEST_TAG = "shardsweep.digest"
STUDY_TAG = "shardsweep.study"  # tag of an experiment: distinguishes studies of the same name
# MLflow's limits for one log_batch.
BATCH_METRICS = 1000
BATCH_PARAMS = 100
PAGE_RUNS = 1000  # runs per search; MLflow allows 50,000, but a page is held in memory with all parameters
SQLITE_BUSY_S = 20.0  # the same as MLflow's
DATABASE_PORTS = {"postgresql": 5432, "mysql": 3306, "mssql": 1433}
ENVIRONMENT = {
    # Seven retries of 120 s each would hold up the last trials of a study for minutes.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    # Clusters are often offline, and the user decides whether to report usage.
    "MLFLOW_DISABLE_TELEMETRY": "true",
    # MLflow would print both over our own progress.
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}


class MlflowTracker:
    """A tracker that writes at once, in the caller's thread. Every error is a one-line TrackingError."""

    def __init__(
        self, uri: str, artifacts: Path, study: StudyRecord, directory: StudyDir | None = None
    ) -> None:
        """`directory` will hold the record of the winner; if it is None, the winner is not marked."""
        self.uri = uri
        self._artifacts = artifacts
        self._study = study
        self._directory = directory
        self._client: Any = None
        self._experiment = ""
        self._version = ""
        # By trial number, as tagged. None: not read yet; None for one trial: uncertain, must be read again.
        self._runs: dict[str, Digests | None] | None = None
        self._drifts: dict[int, float] = {}  # the drift with which each trial was last recorded

    def open(self) -> None:
        """Connect, and create the study's experiment if it is missing."""
        with _one_line(
            self.uri, f"cannot open the tracking URI {mask_password(self.uri)}", _way_out(self.uri)
        ):
            with sole_process(self.uri):
                self._version = server_version(self.uri) if is_server(self.uri) else _check_database(self.uri)
                client = _mlflow().MlflowClient(tracking_uri=self.uri)
            self._experiment = self._find_experiment(client)
            client.set_experiment_tag(self._experiment, STUDY_TAG, self._identity)
            # Without this tag MLflow takes the experiment for one of chat traces.
            client.set_experiment_tag(self._experiment, "mlflow.experimentKind", "custom_model_development")
            if self._version.startswith(VIEW_VERSIONS):
                client.set_experiment_tag(self._experiment, VIEW_TAG, shared_view(self._study))
            self._client, self._runs = client, None

    def runs_url(self, port: int = 5000) -> str:
        """Return the address of the study's table; `port` as given to `ui_command`. Call it after `open`."""
        return runs_url(self.uri, self._experiment, self._version, port)

    def record(self, trial: Trial, attempt: AttemptDir | None, drift: float = 1.0) -> None:
        if self._client is None:
            self.open()
        self._drifts[trial.number] = drift
        failed = f"cannot record trial {trial.number} at {mask_password(self.uri)}"
        with _one_line(self.uri, failed, "a replay of the study will"):
            content = run_content(trial, attempt, self._study.goals, self._winner(), drift)
            self._replace(str(trial.number), content)

    def close(self, timeout_s: float = 30.0) -> None:
        """Record the trials of the confirmation again: only now is the winner known. No other is pending."""
        winner = self._winner()
        if winner is None or self._directory is None or self._client is None:
            return
        for standing in winner.standings:
            folder = self._directory.trial(standing.trial)
            if (trial := read_trial(folder)) is not None:
                self.record(trial, shown_attempt(folder, trial), self._drifts.get(standing.trial, 1.0))

    def _winner(self) -> Winner | None:
        found = read_document(self._directory.winner, Winner) if self._directory else None
        return found if found is not None and found.goal == self._study.goal.name else None

    @property
    def _identity(self) -> str:
        return f"{self._study.name} {self._study.created_at!r}"

    def _find_experiment(self, client: Any) -> str:
        # A server may be shared, or a study directory removed and its name used again: the second study then
        # gets an experiment of its own, and does not overwrite the first one's trials.
        for name in (self._study.name, f"{self._study.name} ({self._study.created_at:.0f})"):
            found = client.get_experiment_by_name(name)
            if found is None:
                # A server itself decides where artifacts go.
                location = None if is_server(self.uri) else (self._artifacts / name).as_uri()
                return str(client.create_experiment(name, artifact_location=location))
            if found.tags.get(STUDY_TAG, self._identity) == self._identity:
                if found.lifecycle_stage == "deleted":
                    client.restore_experiment(found.experiment_id)
                return str(found.experiment_id)
        raise TrackingError(f"{mask_password(self.uri)} has two other studies named {self._study.name}")

    def _replace(self, number: str, content: RunContent) -> None:
        if self._runs is None:  # read all at once: a resumed study records every trial, a search takes 20 ms
            self._runs = dict(self._search())
        known, digest = self._runs.get(number, {}), content.digest
        if known is None:
            known = self._search(f"tags.`{TRIAL_TAG}` = '{number}'").get(number, {})
        if list(known.values()) == [digest]:
            return
        self._runs[number] = None  # uncertain until all is written: a failed request may have taken effect
        for run_id in known:
            self._client.delete_run(run_id)
        tags = {TRIAL_TAG: number}
        run_id = self._client.create_run(self._experiment, content.start_ms, tags, content.name).info.run_id
        self._fill(run_id, content)
        self._client.set_terminated(run_id, content.status, content.end_ms)
        self._client.set_tag(run_id, DIGEST_TAG, digest)
        self._runs[number] = {run_id: digest}

    def _search(self, wanted: str = "") -> dict[str, Digests]:
        """Return the runs that are not deleted, by trial number."""
        found: dict[str, Digests] = {}
        token: str | None = ""  # the first page
        while token is not None:
            page = self._client.search_runs(
                [self._experiment], wanted, max_results=PAGE_RUNS, page_token=token or None
            )
            token = page.token or None
            for run in page:
                tags = run.data.tags
                found.setdefault(tags.get(TRIAL_TAG, ""), {})[run.info.run_id] = tags.get(DIGEST_TAG)
        return found

    def _fill(self, run: str, content: RunContent) -> None:
        from mlflow.entities import Metric, Param, RunTag  # open() has loaded mlflow

        end_ms = content.start_ms if content.end_ms is None else content.end_ms
        metrics = [Metric(name, value, end_ms, 0) for name, value in content.metrics.items()]
        metrics += [
            Metric(point.name, point.value, point.timestamp_ms, point.step) for point in content.series
        ]
        for some_metrics in _chunks(metrics, BATCH_METRICS):
            self._client.log_batch(run, metrics=some_metrics)
        for some_params in _chunks((Param(*item) for item in content.params.items()), BATCH_PARAMS):
            self._client.log_batch(run, params=some_params)
        self._client.log_batch(run, tags=[RunTag(*item) for item in content.tags.items()])
        with tempfile.TemporaryDirectory() as folder:
            for name, text in content.artifacts.items():
                (Path(folder) / name).write_text(text, encoding="utf-8")
            self._client.log_artifacts(run, folder)


def replay(study_dir: StudyDir, uri: str) -> int:
    """Record every closed trial from its files; return how many. Raises TrackingError."""
    study = read_document(study_dir.record, StudyRecord)
    if study is None:
        raise TrackingError(f"{study_dir.path} is not a study directory: it has no {study_dir.record.name}")
    tracker = MlflowTracker(uri, artifact_root(study_dir.path.parent), study, study_dir)
    tracker.open()
    found = ((folder, read_trial(folder)) for folder in study_dir.trials())
    known = [(folder, trial) for folder, trial in found if trial is not None]
    ranking = Ranking([trial for _, trial in known], study.goal)
    closed = [(folder, trial) for folder, trial in known if trial.state.is_closed]
    for folder, trial in closed:
        tracker.record(trial, shown_attempt(folder, trial), ranking.drift(trial))
    return len(closed)


def shown_attempt(folder: TrialDir, trial: Trial) -> AttemptDir | None:
    """Return the attempt whose files a run shows; None if the trial was never launched."""
    return folder.attempt(trial.shown.number) if trial.shown else None


def _mlflow() -> Any:
    """Import MLflow when it is first needed: that takes 2 to 7 s, which a study without it must not pay."""
    for key, value in ENVIRONMENT.items():
        os.environ.setdefault(key, value)
    # MLflow's own use of SQLAlchemy causes this warning while its tables are mapped. `catch_warnings` would
    # change and restore a global of the whole process, and so must not be used in a thread.
    warnings.filterwarnings("ignore", message="The ``noload`` loader strategy is deprecated")
    import mlflow

    for chatty in ("mlflow", "alembic"):  # they log thirty lines about creating tables
        logging.getLogger(chatty).setLevel(logging.WARNING)
    return mlflow


def _chunks(items: Iterable[T], size: int) -> Iterator[list[T]]:
    rest = iter(items)
    while chunk := list(itertools.islice(rest, size)):
        yield chunk


@contextmanager
def _one_line(uri: str, failed: str, way_out: str) -> Iterator[None]:
    """Turn any error of MLflow and the libraries below it into one TrackingError without passwords."""
    try:
        yield
    except TrackingError:
        raise
    except (OSError, ValueError, ImportError, sqlite3.Error, http.client.HTTPException) as error:
        raise TrackingError(f"{failed}: {_reason(uri, error)}; {way_out}") from error
    except _mlflow_errors() as error:
        raise TrackingError(f"{failed}: {_reason(uri, error)}; {way_out}") from error


def _mlflow_errors() -> tuple[type[Exception], ...]:
    from mlflow.exceptions import MlflowException  # imported only after something was raised
    from sqlalchemy.exc import SQLAlchemyError

    return (MlflowException, SQLAlchemyError)


def _reason(uri: str, error: Exception) -> str:
    text = str(error.reason if isinstance(error, urllib.error.URLError) else error).strip()
    first = text.partition("\n")[0].partition(". ")[0]  # MLflow's messages go on for a paragraph
    return mask_password(uri, first.rstrip(".")) or type(error).__name__


def _way_out(uri: str) -> str:
    if is_server(uri):
        return "start that server, or set tracking=none and record later by `python -m sweeps replay`"
    return "set tracking.uri=sqlite:////absolute/path/mlflow.db or http://HOST:PORT, or tracking=none"


def _check_database(uri: str) -> str:
    """Return the version of MLflow that will show the database.

    Raises at once if the database cannot be used, where MLflow itself would retry for minutes.
    """
    parts, path = urlsplit(uri), sqlite_path(uri)
    dialect = parts.scheme.partition("+")[0]
    if path is not None:
        with closing(sqlite3.connect(path, timeout=SQLITE_BUSY_S)) as database:
            database.execute("BEGIN IMMEDIATE")  # needs rights and lock of a write, but writes nothing
            database.rollback()
    elif dialect in DATABASE_PORTS:
        if parts.hostname:
            socket.create_connection((parts.hostname, parts.port or DATABASE_PORTS[dialect]), PROBE_S).close()
        _mlflow()
        from mlflow.store.db.utils import create_sqlalchemy_engine

        create_sqlalchemy_engine(uri).connect().close()
    return importlib.metadata.version("mlflow")
