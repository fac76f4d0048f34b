"""What submitit runs for each rank: a small process without torch that starts the rank and watches it.

It records how the rank ended, which nobody else could: submitit drops exit codes, a killed rank writes
nothing, and a rank stuck inside a collective runs no Python.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import submitit

from sweeps.cluster.processes import adopt_orphans, die_with_parent, end_descendants, start_ticks
from train_entry.contract import (
    AttemptDir,
    ContractError,
    ExitReason,
    Heartbeat,
    JobRecord,
    Phase,
    RankExit,
    RankMeasurement,
    TimeLimits,
    TrialSpec,
    delete_abandoned_scratch,
    dump,
    read_document,
    write_atomic,
)

POLL_S = 0.1
PEER_GRACE_S = 3.0  # for a rank to record its own failure after a peer has failed
LEAVING_S = 10.0  # for a rank to end after its outcome; taking down a process group can hang
STACKS_S = 1.0  # for a silent rank to write its stacks before it is killed
MAX_GPU_THREADS = 8  # beyond that host threads no longer help a rank that computes on a GPU


def supervise(attempt_path: str) -> None:
    """Run one rank of an attempt to its end, write how it ended, and leave nothing of it behind."""
    die_with_parent()
    adopt_orphans()
    environment = submitit.JobEnvironment()
    attempt = AttemptDir(Path(attempt_path))
    spec = read_document(attempt.spec, TrialSpec)
    if spec is None:
        raise SystemExit(f"{attempt.spec} is missing")
    if environment.global_rank == 0:
        write_atomic(attempt.job, dump(job_record(environment.job_id, os.getsid(0))))
    watch = _Watch(attempt, spec, environment.global_rank)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, watch.cancel)
    write_atomic(attempt.exit(environment.global_rank), dump(watch.run(environment.local_rank)))
    end_descendants()
    if nvme_path := spec.plan.offload.nvme_path:  # a rank that was killed, as a silent one is, could not
        delete_abandoned_scratch(Path(nvme_path))


def job_record(job_id: str, leader: int) -> JobRecord:
    """How a job can be found again: by the leader of its session on this host."""
    return JobRecord(
        job_id=job_id,
        host=socket.gethostname(),
        leader_pid=leader,
        leader_start_ticks=start_ticks(leader) or 0,
        started_at=time.time(),
    )


def rank_environment(attempt: AttemptDir, spec: TrialSpec, rank: int, local_rank: int) -> dict[str, str]:
    """The environment of a rank: its place, its threads, and where it meets its peers."""
    ranks = spec.plan.ranks
    threads = 1 if spec.device == "cpu" else min(MAX_GPU_THREADS, max(1, (os.cpu_count() or 1) // ranks))
    return {
        **os.environ,
        "PYTHONUNBUFFERED": "1",
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(ranks),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
        # A file, not a port: two trials of one machine cannot clash, and none has to be free.
        "SHARDSWEEP_RENDEZVOUS": attempt.rendezvous.resolve().as_uri(),
        "HF_HUB_OFFLINE": "1",
        "SHARDSWEEP_SUPERVISOR": str(os.getpid()),  # the rank ends with it
    }


@dataclass
class _Watch:
    """One rank's process and what is known of its progress."""

    attempt: AttemptDir
    spec: TrialSpec
    rank: int
    started: float = field(default_factory=time.monotonic)
    moved: float = field(default_factory=time.monotonic)  # when the heartbeat last changed
    counter: int = -1
    phase: Phase | None = None
    cancelled: bool = False
    peer_failed_at: float | None = None
    told_at: float | None = None  # when its outcome was there

    def cancel(self, _signal: int, _frame: FrameType | None) -> None:
        self.cancelled = True

    def run(self, local_rank: int) -> RankExit:
        kills = _kernel_oom_kills()
        with self.attempt.log(self.rank).open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "train_entry", str(self.attempt.path)],
                env=rank_environment(self.attempt, self.spec, self.rank, local_rank),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.attempt.path,
                process_group=0,
            )
            reason = self._wait(process)
        return RankExit(
            rank=self.rank,
            returncode=process.returncode,
            reason=reason,
            phase=self.phase,
            silent_s=time.monotonic() - self.moved,
            seconds=time.monotonic() - self.started,
            oom_kills=_kernel_oom_kills() - kills,
        )

    def _wait(self, process: subprocess.Popen[bytes]) -> ExitReason:
        while process.poll() is None:
            self._read_heartbeat()
            if reason := self._reason_to_end():
                self._end(process, reason)
                return reason
            time.sleep(POLL_S)
        return ExitReason.EXITED

    def _reason_to_end(self) -> ExitReason | None:
        if self.cancelled:
            return ExitReason.CANCELLED
        if self.attempt.outcome(self.rank).exists():  # it has said all it had to say
            self.told_at = self.told_at or time.monotonic()
            return ExitReason.EXITED if time.monotonic() - self.told_at > LEAVING_S else None
        if self._peer_is_lost():
            return ExitReason.PEER_LOST
        if time.monotonic() - self.moved > self._patience_s(self.spec.limits):
            return ExitReason.HUNG
        if time.monotonic() - self.started > self.spec.limits.attempt_s:
            return ExitReason.TIMED_OUT
        return None

    def _patience_s(self, limits: TimeLimits) -> float:
        in_startup = self.phase is None or self.phase.is_startup
        return limits.startup_silence_s if in_startup else limits.step_silence_s

    def _peer_is_lost(self) -> bool:
        """Whether another rank failed so long ago that this one had time to say what it saw."""
        if self.peer_failed_at is None and any(self._failed(peer) for peer in range(self.spec.plan.ranks)):
            self.peer_failed_at = time.monotonic()
        return self.peer_failed_at is not None and time.monotonic() - self.peer_failed_at > PEER_GRACE_S

    def _failed(self, peer: int) -> bool:
        if peer == self.rank or not self.attempt.exit(peer).exists():
            return False
        return not _has_measured(self.attempt.outcome(peer))

    def _read_heartbeat(self) -> None:
        try:
            beat = read_document(self.attempt.heartbeat(self.rank), Heartbeat)
        except ContractError:
            return
        if beat is not None and beat.counter != self.counter:
            self.counter, self.phase, self.moved = beat.counter, beat.phase, time.monotonic()

    def _end(self, process: subprocess.Popen[bytes], reason: ExitReason) -> None:
        if reason in (ExitReason.HUNG, ExitReason.TIMED_OUT) and self.phase is not None:
            process.send_signal(
                signal.SIGUSR1
            )  # faulthandler writes the stacks, also from inside a collective
            time.sleep(STACKS_S)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _has_measured(outcome: Path) -> bool:
    try:
        return read_document(outcome, RankMeasurement) is not None
    except ContractError:  # a failure
        return False


def _kernel_oom_kills() -> int:
    """Processes killed by the kernel for want of memory since boot (0 where it does not count them)."""
    for line in Path("/proc/vmstat").read_text().splitlines():
        name, _, count = line.partition(" ")
        if name == "oom_kill":
            return int(count)
    return 0
