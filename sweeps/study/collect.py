"""Find out how an attempt ended, from the files of its ranks and supervisors, never from job states alone.

Several ranks usually fail together: one by itself, the others because it is gone. The root cause is a rank's
own failure, before any "a peer was lost". Clocks of different hosts decide nothing.
"""

from __future__ import annotations

import dataclasses
import signal
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sweeps.estimate.flops import flops_per_token
from train_entry.contract import (
    Attempt,
    AttemptDir,
    ContractError,
    Elapsed,
    ExitReason,
    Failure,
    FailureKind,
    JobRecord,
    Measurement,
    MeasureSpec,
    ModelShape,
    Outcome,
    Plan,
    RankExit,
    RankMeasurement,
    RankOutcome,
    SchedulerWord,
    StepMetrics,
    StepSplit,
    Submission,
    TimingEnd,
    TrialSpec,
    load,
    read_document,
    read_lines,
    tensor_volume_bytes,
)

LOG_TAIL_LINES = 40
LOSS_STEPS = 5  # averaged, since the loss of a single batch is noisy

# Which failure explains the others: a lower number explains a higher one. Kinds not listed explain all.
_CAUSES = {
    FailureKind.CANCELLED: 1,  # peers of a cancelled rank report all kinds of failures
    FailureKind.NODE_LOST: 3,
    FailureKind.CRASHED: 3,
    FailureKind.COMMS: 5,
    FailureKind.HUNG: 6,
    FailureKind.TIMED_OUT: 6,
    FailureKind.PEER_LOST: 7,
}
_KILLED = 2  # a rank that a signal ended, or that left nothing: its peers may report a crash
_ABORTED = 4  # SIGABRT is the exception: with it NCCL's watchdog ends a rank whose peer is gone
_BY_REASON = {
    ExitReason.HUNG: FailureKind.HUNG,
    ExitReason.TIMED_OUT: FailureKind.TIMED_OUT,
    ExitReason.PEER_LOST: FailureKind.PEER_LOST,
    ExitReason.CANCELLED: FailureKind.CANCELLED,
}
# Failures that ranks report when their job is ended from outside. _SUPERSEDED lists, for each kind that the
# scheduler reports, those that the scheduler's word replaces.
_ENDED_BY_OTHERS = frozenset(
    (
        FailureKind.CANCELLED,
        FailureKind.NODE_LOST,
        FailureKind.PEER_LOST,
        FailureKind.COMMS,
        FailureKind.CRASHED,
    )
)
_SUPERSEDED = defaultdict(
    lambda: _ENDED_BY_OTHERS,
    {
        FailureKind.CRASHED: frozenset((FailureKind.CANCELLED, FailureKind.NODE_LOST)),
        FailureKind.CANCELLED: frozenset((FailureKind.NODE_LOST,)),
    },
)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Rank:
    """The files that one rank and its supervisor left."""

    rank: int
    outcome: RankOutcome | None
    ended: RankExit | None


def collect(attempt: AttemptDir, spec: TrialSpec, record: Attempt) -> Attempt:
    """Return `record` with its outcome and its cost, once the attempt's job has ended."""
    ranks = [
        _Rank(rank=rank, outcome=_rank_outcome(attempt, rank), ended=_read_exit(attempt, rank))
        for rank in range(spec.plan.ranks)
    ]
    ends = [rank.ended for rank in ranks if rank.ended is not None]
    return replace(
        record,
        outcome=_outcome(attempt, spec, ranks),
        gpu_s=spec.plan.ranks * max((ended.seconds for ended in ends), default=0.0),
        elapsed=_elapsed(attempt, ends),
    )


def _outcome(attempt: AttemptDir, spec: TrialSpec, ranks: Sequence[_Rank]) -> Outcome:
    measured = [rank.outcome for rank in ranks if isinstance(rank.outcome, RankMeasurement)]
    if len(measured) < len(ranks):
        return _root_cause(attempt, ranks)
    found = measurement(spec.plan, spec.model, measured, list(read_lines(attempt.metrics, StepMetrics)))
    return replace(found, spared_steps=_spared_steps(found, spec.measure))


def _root_cause(attempt: AttemptDir, ranks: Sequence[_Rank]) -> Failure:
    """Return the failure that explains those of the other ranks.

    The scheduler's word replaces it where the ranks show only the effects of an end from outside.
    """
    found = [
        (_weight(failure, rank), rank.rank, failure) for rank in ranks if (failure := _failure(attempt, rank))
    ]
    cause = min(found, key=lambda item: item[:2])[2]
    word = _scheduler_word(attempt)
    return _told_by(word, cause) if word and cause.kind in _SUPERSEDED[word.kind] else cause


