"""A hostfile's hosts as a cluster: trials lease their slots, and DeepSpeed's launcher starts each trial."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sweeps.cluster.base import JobHandle, JobState
from sweeps.cluster.hostfile.hosts import Hosts, lay_out
from sweeps.cluster.hostfile.over_ssh import Launch, LaunchRecord, end_nodes
from sweeps.cluster.node.exits import rank_exits
from sweeps.cluster.node.leases import LeasePool, Slot, default_directory
from sweeps.cluster.node.operators import SOURCE, SOURCE_CPU, TORCH, cpu_signature
from sweeps.cluster.node.processes import end_session, is_alive, start_ticks
from sweeps.cluster.node.rendezvous import INTERFACE, PORTS, parse_ports
from sweeps.cluster.node.supervisor import job_record
from sweeps.config.schema import ClusterConfig
from sweeps.errors import SweepError
from sweeps.machine import Machine
from sweeps.paths import ROOT
from train_entry.contract import (
    AttemptDir,
    ContractError,
    Submission,
    TrialSpec,
    dump,
    read_document,
    write_atomic,
)

NAME = "hostfile"
FILES_S = 10.0  # for files of other hosts to become visible here after the trial has ended
ENDING_S = 10.0  # for a launcher to end after all its ranks have
CANCEL_S = 15.0  # for a launcher to end its nodes; longer than each node takes
# Variables that DeepSpeed's runner exports (EXPORT_ENVS and NCCL), and others that change a run. No
# MLFLOW_*: ranks record nothing there, and one of them may be a password.
EXPORTED = ("PYTHON", "NCCL", "UCX", "MV2", "GLOO_", "TORCH_", "CUDA_DEVICE_ORDER", "OMP_", "HF_HOME")
OWN = ("SHARDSWEEP_STATE_DIR",)
SECRET = ("TOKEN", "SECRET", "PASSWORD", "KEY")
ENVIRONMENT_FILE = ".deepspeed_env"  # the user's, in the home or working directory: NAME=VALUE lines


@dataclass(frozen=True, kw_only=True, slots=True)
class HostSite:
    """The settings that all trials of a study share."""

    cluster: ClusterConfig
    hosts: Hosts


class HostfileCluster:
    """The hosts of a hostfile. They run at most `parallel` trials at once."""

    def __init__(self, site: HostSite, machine: Machine, parallel: int, state: Path | None = None) -> None:
        self.machine = machine
        self._site = site
        self._parallel = parallel
        directory = (state or default_directory()) / "hosts"
        self._pools = {
            host: LeasePool(_slots(machine.ranks_per_node), directory / host) for host in site.hosts.slots
        }
        self._active: dict[Path, JobHandle] = {}
        self._launchers: dict[Path, subprocess.Popen[bytes]] = {}
        self._gone_since: dict[Path, float] = {}

    def free_ranks(self) -> int:
        if len(self._active) >= self._parallel:
            return 0
        free = self._free()
        whole = sum(count for count in free.values() if count == self.machine.ranks_per_node)
        return max([whole, *free.values()])

    def reserve(self, ranks: int) -> tuple[str, ...] | None:
        layout = lay_out(self._free(), ranks, self.machine.ranks_per_node)
        if layout is None or len(self._active) >= self._parallel:
            return None
        taken: list[str] = []
        for host, count in layout.items():
            slots = self._pools[host].acquire(count, os.getpid())
            if slots is None:  # another study was faster
                self._release(tuple(taken), None)
                return None
            taken += [f"{host}/{slot}" for slot in slots]
        return tuple(taken)

    def has_neighbours(self, slots: tuple[str, ...]) -> bool:
        """True if other studies' trials run beside these slots, as far as this machine started them."""
        ours = _by_host((*slots, *(slot for job in self._active.values() for slot in job.slots)))
        return any(
            self._pools[host].has_others(ours[host]) for host in _by_host(slots) if host in self._pools
        )

    def submit(self, attempt: AttemptDir, spec: TrialSpec, slots: tuple[str, ...]) -> JobHandle:
        launch = Launch(
            attempt=str(attempt.path.resolve()),
            ssh=self._site.hosts.ssh,
            slots={host: tuple(map(int, names)) for host, names in _by_host(slots).items()},
            master_port=random.choice(parse_ports(self._site.cluster.ports)),
            environment=exported(self._site.cluster, self.machine.device, os.environ),
        )
        process = _start(attempt, launch)
        leader = job_record(str(process.pid), process.pid)
        record = LaunchRecord(leader=leader, ssh=launch.ssh, hosts=tuple(launch.slots))
        write_atomic(attempt.launcher, dump(record))
        submission = Submission(cluster=NAME, job_id=str(process.pid), submitted_at=time.time())
        write_atomic(attempt.submission, dump(submission))
        self._send(process, launch)
        self._hand_over(slots, process.pid)
        self._launchers[attempt.path] = process
        return self._take(attempt, spec.plan.ranks, slots)

    def attach(self, attempt: AttemptDir, ranks: int, slots: tuple[str, ...]) -> JobHandle:
        if (record := launcher_of(attempt)) and _lives(record):
            self._hand_over(slots, record.leader.leader_pid)
        return self._take(attempt, ranks, slots)

    def poll(self, handle: JobHandle) -> JobState:
        state = self._state(handle)
        if state in (JobState.ENDED, JobState.LOST):
            self._finish(handle, ENDING_S if state is JobState.ENDED else 0)
        return state

    def cancel(self, *handles: JobHandle) -> list[str]:
        for handle in handles:
            self._finish(handle, 0)
        return []

    # ------------------------------------------------------------------ states

    def _state(self, handle: JobHandle) -> JobState:
        is_alive = self._is_alive(handle)  # checked first: ranks write their exits before it ends
        if len(rank_exits(handle.attempt, handle.ranks)) == handle.ranks:
            return JobState.ENDED
        if is_alive:
            return JobState.RUNNING if handle.attempt.job.exists() else JobState.STARTING
        gone_s = time.monotonic() - self._gone_since.setdefault(handle.attempt.path, time.monotonic())
        return JobState.LOST if gone_s > FILES_S else JobState.RUNNING

    def _is_alive(self, handle: JobHandle) -> bool:
        if process := self._launchers.get(handle.attempt.path):
            return process.poll() is None
        record = launcher_of(handle.attempt)
        return record is not None and _lives(record)

    def _finish(self, handle: JobHandle, patience_s: float) -> None:
        """Wait for the trial's processes, kill those that do not end, on every host; give its slots back."""
        if handle.attempt.path not in self._active:
            return
        process = self._launchers.pop(handle.attempt.path, None)
        in_order = False
        if process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                in_order = process.wait(timeout=patience_s) == 0 and patience_s > 0
        if not in_order:
            _end_attempt(handle.attempt)
        if process is not None:
            process.wait()
        del self._active[handle.attempt.path]
        self._gone_since.pop(handle.attempt.path, None)
        record = launcher_of(handle.attempt)
        self._release(handle.slots, record.leader.leader_pid if record else None)

    # ------------------------------------------------------------------ slots

    def _free(self) -> dict[str, int]:
        return {host: pool.free() for host, pool in self._pools.items()}

    def _take(self, attempt: AttemptDir, ranks: int, slots: tuple[str, ...]) -> JobHandle:
        handle = JobHandle(attempt=attempt, ranks=ranks, slots=slots, submitted_at=time.monotonic())
        self._active[attempt.path] = handle
        return handle

    def _hand_over(self, slots: tuple[str, ...], owner: int) -> None:
        for host, names in _by_host(slots).items():
            if host in self._pools:
                self._pools[host].hand_over(names, owner)

    def _release(self, slots: tuple[str, ...], leader: int | None) -> None:
        for host, names in _by_host(slots).items():
            if host in self._pools:  # the host may have left the hostfile between two starts
                self._pools[host].release(names, owners=(os.getpid(), leader))

    @staticmethod
    def _send(process: subprocess.Popen[bytes], launch: Launch) -> None:
        """Send the launcher its order. Until then it starts no rank, so each rank's launcher is on record."""
        assert process.stdin is not None
        process.stdin.write(dump(launch, indent=None).encode() + b"\n")
        process.stdin.close()


