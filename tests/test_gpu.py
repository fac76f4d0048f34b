"""Real studies on GPUs: NCCL, device memory, MFU, and out of memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import CommandLine
from tests.support.examples import a_plan, a_trial_spec
from tests.support.plans import LLAMA_160M
from tests.train_entry.conftest import rank_environment, read_outcome, write_attempt
from train_entry.contract import (
    Engine,
    Failure,
    FailureKind,
    Measurement,
    MeasureSpec,
    MemoryKind,
    RankMeasurement,
    RankOutcome,
    StudyDir,
    TimingEnd,
    Trial,
    TrialSpec,
    read_trial,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.jobs,
    pytest.mark.timeout(600),
]
STRATEGIES = ("ddp", "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload")
SMALL = ("model=llama_160m", "model.layers=2", "seq_len=256", "global_batch=16", "tracking=none", "study=x")


def trials(line: CommandLine) -> list[Trial]:
    found = [read_trial(place) for place in StudyDir(line.studies / "x").trials()]
    return [trial for trial in found if trial is not None]


@pytest.fixture(scope="module")
def measured(module_command_line: CommandLine) -> dict[str, Measurement]:
    """Measurements by strategy, in bf16 on all GPUs of this host."""
    done = module_command_line.run(
        "-m", f"strategy={','.join(STRATEGIES)}", "micro_batch=1", "measure.steps=6", *SMALL
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {
        trial.plan.strategy: trial.outcome
        for trial in trials(module_command_line)
        if trial.plan and isinstance(trial.outcome, Measurement)
    }


def test_every_strategy_is_measured(measured: dict[str, Measurement]) -> None:
    assert set(measured) == set(STRATEGIES)


def test_memory_is_the_cards_and_the_first_step_adds_the_optimizers_state(
    measured: dict[str, Measurement],
) -> None:
    for seen in measured.values():
        rank = seen.ranks[0]
        assert seen.memory_kind is MemoryKind.DEVICE
        assert rank.startup.allocated_bytes < rank.first_step.allocated_bytes
        assert rank.first_step.reserved_bytes <= (rank.device_in_use_bytes or 0)
        assert (rank.device_in_use_bytes or 0) < (rank.device_total_bytes or 0)


def test_zero_stages_train_alike_in_bf16(measured: dict[str, Measurement]) -> None:
    losses = [measured[name].loss for name in STRATEGIES if name != "ddp"]
    assert losses == pytest.approx([losses[0]] * len(losses), rel=5e-3)
    assert measured["ddp"].loss == pytest.approx(losses[0], rel=3e-2)


def test_mfu_follows_from_throughput_and_the_cards_peak(measured: dict[str, Measurement]) -> None:
    seen = measured["zero1"]
    rank = seen.ranks[0]
    flops = 6 * rank.parameters + 12 * 2 * 768 * 256  # 6 P + 12 L h s
    assert rank.peak_flops_per_s is not None
    assert seen.mfu == pytest.approx(seen.tokens_per_s_per_gpu * flops / rank.peak_flops_per_s)


def test_out_of_memory_is_infeasible_not_a_crash(command_line: CommandLine) -> None:
    done = command_line.run(
        *("model=llama_7b", "strategy=ddp", "micro_batch=64", "global_batch=512", "tracking=none", "study=x"),
        *("ranks=1", "precision=fp32", "measure.warmup_steps=1", "measure.steps=2"),
    )
    assert done.returncode == 3
    (trial,) = trials(command_line)
    assert isinstance(trial.outcome, Failure)
    assert trial.outcome.kind is FailureKind.GPU_OOM
    assert trial.state == "infeasible"


# ---------------------------------------------------------------- a memory limit

Within = Callable[[float | None], RankOutcome]


def outcome_of(spec: TrialSpec, directory: Path) -> RankOutcome:
    """Run one rank in a process of its own, since a forked one may not be able to use CUDA."""
    attempt = write_attempt(directory, spec)
    command = [sys.executable, "-P", "-m", "train_entry", str(attempt.path)]
    done = subprocess.run(command, env=rank_environment(0, 1, attempt), capture_output=True, text=True)
    assert attempt.outcome(0).exists(), done.stderr
    return read_outcome(attempt, 0)


@pytest.fixture(scope="module")
def within(tmp_path_factory: pytest.TempPathFactory) -> Within:
    """Run one rank that may reserve this many bytes; None: the whole GPU."""

    def run(limit_bytes: float | None) -> RankOutcome:
        spec = a_trial_spec(
            device="cuda",
            plan=a_plan(
                engine=Engine.DDP, ranks=1, micro_batch=8, global_batch=16, seq_len=1024, zero={"stage": 0}
            ),
            model=LLAMA_160M,
            memory_limit_bytes=None if limit_bytes is None else int(limit_bytes),
        )
        return outcome_of(spec, tmp_path_factory.mktemp("attempt"))

    return run


@pytest.fixture(scope="module")
def peak_bytes(within: Within) -> int:
    """The bytes that the rank allocates without a limit."""
    free = within(None)
    assert isinstance(free, RankMeasurement), free.evidence
    return free.peak.allocated_bytes


def test_a_plan_runs_out_under_a_limit_below_its_peak(within: Within, peak_bytes: int) -> None:
    held = within(0.9 * peak_bytes)
    assert isinstance(held, Failure)
    assert held.kind is FailureKind.GPU_OOM
    assert held.message.startswith(
        f"OutOfMemoryError: limited to {0.9 * peak_bytes / 2**30:.2f} GiB of the GPU: "
    )


def test_a_plan_runs_under_a_limit_a_little_above_its_peak(within: Within, peak_bytes: int) -> None:
    held = within(1.15 * peak_bytes)
    assert isinstance(held, RankMeasurement), held.evidence
    assert held.peak.allocated_bytes <= held.peak.reserved_bytes <= 1.15 * peak_bytes


# ---------------------------------------------------------------- the end of timing, and the GPU's health


@pytest.fixture(scope="module")
def brief(tmp_path_factory: pytest.TempPathFactory) -> RankMeasurement:
    """The measurement of one rank that stops timing once its step time is known within 50%."""
    spec = a_trial_spec(
        device="cuda",
        plan=a_plan(
            engine=Engine.DDP, ranks=1, micro_batch=8, global_batch=16, seq_len=1024, zero={"stage": 0}
        ),
        model=LLAMA_160M,
        measure=MeasureSpec(warmup_steps=2, steps=40, split_steps=0, precision=0.5),
    )
    outcome = outcome_of(spec, tmp_path_factory.mktemp("attempt"))
    assert isinstance(outcome, RankMeasurement)
    return outcome


def test_timing_ends_when_the_step_time_is_known_as_asked(brief: RankMeasurement) -> None:
    assert (brief.ended, len(brief.step_s)) == (TimingEnd.PRECISE, 4)


def test_the_cards_health_is_known(brief: RankMeasurement) -> None:
    assert brief.health is not None
    assert 0 < brief.health.clock_mhz <= brief.health.max_clock_mhz
    assert 10 < brief.health.temperature_c < 110
    assert 10 < brief.health.power_w < 2000


def test_every_rank_of_every_strategy_ends_alike_and_knows_its_card(measured: dict[str, Measurement]) -> None:
    for seen in measured.values():
        assert {(rank.ended, len(rank.step_s)) for rank in seen.ranks} == {(seen.ended, seen.steps)}
        assert None not in [rank.health for rank in seen.ranks]
