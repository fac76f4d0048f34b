"""Compute what MLflow shows of a study, as plain values, without importing MLflow.

`run_content` returns everything in the run of one trial, `shared_view` the columns that come first in the
runs table, and `runs_url` the address of that table. The names of numbers contain their units. The names of
series begin with `by_step/`, since MLflow would show a series' last step in place of a summary of the same
name.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sweeps.study.export import reproduce_command
from sweeps.tracking.location import server_url
from sweeps.tracking.search_content import lead_metrics, search_metrics, search_tags
from train_entry.contract import (
    GIB,
    AttemptDir,
    Failure,
    Goal,
    Measurement,
    Plan,
    Scalar,
    State,
    StepMetrics,
    StudyRecord,
    Trial,
    Winner,
    read_lines,
    typed,
)

LOG_TAIL_LINES = 200
LOG_TAIL_BYTES = 2**18  # read from the end of a log: 200 lines of 1,300 characters
STATUS = {
    State.MEASURED: "FINISHED",
    State.REUSED: "FINISHED",
    State.SUSPECT: "FINISHED",
    State.INFEASIBLE: "FAILED",
    State.REJECTED: "FAILED",
    State.FAILED: "FAILED",
    State.STOPPED: "KILLED",
    State.CANCELLED: "KILLED",
    State.QUEUED: "SCHEDULED",
    State.RUNNING: "RUNNING",
}
THROUGHPUTS = ("tokens_per_s_per_gpu", "tokens_per_s", "samples_per_s")
VIEW_KEY = "shardsweep"
VIEW_TAG = f"mlflow.sharedViewState.{VIEW_KEY}"
# The view's format comes from the page's own script; MLflow does not document it.
VIEW_VERSIONS = ("3.17.",)


@dataclass(frozen=True, kw_only=True, slots=True)
class SeriesPoint:
    name: str
    step: int
    timestamp_ms: int
    value: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RunContent:
    """Everything that MLflow holds of one trial."""

    name: str
    status: str
    start_ms: int
    end_ms: int | None
    params: Mapping[str, str]
    metrics: Mapping[str, float]
    series: tuple[SeriesPoint, ...]
    tags: Mapping[str, str]
    artifacts: Mapping[str, str]  # file name to text

    @property
    def digest(self) -> str:
        """A hash of the content. It tells a complete, current run from one that must be replaced."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def run_content(
    trial: Trial,
    attempt: AttemptDir | None,
    goals: Sequence[Goal] = (),
    winner: Winner | None = None,
    drift: float = 1.0,
) -> RunContent:
    """Return the content of a trial's run.

    `attempt` has the trial's files; `drift` is the machine's speed during the trial over its initial speed.
    """
    strategy = trial.plan.strategy if trial.plan else trial.state.value
    return RunContent(
        name=f"{trial.number:04d} {strategy}",
        status=STATUS[trial.state],
        start_ms=round(trial.created_at * 1000),
        end_ms=None if trial.closed_at is None else round(trial.closed_at * 1000),
        params=_params(trial),
        metrics=_metrics(trial) | dict(search_metrics(trial, goals, winner, drift)),
        series=() if attempt is None else tuple(_series(attempt, trial.created_at)),
        tags=_tags(trial, winner),
        artifacts={} if attempt is None else dict(_artifacts(attempt, trial.plan)),
    )


def _params(trial: Trial) -> dict[str, str]:
    params = {knob: typed(value) for knob, value in trial.values.items()}
    if trial.plan is not None:
        params |= dict(_flat("plan", dataclasses.asdict(trial.plan)))
        params |= {"plan.data": typed(trial.plan.data), "plan.grad_accum": typed(trial.plan.grad_accum)}
    return params


