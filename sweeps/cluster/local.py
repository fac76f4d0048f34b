"""This machine as a cluster, through submitit: one task per rank, leased slots, jobs that outlive us."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from submitit.local.local import LocalExecutor, LocalJob

from sweeps.cluster.base import JobHandle, JobState
from sweeps.cluster.node.environment import is_foreign
from sweeps.cluster.node.leases import LeasePool, Slot, default_directory
from sweeps.cluster.node.processes import end_session, is_alive, start_ticks
from sweeps.cluster.node.supervisor import job_record, supervise
from sweeps.errors import SweepError
from sweeps.machine import Machine
from sweeps.paths import ROOT
from train_entry.contract import (
    AttemptDir,
    JobRecord,
    TrialSpec,
    dump,
    read_document,
    write_atomic,
)

START_GRACE_S = 60.0  # for a job to report itself: importing submitit on a busy machine takes seconds
ENDING_PATIENCE_S = 10.0  # for a job to reap its ranks after they have ended
CANCEL_PATIENCE_S = 3.0  # for supervisors to write how their ranks ended
SUBMITIT_MARGIN_S = 600.0  # beyond our own limits, which end a job first


class LocalCluster:
    """This host. It runs at most `parallel` trials at once, since neighbours disturb each other's timing."""

    def __init__(self, machine: Machine, parallel: int, state_dir: Path | None = None) -> None:
        self.machine = machine
        self._parallel = parallel
        self._leases = LeasePool(_slots(machine), state_dir or default_directory())
        self._active: dict[Path, JobHandle] = {}
        self._controllers: dict[Path, subprocess.Popen[bytes]] = {}

    def free_ranks(self) -> int:
        return 0 if len(self._active) >= self._parallel else self._leases.free()

    def reserve(self, ranks: int) -> tuple[str, ...] | None:
        if len(self._active) >= self._parallel:
            return None
        return self._leases.acquire(ranks, os.getpid())

    def has_neighbours(self, slots: tuple[str, ...]) -> bool:
        ours = {slot for job in self._active.values() for slot in job.slots}
        return self._leases.has_others(ours | set(slots))

    def submit(self, attempt: AttemptDir, spec: TrialSpec, slots: tuple[str, ...]) -> JobHandle:
        executor = _DetachedExecutor(attempt.submitit, _job_environment(self.machine, slots))
        executor.update_parameters(
            tasks_per_node=spec.plan.ranks,
            timeout_min=(spec.limits.attempt_s + SUBMITIT_MARGIN_S) / 60,
        )
        executor.submit(supervise, str(attempt.path.resolve()))
        controller = executor.controller
        # The job's first act is to write the same record; but it may end before that.
        write_atomic(attempt.job, dump(job_record(str(controller.pid), controller.pid)))
        self._leases.hand_over(slots, controller.pid)
        handle = JobHandle(attempt=attempt, ranks=spec.plan.ranks, slots=slots, submitted_at=time.monotonic())
        self._active[attempt.path] = handle
        self._controllers[attempt.path] = controller
        return handle

    def attach(self, attempt: AttemptDir, ranks: int, slots: tuple[str, ...]) -> JobHandle:
        handle = JobHandle(attempt=attempt, ranks=ranks, slots=slots, submitted_at=time.monotonic())
        self._active[attempt.path] = handle
        record = read_document(attempt.job, JobRecord)
        if record and _is_here(record) and is_alive(record.leader_pid, record.leader_start_ticks):
            self._leases.hand_over(slots, record.leader_pid)  # its orchestrator may have died before it did
        return handle

    def poll(self, handle: JobHandle) -> JobState:
        state = self._state(handle)
        if state in (JobState.ENDED, JobState.LOST):
            self._finish(handle, ENDING_PATIENCE_S if state is JobState.ENDED else 0)
        return state

    def cancel(self, *handles: JobHandle) -> list[str]:
        for handle in handles:
            self._finish(handle, 0)
        return []

    def _state(self, handle: JobHandle) -> JobState:
        alive = self._is_alive(handle)  # checked first: a job writes its files before it ends
        if all(handle.attempt.exit(rank).exists() for rank in range(handle.ranks)):
            return JobState.ENDED
        if alive is None:
            waited_s = time.monotonic() - handle.submitted_at
            return JobState.STARTING if waited_s < START_GRACE_S else JobState.LOST
        return JobState.RUNNING if alive else JobState.LOST

    def _is_alive(self, handle: JobHandle) -> bool | None:
        """Return None if another orchestrator launched the job and it has not recorded its process yet."""
        if controller := self._controllers.get(handle.attempt.path):
            return controller.poll() is None
        record = read_document(handle.attempt.job, JobRecord)
        if record is None:
            return None
        if not _is_here(record):  # we cannot see processes of another host, but know their time limit
            return time.time() < record.started_at + _time_limit_s(handle.attempt) + SUBMITIT_MARGIN_S
        return is_alive(record.leader_pid, record.leader_start_ticks)

    def _finish(self, handle: JobHandle, patience_s: float) -> None:
        """Wait for the job's processes to end, kill those that do not, and give its slots back."""
        if handle.attempt.path not in self._active:
            return
        leader: int | None = None
        if controller := self._controllers.pop(handle.attempt.path, None):
            leader = controller.pid
            with contextlib.suppress(subprocess.TimeoutExpired):
                controller.wait(timeout=patience_s)
            end_session(controller.pid, CANCEL_PATIENCE_S)
            controller.wait()
        else:
            leader = _end_attempt(handle.attempt)
        del self._active[handle.attempt.path]
        self._leases.release(handle.slots, owners=(os.getpid(), leader))


