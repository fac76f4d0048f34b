"""The outcome of an attempt, from files as jobs write them."""

from __future__ import annotations

import math
import signal
from pathlib import Path
from typing import Any

import pytest

from sweeps.estimate.flops import flops_per_token
from sweeps.study.collect import collect
from tests.support.examples import a_plan, a_rank_measurement, a_trial_spec, an_attempt
from train_entry.contract import (
    AttemptDir,
    ExitReason,
    Failure,
    FailureKind,
    Measurement,
    MemoryPeak,
    Phase,
    RankExit,
    RankOutcome,
    StepMetrics,
    StepSplit,
    TrialSpec,
    append_line,
    dump,
    write_atomic,
)

KILLED = -signal.SIGKILL


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptDir:
    return AttemptDir(tmp_path)


@pytest.fixture
def spec() -> TrialSpec:
    """A job of two ranks, with 32 sequences of 128 tokens a step."""
    return a_trial_spec()


def left(attempt: AttemptDir, rank: int, outcome: RankOutcome) -> None:
    """Leave a rank's outcome, and its exit as the supervisor expects it."""
    write_atomic(attempt.outcome(rank), dump(outcome))
    ended(attempt, rank, returncode=int(isinstance(outcome, Failure)))


def ended(attempt: AttemptDir, rank: int, returncode: int, **how: Any) -> None:
    """Write how a rank ended, as its supervisor does."""
    known: dict[str, Any] = {
        "reason": ExitReason.EXITED,
        "phase": Phase.STEPS,
        "silent_s": 1.0,
        "seconds": 10.0,
    } | how
    write_atomic(attempt.exit(rank), dump(RankExit(rank=rank, returncode=returncode, **known)))


def failed(kind: FailureKind, rank: int) -> Failure:
    return Failure(kind=kind, message=f"said rank {rank}", rank=rank)


def failure(attempt: AttemptDir, spec: TrialSpec) -> Failure:
    outcome = collect(attempt, spec, an_attempt()).outcome
    assert isinstance(outcome, Failure)
    return outcome


def steps(attempt: AttemptDir, losses: list[float]) -> None:
    for number, loss in enumerate(losses, start=1):
        line = StepMetrics(step=number, tokens=number * 4096, loss=loss, step_s=0.5, lr=1e-3, timed=True)
        append_line(attempt.metrics, line)


# ---------------------------------------------------------------- measured


def measured(attempt: AttemptDir, spec: TrialSpec) -> Measurement:
    outcome = collect(attempt, spec, an_attempt()).outcome
    assert isinstance(outcome, Measurement)
    return outcome


def test_speed_is_the_median_of_rank_0s_steps(attempt: AttemptDir, spec: TrialSpec) -> None:
    left(attempt, 0, a_rank_measurement(rank=0, step_s=(1.0, 2.0, 3.0, 4.0, 90.0)))
    left(attempt, 1, a_rank_measurement(rank=1, step_s=(7.0, 7.0, 7.0, 7.0, 7.0)))
    outcome = measured(attempt, spec)
    assert (outcome.step_s, outcome.steps) == (3.0, 5)
    assert outcome.step_s_iqr == 47.0 - 1.5  # quartiles halfway between 4 and 90, and between 1 and 2
    assert outcome.tokens_per_s == pytest.approx(4096 / 3)
    assert outcome.tokens_per_s_per_gpu == pytest.approx(4096 / 6)
    assert outcome.samples_per_s == pytest.approx(32 / 3)


def test_memory_is_the_fullest_ranks_in_its_worst_phase(attempt: AttemptDir, spec: TrialSpec) -> None:
    first_step = MemoryPeak(allocated_bytes=900, reserved_bytes=950)
    steady = MemoryPeak(allocated_bytes=300, reserved_bytes=1200)
    left(attempt, 0, a_rank_measurement(rank=0))
    left(attempt, 1, a_rank_measurement(rank=1, first_step=first_step, steady=steady, startup_s=9.0))
    outcome = measured(attempt, spec)
    assert (outcome.peak_bytes, outcome.reserved_bytes, outcome.startup_s) == (900, 1200, 9.0)
    assert [rank.rank for rank in outcome.ranks] == [0, 1]


