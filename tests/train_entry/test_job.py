"""Real ranks: the files that they leave after a success and after a failure."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from train_entry.contract import (
    AttemptDir,
    Failure,
    FailureKind,
    Heartbeat,
    MeasureSpec,
    MemoryKind,
    Phase,
    Precision,
    RankMeasurement,
    SchedulePlan,
    TrialSpec,
    read_document,
)

pytestmark = [pytest.mark.slow, pytest.mark.jobs]

Launch = Callable[[TrialSpec], Any]
Tiny = Callable[..., TrialSpec]
RunModule = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def half(launch: Launch, tiny: Tiny) -> Any:
    """A ZeRO-2 job in bf16 with activation checkpointing: one warm-up, three timed and two split steps."""
    plan = {"precision": Precision.BF16, "checkpoint_every": 1}
    job = launch(tiny(zero=2, plan=plan))
    assert job.wait() == [0, 0], job.attempt.log(0).read_text()
    return job


@pytest.fixture(scope="module")
def refused(launch: Launch, tiny: Tiny) -> Any:
    """A job with text as bytes and a vocabulary of 100 ids: every rank fails by itself."""
    job = launch(tiny(model=dataclasses.replace(tiny().model, vocab=100)))
    assert job.wait() == [1, 1]
    return job


def test_half_precision_with_checkpointing_measures_every_timed_step(half: Any) -> None:
    for rank in (0, 1):
        outcome = half.outcome(rank)
        assert isinstance(outcome, RankMeasurement)
        assert outcome.rank == rank
        assert len(outcome.step_s) == 3
        assert min(outcome.step_s) > 0
        assert outcome.startup_s > 0


def test_only_timed_steps_are_marked_and_tokens_add_up(half: Any) -> None:
    steps = half.steps
    assert [step.timed for step in steps] == [False, True, True, True, False, False]
    assert [step.tokens for step in steps] == [256 * number for number in range(1, 7)]


def test_the_split_covers_its_parts(half: Any) -> None:
    split = half.outcome(0).split
    assert 0 < split.local_s
    assert min(split.forward_s, split.backward_s, split.update_s) > 0


def test_memory_on_a_cpu_is_resident_memory_by_phase(half: Any) -> None:
    outcome = half.outcome(0)
    assert outcome.memory_kind is MemoryKind.HOST_RSS
    assert min(outcome.startup.allocated_bytes, outcome.steady.allocated_bytes) > 100 * 2**20
    assert outcome.device_in_use_bytes is None


def test_the_last_heartbeat_shows_how_far_the_rank_came(half: Any) -> None:
    heartbeat = read_document(half.attempt.heartbeat(1), Heartbeat)
    assert heartbeat is not None
    assert (heartbeat.phase, heartbeat.step) == (Phase.REPORT, 6)
    assert heartbeat.counter > 6 + len(Phase) - 1


def test_a_finished_rank_leaves_no_scraps(half: Any) -> None:
    names = {path.name for path in half.attempt.path.iterdir()}
    assert not [name for name in names if name.startswith((".", "stacks"))]


def test_every_rank_that_raises_leaves_its_own_failure(refused: Any) -> None:
    for rank in (0, 1):
        failure = refused.outcome(rank)
        assert isinstance(failure, Failure)
        assert (failure.kind, failure.rank, failure.phase) == (FailureKind.BAD_CONFIG, rank, Phase.DATA)
        assert "model.vocab=" in failure.message
        assert "Traceback" in failure.evidence


def test_a_recorded_outcome_is_never_overwritten(refused: Any, relaunch: Callable[..., Any]) -> None:
    before = refused.attempt.outcome(0).read_bytes()
    again = relaunch(refused.attempt)
    assert again.wait() == [2, 2]
    assert refused.attempt.outcome(0).read_bytes() == before
    assert again.attempt.log(0).read_text().count("\n") == 1
    assert "--out DIR" in again.attempt.log(0).read_text()


def test_a_rank_whose_peer_is_killed_says_so_and_shows_its_stacks_on_the_way(
    launch: Launch, tiny: Tiny
) -> None:
    job = launch(tiny(measure=MeasureSpec(warmup_steps=1, steps=10**6, split_steps=0)))
    wait_until(lambda: len(job.steps) > 3)
    job.ranks[0].send_signal(signal.SIGUSR1)
    wait_until(lambda: "measure/clock.py" in job.attempt.stacks(0).read_text())
    job.ranks[1].kill()
    assert job.wait() == [1, -signal.SIGKILL]
    failure = job.outcome(0)
    assert (failure.kind, failure.phase) == (FailureKind.PEER_LOST, Phase.STEPS)
    assert not job.attempt.outcome(1).exists()


def test_one_rank_needs_no_launcher_and_tells_divergence(
    attempt: Callable[[TrialSpec], AttemptDir], tiny: Tiny, run_module: RunModule
) -> None:
    optimizer = dataclasses.replace(tiny().plan.optimizer, lr=1e30)
    directory = attempt(tiny(plan={"ranks": 1, "schedule": SchedulePlan(), "optimizer": optimizer}))
    assert run_module("train_entry", str(directory.path)).returncode == 1
    failure = read_document(directory.outcome(0), Failure)
    assert failure is not None
    assert (failure.kind, failure.phase) == (FailureKind.DIVERGED, Phase.STEPS)


def test_a_configuration_that_deepspeed_refuses_is_bad(
    attempt: Callable[[TrialSpec], AttemptDir], tiny: Tiny, run_module: RunModule
) -> None:
    directory = attempt(tiny(zero=1, plan={"ranks": 1}))
    config = json.loads(directory.ds_config.read_text())
    directory.ds_config.write_text(json.dumps({**config, "train_batch_size": 7}))
    assert run_module("train_entry", str(directory.path)).returncode == 1
    failure = read_document(directory.outcome(0), Failure)
    assert failure is not None
    assert (failure.kind, failure.phase) == (FailureKind.BAD_CONFIG, Phase.ENGINE)


def test_torchrun_repeats_a_trial_by_hand_elsewhere(
    attempt: Callable[[TrialSpec], AttemptDir], tiny: Tiny, run_module: RunModule, tmp_path: Path
) -> None:
    directory = attempt(tiny())
    files = set(directory.path.iterdir())
    torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    run = run_module(*torchrun, "-m", "train_entry", str(directory.path), "--out", str(tmp_path / "by_hand"))
    assert run.returncode == 0, run.stderr
    assert AttemptDir(tmp_path / "by_hand").outcome(1).exists()
    assert set(directory.path.iterdir()) == files


def test_several_ranks_without_a_launcher_are_told_to_use_torchrun(
    attempt: Callable[[TrialSpec], AttemptDir], tiny: Tiny, run_module: RunModule
) -> None:
    run = run_module("train_entry", str(attempt(tiny()).path))
    assert run.returncode == 2
    assert "torchrun --nproc-per-node 2" in run.stderr
    assert run.stderr.count("\n") == 1


def test_a_directory_without_a_spec_is_one_line(run_module: RunModule, tmp_path: Path) -> None:
    run = run_module("train_entry", str(tmp_path))
    assert run.returncode == 2
    assert run.stderr == f"{tmp_path}/spec.json is missing: give an attempt's directory\n"


def wait_until(condition: Callable[[], bool], limit_s: float = 120) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true in time"
        time.sleep(0.1)