def cancel_attempt(attempt: AttemptDir) -> None:
    """End all processes of an attempt, whoever launched it. Raises SweepError if they run on another host."""
    record = read_document(attempt.job, JobRecord)
    if record is not None and not _is_here(record):
        raise SweepError(f"{attempt.path}: runs on host {record.host}; cancel it there")
    _end_attempt(attempt)


def _end_attempt(attempt: AttemptDir) -> int | None:
    """End the attempt's processes on this host. Return the pid of their session's leader."""
    record = read_document(attempt.job, JobRecord)
    if record is None or not _is_here(record):
        return None
    if start_ticks(record.leader_pid) in (None, record.leader_start_ticks):  # not a reused pid
        end_session(record.leader_pid, CANCEL_PATIENCE_S)
    return record.leader_pid


def _is_here(record: JobRecord) -> bool:
    return record.host == socket.gethostname()


def _time_limit_s(attempt: AttemptDir) -> float:
    spec = read_document(attempt.spec, TrialSpec)
    return spec.limits.attempt_s if spec else 0.0


def _slots(machine: Machine) -> list[Slot]:
    if machine.device == "cuda":
        return [Slot(name=gpu.uuid, kind=gpu.name) for gpu in machine.gpus]
    return [Slot(name=f"core-{index}", kind="CPU") for index in range(machine.ranks_per_node)]


def _job_environment(machine: Machine, slots: tuple[str, ...]) -> dict[str, str]:
    # Leases name GPUs by UUID, jobs by index: DeepSpeed 0.19 cannot read UUIDs in CUDA_VISIBLE_DEVICES.
    indices = {gpu.uuid: str(gpu.index) for gpu in machine.gpus}
    # Variables left over from a launcher or a job that surrounds us would place our ranks in that one.
    environment = {name: value for name, value in os.environ.items() if not is_foreign(name)}
    return environment | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": ",".join(indices[slot] for slot in slots) if machine.device == "cuda" else "",
    }


class _DetachedExecutor(LocalExecutor):  # type: ignore[misc]  # submitit is not followed by mypy
    """submitit's local executor, with its controller in a session of its own.

    The session keeps Ctrl-C and hang-ups of our terminal away from running trials, and identifies all
    processes of a job. Each job gets exactly the GPUs that it leased; submitit would number them from 0. -P
    keeps Python from importing a directory called `sweeps` in the user's working directory instead of ours.
    """

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        super().__init__(folder, python=f"{sys.executable} -P")
        self._environment = environment
        self.controller: subprocess.Popen[bytes]

    def _submit_command(self, command: str) -> LocalJob[Any]:
        tasks = self.parameters["tasks_per_node"]
        environment = self._environment | {
            "SUBMITIT_LOCAL_NTASKS": str(tasks),
            "SUBMITIT_LOCAL_COMMAND": command,
            "SUBMITIT_LOCAL_TIMEOUT_S": str(int(60 * self.parameters["timeout_min"])),
            "SUBMITIT_LOCAL_SIGNAL_DELAY_S": "30",
            "SUBMITIT_LOCAL_NODEID": "0",
            "SUBMITIT_LOCAL_JOB_NUM_NODES": "1",
            "SUBMITIT_STDERR_TO_STDOUT": "1",
            "SUBMITIT_EXECUTOR": "local",
            "SUBMITIT_LOCAL_WITH_SHELL": "",
        }
        with (self.folder / "controller.log").open("ab") as log:
            self.controller = subprocess.Popen(
                [sys.executable, "-P", "-m", "submitit.local._local", str(self.folder)],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return LocalJob(folder=self.folder, job_id=str(self.controller.pid), tasks=list(range(tasks)))