def test_loss_is_the_mean_of_the_last_five_steps(attempt: AttemptDir, spec: TrialSpec) -> None:
    left(attempt, 0, a_rank_measurement(rank=0))
    left(attempt, 1, a_rank_measurement(rank=1))
    steps(attempt, [9.0, 9.0, 5.0, 4.0, 3.0, 2.0, 1.0])
    with attempt.metrics.open("a") as file:
        file.write('{"step": 8, "tok')  # a line that is still being written
    outcome = measured(attempt, spec)
    assert (outcome.loss, outcome.tokens) == (3.0, 7 * 4096)


def test_without_metrics_there_is_no_loss(attempt: AttemptDir, spec: TrialSpec) -> None:
    left(attempt, 0, a_rank_measurement(rank=0))
    left(attempt, 1, a_rank_measurement(rank=1))
    outcome = measured(attempt, spec)
    assert math.isnan(outcome.loss)
    assert outcome.tokens == 0


def test_mfu_is_the_flops_of_the_model_over_the_peak_of_the_cards(
    attempt: AttemptDir, spec: TrialSpec
) -> None:
    for rank in range(2):
        left(attempt, rank, a_rank_measurement(rank=rank, step_s=(2.0, 2.0), peak_flops_per_s=1e9))
    flops = 6 * 1000 + 12 * 2 * 8 * 128  # per token: 6 P + 12 layers x hidden x sequence
    assert flops_per_token(spec.model, 128) == flops == 30_576
    assert measured(attempt, spec).mfu == pytest.approx(flops * 4096 / 2.0 / 2e9)


def test_without_a_known_peak_there_is_no_mfu(attempt: AttemptDir, spec: TrialSpec) -> None:
    left(attempt, 0, a_rank_measurement(rank=0))
    left(attempt, 1, a_rank_measurement(rank=1))
    assert measured(attempt, spec).mfu is None


def test_a_single_step_has_no_spread(attempt: AttemptDir) -> None:
    left(attempt, 0, a_rank_measurement(rank=0, step_s=(2.0,)))
    assert measured(attempt, a_trial_spec(plan=a_plan(ranks=1))).step_s_iqr == 0.0


# ---------------------------------------------------------------- a model that is divided


def split(forward_s: float, backward_s: float, exchange_s: float) -> StepSplit:
    return StepSplit(
        local_s=0.1, forward_s=forward_s, backward_s=backward_s, exchange_s=exchange_s, update_s=9.0
    )


def measured_on(attempt: AttemptDir, splits: list[StepSplit | None], **plan: Any) -> Measurement:
    """Return the measurement of as many ranks as there are splits."""
    for rank, of_rank in enumerate(splits):
        left(attempt, rank, a_rank_measurement(rank=rank, split=of_rank))
    return measured(attempt, a_trial_spec(plan=a_plan(ranks=len(splits), **plan)))


def test_a_stage_that_ended_before_the_others_waits_for_them_too(attempt: AttemptDir) -> None:
    # One micro-batch, forward 1 s and backward 2 s: the last stage waits 1 s before its passes and 2 s after.
    splits: list[StepSplit | None] = [split(1, 2, 3), split(1, 2, 1)]
    outcome = measured_on(attempt, splits, pipeline=2, global_batch=4)
    assert outcome.bubble == a_plan(pipeline=2, global_batch=4).bubble == 0.5


