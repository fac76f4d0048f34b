"""Start a rank and watch it: the small process without torch that a launcher runs for each rank.

submitit calls `supervise`; DeepSpeed's launcher, torchrun and srun start
`python -m sweeps.cluster.node.supervisor ATTEMPT_DIR`. The supervisor records how the rank ended, which no
other process could: launchers drop exit codes, a killed rank writes nothing, and a rank stuck inside a
collective runs no Python.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import submitit

from sweeps.cluster.node.operators import local_ops
from sweeps.cluster.node.processes import adopt_orphans, die_with_parent, end_descendants, start_ticks
from sweeps.cluster.node.rendezvous import RankPlace, RendezvousError, meeting
from train_entry.contract import (
    AttemptDir,
    ContractError,
    ExitReason,
    Failure,
    FailureKind,
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
LEAVING_S = 10.0  # for a rank to end after it wrote its outcome; destroying a process group can hang
STACKS_S = 1.0  # for a silent rank to write its stacks before it is killed
# Ctrl-C; a scheduler that cancels the job or takes its nodes back; submitit's warning that time runs out.
CANCELLING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2)
PEERS_LOOK_S = 0.5  # between two looks at peers' files: each look is a request to the file system
MAX_GPU_THREADS = 8  # beyond that host threads no longer help a rank that computes on a GPU


def supervise(attempt_path: str) -> None:
    """Supervise one rank. submitit calls this in each task of a job."""
    environment = submitit.JobEnvironment()
    place = RankPlace(
        rank=environment.global_rank,
        local_rank=environment.local_rank,
        ranks=environment.num_tasks,
        nodes=environment.num_nodes,
        job_id=environment.job_id,
    )
    supervise_rank(AttemptDir(Path(attempt_path)), place)


def supervise_rank(attempt: AttemptDir, place: RankPlace) -> None:
    """Run one rank of an attempt to its end, write how it ended, and leave nothing of it behind."""
    die_with_parent()
    adopt_orphans()
    spec = read_document(attempt.spec, TrialSpec)
    if spec is None:
        raise SystemExit(f"{attempt.spec} is missing")
    if place.rank == 0:
        write_atomic(attempt.job, dump(job_record(place.job_id, os.getsid(0))))
    watch = _Watch(attempt, spec, place.rank)
    for number in CANCELLING:
        signal.signal(number, watch.cancel)
    write_atomic(attempt.exit(place.rank), dump(_run(watch, place)))
    end_descendants()
    if nvme_path := spec.plan.offload.nvme_path:  # a killed rank could not delete its own
        delete_abandoned_scratch(Path(nvme_path))


def _run(watch: _Watch, place: RankPlace) -> RankExit:
    """Run the rank and return its exit. If the ranks cannot meet, write that as its outcome instead."""
    try:
        with local_ops(os.environ, watch.note) as ops, meeting(watch.attempt, place, os.environ) as meet:
            return watch.run(rank_environment(watch.spec, place, {**ops, **meet}))
    except RendezvousError as error:
        failure = Failure(kind=FailureKind.COMMS, message=str(error), rank=place.rank, phase=Phase.RENDEZVOUS)
        write_atomic(watch.attempt.outcome(place.rank), dump(failure))
        return watch.exit(returncode=1, reason=ExitReason.EXITED)


def job_record(job_id: str, leader: int) -> JobRecord:
    """The record by which a job is found again: the leader of its session on this host."""
    return JobRecord(
        job_id=job_id,
        host=socket.gethostname(),
        leader_pid=leader,
        leader_start_ticks=start_ticks(leader) or 0,
        started_at=time.time(),
    )


def rank_environment(spec: TrialSpec, place: RankPlace, meet: Mapping[str, str]) -> dict[str, str]:
    """The environment of a rank: its place, its threads, and where it meets its peers."""
    threads = 1 if spec.device == "cpu" else min(MAX_GPU_THREADS, _cores(place))
    return {
        **os.environ,
        "PYTHONUNBUFFERED": "1",
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.local_rank),
        "WORLD_SIZE": str(place.ranks),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(threads)),
        **meet,
        "HF_HUB_OFFLINE": "1",
        "SHARDSWEEP_SUPERVISOR": str(os.getpid()),  # the rank ends with it
    }


def _cores(place: RankPlace) -> int:
    """The number of cores of one rank: as Slurm says, which may have bound the task to them already."""
    given = os.environ.get("SLURM_CPUS_PER_TASK", "")
    return int(given) if given.isdigit() else max(1, len(os.sched_getaffinity(0)) // place.ranks_here)


@dataclass
class _Watch:
    """One rank's process, and what we know of its progress."""

    attempt: AttemptDir
    spec: TrialSpec
    rank: int
    started: float = field(default_factory=time.monotonic)
    moved: float = field(default_factory=time.monotonic)  # when the heartbeat last changed
    counter: int = -1
    phase: Phase | None = None
    cancelled: bool = False
    peer_failed_at: float | None = None
    told_at: float | None = None  # when we first saw its outcome
    ready_at: float | None = None  # when its start-up ended
    peers_seen_at: float = 0.0
    kills: int = field(default_factory=lambda: _kernel_oom_kills())

    def cancel(self, _signal: int, _frame: FrameType | None) -> None:
        self.cancelled = True

    def note(self, line: str) -> None:
        """Write a line to the rank's log."""
        with self.attempt.log(self.rank).open("a", encoding="utf-8") as log:
            log.write(f"{line}\n")

    def run(self, environment: Mapping[str, str]) -> RankExit:
        with self.attempt.log(self.rank).open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "train_entry", str(self.attempt.path)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.attempt.path,
                process_group=0,
            )
            reason = self._wait(process)
        return self.exit(process.returncode, reason)

    def exit(self, returncode: int, reason: ExitReason) -> RankExit:
        return RankExit(
            rank=self.rank,
            returncode=returncode,
            reason=reason,
            phase=self.phase,
            silent_s=time.monotonic() - self.moved,
            seconds=time.monotonic() - self.started,
            oom_kills=_kernel_oom_kills() - self.kills,
            startup_s=None if self.ready_at is None else self.ready_at - self.started,
        )

    def _wait(self, process: subprocess.Popen[bytes]) -> ExitReason:
        while process.poll() is None:
            self._read_heartbeat()
            if reason := self._reason_to_end():
                self._end(process, reason)
                return reason
            time.sleep(POLL_S)
        # The sender of our signal may have ended the rank too: srun signals all processes of a task.
        told = self.attempt.outcome(self.rank).exists()
        return ExitReason.CANCELLED if self.cancelled and not told else ExitReason.EXITED

    def _reason_to_end(self) -> ExitReason | None:
        if self.cancelled:
            return ExitReason.CANCELLED
        if self.attempt.outcome(self.rank).exists():  # the rank is done, and only has to end
            self.told_at = self.told_at or time.monotonic()
            return ExitReason.EXITED if time.monotonic() - self.told_at > LEAVING_S else None
        if self._peer_is_lost():
            return ExitReason.PEER_LOST
        if time.monotonic() - self.moved > self._patience_s(self.spec.limits):
            return ExitReason.HUNG
        return ExitReason.TIMED_OUT if self._is_out_of_time(self.spec.limits) else None

    def _is_out_of_time(self, limits: TimeLimits) -> bool:
        """True if start-up, which may compile operators, or the run after it exceeds its own limit."""
        if self.ready_at is None:
            return time.monotonic() - self.started > limits.startup_s
        return time.monotonic() - self.ready_at > limits.attempt_s

    def _patience_s(self, limits: TimeLimits) -> float:
        in_startup = self.phase is None or self.phase.is_startup
        return limits.startup_silence_s if in_startup else limits.step_silence_s

    def _peer_is_lost(self) -> bool:
        """True if a peer failed, and this rank has had time since to record what it saw."""
        now = time.monotonic()
        if self.peer_failed_at is None and now - self.peers_seen_at > PEERS_LOOK_S:
            self.peers_seen_at = now
            if self._has_failed_peer():
                self.peer_failed_at = now
        return self.peer_failed_at is not None and now - self.peer_failed_at > PEER_GRACE_S

    def _has_failed_peer(self) -> bool:
        # One listing instead of a look for each peer: hundreds of ranks may do this on a shared file system.
        # NFS also caches that a file was missing, but always opens a directory afresh.
        there = set(os.listdir(self.attempt.path))
        peers = set(range(self.spec.plan.ranks)) - {self.rank}
        ended = [peer for peer in peers if self.attempt.exit(peer).name in there]
        return any(not _has_measured(self.attempt.outcome(peer)) for peer in ended)

    def _read_heartbeat(self) -> None:
        try:
            beat = read_document(self.attempt.heartbeat(self.rank), Heartbeat)
        except ContractError:
            return
        if beat is not None and beat.counter != self.counter:
            self.counter, self.phase, self.moved = beat.counter, beat.phase, time.monotonic()
            if not beat.phase.is_startup:
                self.ready_at = self.ready_at or self.moved

    def _end(self, process: subprocess.Popen[bytes], reason: ExitReason) -> None:
        if reason in (ExitReason.HUNG, ExitReason.TIMED_OUT) and self.phase is not None:
            # faulthandler writes the stacks, even from inside a collective.
            process.send_signal(signal.SIGUSR1)
            time.sleep(STACKS_S)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _has_measured(outcome: Path) -> bool:
    try:
        return read_document(outcome, RankMeasurement) is not None
    except ContractError:  # a failure
        return False


def _kernel_oom_kills() -> int:
    """The number of processes that the kernel killed for lack of memory since boot (0 if not counted)."""
    for line in Path("/proc/vmstat").read_text().splitlines():
        name, _, count = line.partition(" ")
        if name == "oom_kill":
            return int(count)
    return 0


def main(arguments: Sequence[str]) -> int:
    """Supervise one rank under a launcher other than submitit."""
    if len(arguments) != 1:
        print("usage: python -m sweeps.cluster.node.supervisor ATTEMPT_DIR", file=sys.stderr)
        return 2
    try:
        place = RankPlace.from_env(os.environ)
    except RendezvousError as error:
        print(error, file=sys.stderr)
        return 2
    supervise_rank(AttemptDir(Path(arguments[0])), place)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
