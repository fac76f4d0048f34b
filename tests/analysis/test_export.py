"""A study as a table for replays."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from analysis.__main__ import main
from analysis.export import VERSION, export_lines
from analysis.load import load_study
from tests.support.estimates import an_estimate
from tests.support.examples import (
    a_measurement,
    a_model,
    a_plan,
    a_rank_measurement,
    a_repeat,
    a_trial_spec,
)
from train_entry.contract import (
    Failure,
    FailureKind,
    Goal,
    ModelShape,
    Phase,
    Plan,
    Purpose,
    State,
    StepMetrics,
    append_line,
    dump,
    load,
    write_atomic,
)

if TYPE_CHECKING:
    from tests.analysis.conftest import StudyBuilder


def lines(built: StudyBuilder) -> list[dict[str, Any]]:
    return [
        json.loads(line, parse_constant=pytest.fail) for line in export_lines(load_study(built.directory))
    ]


def rows(built: StudyBuilder) -> list[dict[str, Any]]:
    return lines(built)[1:]


def stream(
    built: StudyBuilder, number: int, warmup: list[float], timed: list[float], split: list[float]
) -> None:
    path = built.directory.trial(number).attempt(1).metrics
    path.parent.mkdir(parents=True, exist_ok=True)
    steps = [(seconds, False) for seconds in warmup] + [(seconds, True) for seconds in timed]
    steps += [(seconds, False) for seconds in split]
    for step, (seconds, is_timed) in enumerate(steps, 1):
        append_line(
            path, StepMetrics(step=step, tokens=step, loss=1.0, step_s=seconds, lr=0.1, timed=is_timed)
        )


def test_the_first_line_is_about_the_study(built: StudyBuilder) -> None:
    goals = (Goal(name="time_to_tokens", tokens=1e9), Goal(name="peak_bytes"))
    built.study(goals=goals, versions={"device": "NVIDIA H200", "torch": "2.9"})
    (header,) = lines(built)
    assert (header["table"], header["study"], header["device"]) == (VERSION, "demo", "NVIDIA H200")
    assert load(ModelShape, json.dumps(header["model"])) == a_model()
    assert load(Goal, json.dumps(header["goal"])) == goals[0]
    assert [goal["name"] for goal in header["goals"]] == ["time_to_tokens", "peak_bytes"]


def test_a_measured_trial_has_its_plan_and_every_step(built: StudyBuilder) -> None:
    plan = a_plan(micro_batch=8)
    seen = (a_rank_measurement(rank=1, step_s=(9.0, 9.0)), a_rank_measurement(rank=0, step_s=(0.5, 0.6)))
    known = {"fingerprint": "f00d", "estimate": an_estimate()}
    built.measured(3, gpu_s=66.0, plan=plan, ranks=seen, trial=known)
    stream(built, 3, [2.0, 1.0], [0.5, 0.6], [0.7])
    (row,) = rows(built)
    assert load(Plan, json.dumps(row["plan"])) == plan
    assert (row["number"], row["fingerprint"], row["strategy"]) == (3, "f00d", "zero2")
    assert row["values"] == {"strategy": "zero2", "micro_batch": 4}
    assert (row["outcome"], row["kind"]) == ("ok", None)
    assert (row["warmup_s"], row["step_s"], row["split_s"]) == ([2.0, 1.0], [0.5, 0.6], [0.7])
    assert (row["startup_s"], row["seconds"], row["loss"]) == (7.0, 33.0, 5.5)
    assert (row["peak_bytes"], row["reserved_bytes"]) == (3 * 2**30, 4 * 2**30)
    assert row["estimate"]["step_s"] == 0.3


def test_a_step_of_a_pipeline_ends_with_its_last_rank(built: StudyBuilder) -> None:
    seen = (a_rank_measurement(rank=0, step_s=(0.5, 0.8)), a_rank_measurement(rank=1, step_s=(0.6, 0.7)))
    built.measured(1, plan=a_plan(pipeline=2), ranks=seen)
    assert rows(built)[0]["step_s"] == [0.6, 0.8]


def test_without_ranks_and_stream_the_median_is_the_only_step(built: StudyBuilder) -> None:
    built.measured(1, gpu_s=60.0)
    (row,) = rows(built)
    assert (row["step_s"], row["warmup_s"], row["seconds"]) == ([0.25], [], 30.0)


def test_failures_say_of_which_kind_and_how_far_they_came(built: StudyBuilder) -> None:
    kinds = {
        FailureKind.GPU_OOM: State.INFEASIBLE,
        FailureKind.HOST_OOM: State.INFEASIBLE,
        FailureKind.HUNG: State.FAILED,
    }
    for number, (kind, state) in enumerate(kinds.items(), 1):
        failure = Failure(kind=kind, message="why", phase=Phase.FIRST_STEP)
        built.trial(number, state, outcome=failure, gpu_s=20.0)
    stream(built, 3, [2.0], [0.5], [])
    found = rows(built)
    assert [(row["outcome"], row["kind"]) for row in found] == [
        ("oom", "gpu_oom"),
        ("oom", "host_oom"),
        ("hung", "hung"),
    ]
    assert (found[2]["warmup_s"], found[2]["step_s"]) == ([2.0], [0.5])
    assert {found[0][name] for name in ("startup_s", "peak_bytes", "reserved_bytes", "loss")} == {None}
    assert (found[0]["phase"], found[0]["seconds"]) == ("first_step", 10.0)


def test_only_trials_that_ran_to_an_end_have_a_line(built: StudyBuilder) -> None:
    built.measured(1)
    built.reused(2, 1)
    built.refused(3)
    built.rejected(4, "no")
    built.trial(5, State.RUNNING)
    built.measured(6, state=State.STOPPED)
    assert [(row["number"], row["state"]) for row in rows(built)] == [(1, "measured"), (6, "stopped")]


def test_what_is_not_finite_is_null_as_json_knows_no_nan(built: StudyBuilder) -> None:
    built.measured(1, loss=math.nan)
    assert rows(built)[0]["loss"] is None


def test_limits_and_the_length_of_the_measurement_are_read_from_what_the_job_was_told(
    built: StudyBuilder,
) -> None:
    built.measured(1)
    assert rows(built)[0]["memory_limit_bytes"] is None
    write_atomic(built.directory.trial(1).attempt(1).spec, dump(a_trial_spec(memory_limit_bytes=40 * 2**30)))
    (row,) = rows(built)
    assert (row["memory_limit_bytes"], row["measure"]["steps"]) == (40 * 2**30, 12)


def test_repeats_stand_beside_the_trial_that_they_are_of(built: StudyBuilder) -> None:
    seen = a_measurement(ranks=(a_rank_measurement(step_s=(0.4, 0.5)),))
    ended = a_repeat(Purpose.CONFIRM, round=1, outcome=seen, gpu_s=42.0)
    running = a_repeat(Purpose.DRIFT)
    built.measured(1, trial={"repeats": (ended, running)})
    (repeat,) = rows(built)[0]["repeats"]
    assert (repeat["attempt"], repeat["purpose"], repeat["turn"]) == (2, "confirm", 1)
    assert (repeat["step_s"], repeat["seconds"], repeat["outcome"]) == ([0.4, 0.5], 21.0, "ok")


def test_the_command_writes_a_file_or_prints(
    built: StudyBuilder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    built.measured(1)
    target = tmp_path / "table.jsonl"
    assert main(["export-table", str(built.directory.path), "--to", str(target)]) == 0
    assert capsys.readouterr().out == f"1 trials: {target}\n"
    assert main(["export-table", str(built.directory.path)]) == 0
    assert capsys.readouterr().out == target.read_text()
    assert len(target.read_text().splitlines()) == 2


def test_the_command_refuses_a_place_where_it_cannot_write(
    built: StudyBuilder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export-table", str(built.directory.path), "--to", str(tmp_path / "no" / "t.jsonl")]) == 2
    assert "--to " in capsys.readouterr().err
    assert main(["export-table", str(built.directory.path), "--to", str(tmp_path)]) == 2
    assert "is a directory; give a file in it" in capsys.readouterr().err