def test_the_bubble_is_a_mean_over_ranks_of_each_copys_own_phase(attempt: AttemptDir) -> None:
    # Stages are halves of the ranks, so ranks 0 and 2 are a copy of the model: 10 s, the other copy 5 s.
    splits: list[StepSplit | None] = [split(2, 6, 2), split(1, 3, 0), split(1, 4, 3), split(2, 3, 0)]
    outcome = measured_on(attempt, splits, pipeline=2)
    assert outcome.bubble == pytest.approx((0.2 + 0.2 + 0.5 + 0.0) / 4)


def test_without_a_pipeline_or_without_splits_no_bubble_is_known(attempt: AttemptDir) -> None:
    assert measured_on(attempt, [None, None], pipeline=2).bubble is None
    assert measured_on(attempt, [split(1, 2, 0), split(1, 2, 0)]).bubble is None


def test_a_step_of_a_pipeline_has_ended_when_its_last_stage_has(attempt: AttemptDir) -> None:
    left(attempt, 0, a_rank_measurement(rank=0, step_s=(1.0, 5.0, 3.0)))
    left(attempt, 1, a_rank_measurement(rank=1, step_s=(2.0, 4.0, 3.5)))
    outcome = measured(attempt, a_trial_spec(plan=a_plan(pipeline=2)))
    assert (outcome.step_s, outcome.steps) == (3.5, 3)  # the median of 2.0, 5.0 and 3.5


def test_tokens_are_counted_once_for_all_ranks_of_a_copy(attempt: AttemptDir) -> None:
    for rank in range(8):
        left(attempt, rank, a_rank_measurement(rank=rank, step_s=(2.0, 2.0), peak_flops_per_s=1e9))
    outcome = measured(attempt, a_trial_spec(plan=a_plan(ranks=8, tensor=2, pipeline=2)))
    assert (outcome.samples_per_s, outcome.tokens_per_s) == (16.0, 2048.0)
    assert outcome.tokens_per_s_per_gpu == 256.0
    assert outcome.mfu == pytest.approx(30_576 * 2048 / 8e9)  # FLOPs a token of the whole model, on all GPUs


def test_what_tensor_ranks_send_is_recorded(attempt: AttemptDir) -> None:
    # 2 blocks x 7 sums x 8 micro-batches x (4 x 128 x 8 elements of 2 bytes)
    assert measured_on(attempt, [None, None], tensor=2).tensor_volume_bytes == 2 * 7 * 8 * 4096 * 2
    assert measured_on(attempt, [None, None]).tensor_volume_bytes == 0


# ---------------------------------------------------------------- the root cause


def test_out_of_memory_on_one_rank_explains_that_its_peer_lost_it(
    attempt: AttemptDir, spec: TrialSpec
) -> None:
    left(attempt, 0, failed(FailureKind.PEER_LOST, 0))
    left(attempt, 1, failed(FailureKind.GPU_OOM, 1))
    assert failure(attempt, spec) == failed(FailureKind.GPU_OOM, 1)


def test_a_killed_rank_explains_its_peers_communication_error(attempt: AttemptDir, spec: TrialSpec) -> None:
    left(attempt, 0, failed(FailureKind.COMMS, 0))
    ended(attempt, 1, returncode=-signal.SIGSEGV)
    found = failure(attempt, spec)
    assert (found.kind, found.rank, found.phase) == (FailureKind.CRASHED, 1, Phase.STEPS)
    assert found.message == "rank 1 was killed by SIGSEGV in phase steps"