def _start(attempt: AttemptDir, launch: Launch) -> subprocess.Popen[bytes]:
    attempt.submitit.mkdir(parents=True, exist_ok=True)
    with (attempt.submitit / "launcher.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "sweeps.cluster.hostfile.over_ssh"],
            env={**os.environ, "PYTHONPATH": _python_path(os.environ)},
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def exported(cluster: ClusterConfig, device: str, environ: Mapping[str, str]) -> dict[str, str]:
    """The ranks' environment besides their host's own. No secrets, except those in the user's file."""
    kept = {
        name: value
        for name, value in environ.items()
        if (name.startswith(EXPORTED) or name in OWN) and not any(word in name for word in SECRET)
    }
    for folder in (Path.home(), Path.cwd()):
        kept |= _listed(folder / environ.get("DS_ENV_FILE", ENVIRONMENT_FILE))
    kept |= {
        "PYTHONPATH": _python_path(environ),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "DS_ACCELERATOR": device,
        PORTS: cluster.ports,
        # Each host loads operators from its own copy: a rank killed there locks them for no other host.
        SOURCE: environ.get(TORCH, str(Path(sys.prefix) / "torch_extensions")),
        SOURCE_CPU: cpu_signature(),
    }
    return kept | ({INTERFACE: cluster.interface} if cluster.interface else {})


def _listed(path: Path) -> dict[str, str]:
    if not path.is_file():
        return {}
    pairs = (line.partition("=") for line in path.read_text(encoding="utf-8").splitlines())
    return {name.strip(): value.strip() for name, equals, value in pairs if equals}


def _python_path(environ: Mapping[str, str]) -> str:
    return os.pathsep.join(filter(None, [str(ROOT), environ.get("PYTHONPATH")]))


def _slots(count: int) -> list[Slot]:
    return [Slot(name=str(index), kind="slot") for index in range(count)]


def _by_host(slots: tuple[str, ...]) -> dict[str, list[str]]:
    """Split slots `HOST/INDEX` by host, in the order in which ranks take them."""
    found: dict[str, list[str]] = {}
    for slot in slots:
        host, _, index = slot.rpartition("/")
        found.setdefault(host, []).append(index)
    return found


def launcher_of(attempt: AttemptDir) -> LaunchRecord | None:
    try:
        return read_document(attempt.launcher, LaunchRecord)
    except ContractError:
        return None


def _lives(record: LaunchRecord) -> bool:
    leader = record.leader
    return leader.host == socket.gethostname() and is_alive(leader.leader_pid, leader.leader_start_ticks)


def cancel_attempt(attempt: AttemptDir) -> None:
    """End all processes of an attempt, whoever launched it. Raises SweepError if a host does not answer."""
    if silent := _end_attempt(attempt):
        raise SweepError(f"{attempt.path}: {', '.join(silent)} cannot be reached; cancel it again later")


def _end_attempt(attempt: AttemptDir) -> list[str]:
    """End the attempt's launcher, then what it left on any host. Return the hosts that do not answer."""
    record = launcher_of(attempt)
    if record is None:
        return []
    leader = record.leader
    if leader.host == socket.gethostname() and start_ticks(leader.leader_pid) in (
        None,
        leader.leader_start_ticks,
    ):
        end_session(leader.leader_pid, CANCEL_S)
    return end_nodes(attempt, record)