def _scheduler_word(attempt: AttemptDir) -> SchedulerWord | None:
    try:
        return read_document(attempt.scheduler, SchedulerWord)
    except ContractError:
        return None


def _told_by(word: SchedulerWord, cause: Failure) -> Failure:
    said = f"{word.scheduler} ended job {word.job_id}: {word.state}"
    message = f"{said}; {word.detail}" if word.detail else said
    return dataclasses.replace(cause, kind=word.kind, message=message)


def _weight(failure: Failure, rank: _Rank) -> int:
    """Return how far down the chain of causes a rank's failure stands."""
    if rank.outcome is None and rank.ended is not None and failure.kind is FailureKind.CRASHED:
        return _ABORTED if rank.ended.returncode == -signal.SIGABRT else _KILLED
    return _CAUSES.get(failure.kind, 0)


def measurement(
    plan: Plan, model: ModelShape, ranks: Sequence[RankMeasurement], steps: Sequence[StepMetrics]
) -> Measurement:
    """Combine the measurements of all ranks.

    A step ends when all ranks have ended it; memory is that of the fullest rank.
    """
    first = min(ranks, key=lambda rank: rank.rank)
    steps_s = _steps_s(plan, ranks)
    step_s = statistics.median(steps_s)
    lower, _, upper = statistics.quantiles(steps_s, n=4) if len(steps_s) > 1 else (step_s,) * 3
    tokens_per_s = plan.tokens_per_step / step_s
    return Measurement(
        tokens_per_s=tokens_per_s,
        tokens_per_s_per_gpu=tokens_per_s / plan.ranks,
        samples_per_s=plan.global_batch / step_s,
        step_s=step_s,
        step_s_iqr=upper - lower,
        steps=len(steps_s),
        peak_bytes=max(rank.peak.allocated_bytes for rank in ranks),
        reserved_bytes=max(rank.peak.reserved_bytes for rank in ranks),
        memory_kind=first.memory_kind,
        mfu=_mfu(plan, model, first, tokens_per_s),
        loss=statistics.fmean(step.loss for step in steps[-LOSS_STEPS:]) if steps else float("nan"),
        tokens=steps[-1].tokens if steps else 0,
        startup_s=max(rank.startup_s for rank in ranks),
        ranks=tuple(ranks),
        host_peak_bytes=_host_peak_bytes(ranks),
        bubble=_bubble(plan, ranks),
        tensor_volume_bytes=tensor_volume_bytes(plan, model),
        ended=first.ended,
        relative_error=_relative_error(steps_s, first.step_s_half_width),
    )


def _relative_error(steps_s: Sequence[float], half_width_s: float | None) -> float | None:
    return None if half_width_s is None else half_width_s / statistics.fmean(steps_s)


def _spared_steps(found: Measurement, measure: MeasureSpec) -> int:
    return max(0, measure.steps - found.steps) if found.ended is not TimingEnd.CAP else 0


def _steps_s(plan: Plan, ranks: Sequence[RankMeasurement]) -> Sequence[float]:
    """Return the timed steps.

    Without a pipeline they are those of rank 0, since each step ends with all ranks. In a pipeline each is
    that of the rank that ended last.
    """
    if plan.pipeline == 1:
        return min(ranks, key=lambda rank: rank.rank).step_s
    return [max(seconds) for seconds in zip(*(rank.step_s for rank in ranks), strict=True)]


def _bubble(plan: Plan, ranks: Sequence[RankMeasurement]) -> float | None:
    """Return the mean share of its time that a stage waits for others, see Measurement.

    For all stages of one copy of the model, the phase ends when its last stage ends. A stage that ends
    earlier waits in its update, where the stages sum their gradients' norms, so its exchange holds only part
    of its wait.
    """
    copies: defaultdict[int, list[StepSplit]] = defaultdict(list)
    for rank in ranks:
        if rank.split is not None:
            copies[plan.coordinates(rank.rank).data].append(rank.split)
    if plan.pipeline == 1 or not copies:
        return None
    waiting: list[float] = []
    for splits in copies.values():
        phase_s = max(split.forward_s + split.backward_s + split.exchange_s for split in splits)
        waiting += (1 - (split.forward_s + split.backward_s) / phase_s for split in splits)
    return statistics.fmean(waiting)


def _host_peak_bytes(ranks: Sequence[RankMeasurement]) -> int:
    """Return the largest sum over one host's ranks, which share its memory.

    It is an upper bound, since the ranks need not peak together.
    """
    per_host: Counter[str] = Counter()
    for rank in ranks:
        per_host[rank.host] += rank.host_peak_bytes
    return max(per_host.values())


