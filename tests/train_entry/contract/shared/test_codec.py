from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.examples import a_measurement
from train_entry.contract import (
    AttemptDir,
    ContractError,
    Failure,
    FailureKind,
    Measurement,
    Phase,
    StepMetrics,
    TrialSpec,
    append_line,
    dump,
    load,
    read_document,
    read_lines,
    write_atomic,
)

METRICS = StepMetrics(step=1, tokens=64, loss=5.5, step_s=0.1, lr=1e-3, timed=True)


def test_a_spec_comes_back_as_it_was_written(spec: TrialSpec) -> None:
    assert load(TrialSpec, dump(spec)) == spec


def test_a_failure_comes_back_with_its_enumerations() -> None:
    failure = Failure(kind=FailureKind.GPU_OOM, message="no room", rank=1, phase=Phase.FIRST_STEP)
    back = load(Failure, dump(failure))
    assert back == failure
    assert back.kind.explanation == FailureKind.GPU_OOM.explanation


def test_fields_of_a_newer_version_are_ignored() -> None:
    text = dump(METRICS).replace('"step": 1', '"step": 1, "invented_later": 2')
    assert load(StepMetrics, text) == METRICS


def test_a_measurement_from_before_models_were_divided_is_read() -> None:
    known = json.loads(dump(a_measurement(host_peak_bytes=0)))
    for later in ("host_peak_bytes", "bubble", "tensor_volume_bytes"):
        del known[later]
    back = load(Measurement, json.dumps(known))
    assert back == a_measurement(host_peak_bytes=0, bubble=None, tensor_volume_bytes=0)


def test_a_torn_line_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append_line(path, METRICS)
    with path.open("a") as file:
        file.write(dump(METRICS, indent=None)[:20])
    assert list(read_lines(path, StepMetrics)) == [METRICS]


def test_a_missing_stream_has_no_records(tmp_path: Path) -> None:
    assert list(read_lines(tmp_path / "none.jsonl", StepMetrics)) == []


def test_an_atomic_write_leaves_no_temporary_file(tmp_path: Path) -> None:
    write_atomic(tmp_path / "deep" / "file.json", "old")
    write_atomic(tmp_path / "deep" / "file.json", "new")
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["file.json"]
    assert (tmp_path / "deep" / "file.json").read_text() == "new"


def test_an_atomic_write_that_fails_leaves_the_old_text(tmp_path: Path) -> None:
    path = tmp_path / "file.json"
    write_atomic(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomic(path, "\ud800")  # cannot be encoded
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_an_unreadable_document_names_its_file(tmp_path: Path) -> None:
    attempt = AttemptDir(tmp_path)
    attempt.spec.write_text("{")
    with pytest.raises(ContractError, match=r"spec\.json: not a TrialSpec"):
        read_document(attempt.spec, TrialSpec)


def test_a_missing_document_is_none(tmp_path: Path) -> None:
    assert read_document(AttemptDir(tmp_path).spec, TrialSpec) is None


def test_accumulation_follows_from_the_batches(spec: TrialSpec, tiny: Callable[..., TrialSpec]) -> None:
    assert spec.plan.grad_accum == 2
    assert dataclasses.replace(spec.plan, micro_batch=1).grad_accum == 4
    assert spec.plan.tokens_per_step == 8 * 32
    assert tiny(zero=3).plan.strategy == "zero3"