@pytest.mark.parametrize(
    ("root", "others"),
    [
        (FailureKind.DIVERGED, FailureKind.PEER_LOST),
        (FailureKind.CRASHED, FailureKind.COMMS),
        (FailureKind.BAD_CONFIG, FailureKind.HUNG),
        (FailureKind.COMMS, FailureKind.HUNG),
        (FailureKind.HUNG, FailureKind.PEER_LOST),
        (FailureKind.CANCELLED, FailureKind.PEER_LOST),
        (FailureKind.CANCELLED, FailureKind.NODE_LOST),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_what_explains_more_is_the_cause_whichever_rank_said_it(
    attempt: AttemptDir, spec: TrialSpec, root: FailureKind, others: FailureKind, rank: int
) -> None:
    left(attempt, rank, failed(root, rank))
    left(attempt, 1 - rank, failed(others, 1 - rank))
    assert failure(attempt, spec) == failed(root, rank)


def test_a_rank_that_measured_does_not_hide_one_that_failed(attempt: AttemptDir, spec: TrialSpec) -> None:
    left(attempt, 0, a_rank_measurement(rank=0))
    left(attempt, 1, failed(FailureKind.HOST_OOM, 1))
    assert failure(attempt, spec).kind is FailureKind.HOST_OOM


# ---------------------------------------------------------------- ranks without an outcome


@pytest.mark.parametrize(
    ("how", "kind", "message"),
    [
        (
            {"reason": ExitReason.HUNG, "silent_s": 121.4, "returncode": KILLED},
            FailureKind.HUNG,
            "rank 0 made no progress for 121 s in phase steps",
        ),
        (
            {"reason": ExitReason.TIMED_OUT, "seconds": 1800.2, "returncode": KILLED},
            FailureKind.TIMED_OUT,
            "rank 0 was still running after 1800 s in phase steps",
        ),
        (
            {"reason": ExitReason.CANCELLED, "returncode": KILLED},
            FailureKind.CANCELLED,
            "rank 0 was stopped (cancelled) in phase steps",
        ),
        (
            {"reason": ExitReason.PEER_LOST, "returncode": KILLED},
            FailureKind.PEER_LOST,
            "rank 0 was stopped (peer_lost) in phase steps",
        ),
        (
            {"returncode": KILLED, "oom_kills": 1},
            FailureKind.HOST_OOM,
            "rank 0 was killed by the kernel because host memory ran out in phase steps",
        ),
        (
            {"returncode": KILLED, "oom_kills": 0},
            FailureKind.CRASHED,
            "rank 0 was killed by SIGKILL in phase steps",
        ),
        (
            {"returncode": -signal.SIGABRT, "oom_kills": 1},
            FailureKind.CRASHED,
            "rank 0 was killed by SIGABRT in phase steps",
        ),
        (
            {"returncode": 1, "phase": None},
            FailureKind.CRASHED,
            "rank 0 exited with status 1 without an outcome before its first heartbeat",
        ),
        (
            {"returncode": 0},
            FailureKind.CRASHED,
            "rank 0 exited with status 0 without an outcome in phase steps",
        ),
    ],
)
def test_how_a_process_ended_says_what_failed(
    attempt: AttemptDir, spec: TrialSpec, how: dict[str, Any], kind: FailureKind, message: str
) -> None:
    ended(attempt, 0, **how)
    ended(attempt, 1, returncode=KILLED, reason=ExitReason.PEER_LOST)
    ended_both = failure(attempt, spec)
    assert (ended_both.kind, ended_both.message, ended_both.rank) == (kind, message, 0)


def test_a_rank_whose_supervisor_is_gone_too_lost_its_node(attempt: AttemptDir, spec: TrialSpec) -> None:
    left(attempt, 0, failed(FailureKind.COMMS, 0))
    attempt.log(1).write_text("last words\n")
    found = failure(attempt, spec)
    assert (found.kind, found.rank) == (FailureKind.NODE_LOST, 1)
    assert found.message == "rank 1 and its supervisor disappeared"
    assert found.evidence == "last words"


@pytest.mark.parametrize("torn", ["", '{"type": "RankMeas', '{"type": "Failure"}'])
def test_a_torn_outcome_counts_as_none(attempt: AttemptDir, spec: TrialSpec, torn: str) -> None:
    attempt.outcome(0).write_text(torn)
    ended(attempt, 0, returncode=KILLED)
    left(attempt, 1, failed(FailureKind.PEER_LOST, 1))
    assert failure(attempt, spec).kind is FailureKind.CRASHED


def test_stacks_are_the_evidence_before_the_end_of_the_log(attempt: AttemptDir, spec: TrialSpec) -> None:
    attempt.log(0).write_text("".join(f"line {number}\n" for number in range(100)))
    for rank in range(2):
        ended(attempt, rank, returncode=KILLED, reason=ExitReason.HUNG)
    assert failure(attempt, spec).evidence == "\n".join(f"line {number}" for number in range(60, 100))
    attempt.stacks(0).write_text("in all_reduce")
    assert failure(attempt, spec).evidence == "in all_reduce"


# ---------------------------------------------------------------- cost


def test_gpu_seconds_are_ranks_times_the_longest_of_them(attempt: AttemptDir, spec: TrialSpec) -> None:
    assert collect(attempt, spec, an_attempt()).gpu_s == 0.0
    ended(attempt, 0, returncode=0, seconds=30.0)
    ended(attempt, 1, returncode=0, seconds=31.0)
    assert collect(attempt, spec, an_attempt()).gpu_s == 62.0


def test_an_attempt_that_is_collected_again_costs_what_it_cost(attempt: AttemptDir, spec: TrialSpec) -> None:
    ended(attempt, 0, returncode=0, seconds=30.0)
    once = collect(attempt, spec, an_attempt(slots=("core-0",), started_at=9.0))
    assert (once.number, once.slots, once.started_at, once.gpu_s) == (1, ("core-0",), 9.0, 60.0)
    assert collect(attempt, spec, once) == once


def test_what_ranks_see_of_a_cancelled_peer_is_no_failure_of_theirs(
    attempt: AttemptDir, spec: TrialSpec
) -> None:
    ended(attempt, 0, returncode=KILLED, reason=ExitReason.CANCELLED)
    write_atomic(attempt.outcome(1), dump(failed(FailureKind.CRASHED, 1)))
    ended(attempt, 1, returncode=1)
    assert failure(attempt, spec).kind is FailureKind.CANCELLED


def test_out_of_memory_counts_though_the_attempt_was_cancelled(attempt: AttemptDir, spec: TrialSpec) -> None:
    ended(attempt, 0, returncode=KILLED, reason=ExitReason.CANCELLED)
    write_atomic(attempt.outcome(1), dump(failed(FailureKind.GPU_OOM, 1)))
    ended(attempt, 1, returncode=1)
    assert failure(attempt, spec).kind is FailureKind.GPU_OOM


@pytest.mark.parametrize("number", [signal.SIGABRT, signal.SIGKILL, signal.SIGSEGV])
def test_out_of_memory_explains_a_peer_that_a_signal_ended(
    attempt: AttemptDir, spec: TrialSpec, number: signal.Signals
) -> None:
    ended(attempt, 0, returncode=-number)
    write_atomic(attempt.outcome(1), dump(failed(FailureKind.GPU_OOM, 1)))
    ended(attempt, 1, returncode=1)
    assert failure(attempt, spec).kind is FailureKind.GPU_OOM


def test_a_crash_explains_a_peer_that_aborted_but_not_one_that_was_killed(
    attempt: AttemptDir, spec: TrialSpec
) -> None:
    write_atomic(attempt.outcome(1), dump(failed(FailureKind.CRASHED, 1)))
    ended(attempt, 1, returncode=1)
    ended(attempt, 0, returncode=-signal.SIGABRT)
    assert failure(attempt, spec).rank == 1
    ended(attempt, 0, returncode=KILLED)
    assert failure(attempt, spec).rank == 0


def test_a_rank_ended_by_a_real_time_signal_is_named_by_its_number(
    attempt: AttemptDir, spec: TrialSpec
) -> None:
    ended(attempt, 0, returncode=-40)
    ended(attempt, 1, returncode=KILLED, reason=ExitReason.PEER_LOST)
    assert "killed by signal 40" in failure(attempt, spec).message