def _flat(prefix: str, fields: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    for key, value in fields.items():
        if isinstance(value, Mapping):
            yield from _flat(f"{prefix}.{key}", value)
        else:
            yield f"{prefix}.{key}", typed(value)


def _metrics(trial: Trial) -> dict[str, float]:
    metrics = {"gpu_s": trial.gpu_s, **_estimated(trial)}
    match trial.outcome:
        case Measurement() as seen:
            same = (*THROUGHPUTS, "step_s", "loss", "startup_s")
            metrics |= {name: getattr(seen, name) for name in same}
            metrics |= {"peak_gib": seen.peak_bytes / GIB, "reserved_gib": seen.reserved_bytes / GIB}
            metrics |= {} if seen.mfu is None else {"mfu": seen.mfu}
            metrics |= {} if trial.plan is None else dict(_sharing(trial.plan, seen))
    if trial.check is not None and isinstance(trial.check.outcome, Measurement):
        metrics |= {"check_loss": trial.check.outcome.loss}
    return metrics


def _estimated(trial: Trial) -> dict[str, float]:
    """Return the estimate made before the launch: all that is known of a plan that was not launched."""
    if trial.estimate is None:
        return {}
    names = ("peak_bytes", "step_s", "tokens_per_s")
    return {f"estimated_{name}": getattr(trial.estimate, name) for name in names}


def _sharing(plan: Plan, seen: Measurement) -> Iterator[tuple[str, float]]:
    """Yield the costs of dividing the model: a pipeline's bubble, the volume of tensor parallelism."""
    if plan.pipeline > 1:
        yield "bubble_expected", plan.bubble
    if seen.bubble is not None:
        yield "bubble", seen.bubble
    if plan.tensor > 1:
        yield "tensor_volume_bytes", seen.tensor_volume_bytes


def _series(attempt: AttemptDir, started_at: float) -> Iterator[SeriesPoint]:
    now_s = started_at  # steps have no time of day; the sum of their durations gives a plausible one
    for line in read_lines(attempt.metrics, StepMetrics):
        now_s += line.step_s
        for name, value in (("loss", line.loss), ("step_s", line.step_s), ("lr", line.lr)):
            yield SeriesPoint(
                name=f"by_step/{name}", step=line.step, timestamp_ms=round(now_s * 1000), value=value
            )


def _tags(trial: Trial, winner: Winner | None) -> dict[str, str]:
    tags = {
        "state": trial.state.value,
        "origin": trial.origin.value,
        "overrides": " ".join(trial.overrides),
        "reproduce": reproduce_command(trial.overrides),
        "mlflow.note.content": f"    {reproduce_command(trial.overrides)}\n",  # the run page's description
    }
    optional: dict[str, Scalar] = {
        "strategy": trial.plan.strategy if trial.plan else None,
        "fingerprint": trial.fingerprint,
        "fit": trial.estimate.fit.value if trial.estimate else None,
        "reused_from": trial.reused_from,
        "parent": trial.parent,
        "reasons": "; ".join(reason.text for reason in trial.reasons) or None,
        **search_tags(trial, winner),
    }
    match trial.outcome:
        case Failure() as failure:
            optional |= {"failure": failure.kind.value, "failure_message": failure.message}
        case Measurement() as seen:
            optional |= {"memory_kind": seen.memory_kind.value}
    return tags | {key: str(value) for key, value in optional.items() if value is not None}


def _artifacts(attempt: AttemptDir, plan: Plan | None) -> Iterator[tuple[str, str]]:
    for path in (attempt.spec, attempt.ds_config):
        if path.exists():
            yield path.name, path.read_text(encoding="utf-8", errors="replace")
    for rank in range(plan.ranks if plan else 0):
        if attempt.log(rank).exists():
            yield f"log_tail.rank{rank}.txt", _tail(attempt.log(rank))


def _tail(path: Path) -> str:
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - LOG_TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines(keepends=True)
    return "".join(lines[-LOG_TAIL_LINES:])


def shared_view(study: StudyRecord) -> str:
    """Return the tag that makes MLflow's runs table show goals, memory and loss first, best run on top."""
    names = dict.fromkeys((*lead_metrics(study), "peak_gib", "loss", "step_s"))
    columns = [f"metrics.`{name}`" for name in names]
    columns += ["metrics.`bubble`"] if "pipeline" in study.dimensions else []
    columns += ["tags.`strategy`", "tags.`state`"]
    columns += [f"params.`{knob}`" for knob in study.dimensions if knob != "strategy"]
    state = {
        "selectedColumns": columns,
        "columnOrder": columns,
        "columnWidths": {columns[0]: 190},  # pixels; the default cuts the name off
        "orderByKey": columns[0],
        "orderByAsc": not study.goal.is_maximized,
    }
    times = dict.fromkeys(("createdAt", "updatedAt"), round(study.created_at * 1000))
    return json.dumps({"name": "best first", **times, "state": json.dumps(state)})


def runs_url(uri: str, experiment: str, version: str, port: int = 5000) -> str:
    """Return the address of an experiment's runs table, with our columns if this MLflow supports them."""
    page = f"{server_url(uri, port)}/#/experiments/{experiment}/runs"
    if not version.startswith(VIEW_VERSIONS):
        return page
    return f"{page}?workflowType=machine_learning&viewStateShareKey={VIEW_KEY}"