def _elapsed(attempt: AttemptDir, ends: Sequence[RankExit]) -> Elapsed:
    """Return where the attempt's time went, as far as its files tell.

    The queue time is the difference of two hosts' clocks.
    """
    starts = [ended.startup_s for ended in ends if ended.startup_s is not None]
    total_s = max((ended.seconds for ended in ends), default=None)
    startup_s = max(starts, default=total_s)
    return Elapsed(
        queue_s=_queue_s(attempt),
        startup_s=startup_s,
        run_s=None if total_s is None or startup_s is None else max(0.0, total_s - startup_s),
    )


def _queue_s(attempt: AttemptDir) -> float | None:
    try:
        submission = read_document(attempt.submission, Submission)
        job = read_document(attempt.job, JobRecord)
    except ContractError:
        return None
    return max(0.0, job.started_at - submission.submitted_at) if submission and job else None


def _mfu(plan: Plan, model: ModelShape, rank: RankMeasurement, tokens_per_s: float) -> float | None:
    if rank.peak_flops_per_s is None:
        return None
    return tokens_per_s * flops_per_token(model, plan.seq_len) / (plan.ranks * rank.peak_flops_per_s)


def _rank_outcome(attempt: AttemptDir, rank: int) -> RankOutcome | None:
    try:
        text = attempt.outcome(rank).read_text(encoding="utf-8")
        outcome: RankOutcome = load(_RANK_OUTCOME, text)
        return outcome
    except (FileNotFoundError, ContractError):
        return None


_SIGNALS = {int(number) for number in signal.Signals}  # real-time signals have no names
_RANK_OUTCOME: Any = RankOutcome  # a union, which `type[T]` does not accept


def _failure(attempt: AttemptDir, rank: _Rank) -> Failure | None:
    """Return how a rank failed; None if it did not."""
    if isinstance(rank.outcome, RankMeasurement):
        return None
    if isinstance(rank.outcome, Failure):
        return rank.outcome
    if rank.ended is None:
        return Failure(
            kind=FailureKind.NODE_LOST,
            message=f"rank {rank.rank} and its supervisor disappeared",
            rank=rank.rank,
            evidence=_log_tail(attempt, rank.rank) or _launcher_tail(attempt),
        )
    return _from_exit(attempt, rank.ended)


def _read_exit(attempt: AttemptDir, rank: int) -> RankExit | None:
    try:
        return read_document(attempt.exit(rank), RankExit)
    except ContractError:
        return None


def _from_exit(attempt: AttemptDir, ended: RankExit) -> Failure:
    """Return the failure of a rank that left no outcome, by how its process ended."""
    kind, message = _explain(ended)
    stacks = attempt.stacks(ended.rank)
    evidence = stacks.read_text(errors="replace") if stacks.exists() else ""
    return Failure(
        kind=kind,
        message=f"rank {ended.rank} {message}",
        rank=ended.rank,
        phase=ended.phase,
        evidence=evidence or _log_tail(attempt, ended.rank),
    )


def _explain(ended: RankExit) -> tuple[FailureKind, str]:
    where = f" in phase {ended.phase}" if ended.phase else " before its first heartbeat"
    if ended.reason is ExitReason.HUNG:
        return FailureKind.HUNG, f"made no progress for {ended.silent_s:.0f} s{where}"
    if ended.reason is ExitReason.TIMED_OUT:
        return FailureKind.TIMED_OUT, f"was still running after {ended.seconds:.0f} s{where}"
    if ended.reason is not ExitReason.EXITED:
        return _BY_REASON[ended.reason], f"was stopped ({ended.reason}){where}"
    if ended.returncode >= 0:
        return FailureKind.CRASHED, f"exited with status {ended.returncode} without an outcome{where}"
    name = (
        signal.Signals(-ended.returncode).name
        if -ended.returncode in _SIGNALS
        else f"signal {-ended.returncode}"
    )
    if -ended.returncode == signal.SIGKILL and ended.oom_kills > 0:
        return FailureKind.HOST_OOM, f"was killed by the kernel because host memory ran out{where}"
    return FailureKind.CRASHED, f"was killed by {name}{where}"


def _log_tail(attempt: AttemptDir, rank: int) -> str:
    log = attempt.log(rank)
    if not log.exists():
        return ""
    return "\n".join(log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:])


def _launcher_tail(attempt: AttemptDir) -> str:
    """Return the end of submitit's logs, for a job in which not even a supervisor started."""
    logs = sorted(attempt.submitit.glob("*.log")) + sorted(attempt.submitit.glob("*.out"))
    lines = [line for log in logs for line in log.read_text(errors="replace").splitlines()]
    return "\n".join(lines[-LOG_TAIL_LINES:])
