"""Run a trial on hosts of a hostfile: start DeepSpeed's launcher on each host over ssh, and watch it.

The `deepspeed` command itself needs pdsh, passes the environment on as shell text, and leaves its ranks
behind when it dies. This process replaces it. Each trial has its own, in a session of its own, so that the
trial outlives the orchestrator. When it dies, its ssh connections end, and with them the ranks.
"""

from __future__ import annotations

import base64
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from sweeps.cluster.hostfile.hosts import address_of
from sweeps.cluster.hostfile.on_host import End, Run
from sweeps.cluster.node.rendezvous import ADDRESS
from sweeps.cluster.node.steps import Part, RunningPart, Step
from sweeps.paths import ROOT
from train_entry.contract import (
    AttemptDir,
    FailureKind,
    JobRecord,
    SchedulerWord,
    dump,
    load,
    write_atomic,
)

POLL_S = 0.2
PEERS_S = 15.0  # for the other nodes' supervisors to notice a node that ended without a record
ENDING_S = 10.0  # for a node to end its ranks before its connection is cut
ANSWER_S = 60.0  # for a host to say that it has ended them
LOST_CONNECTION = 255  # ssh's own status: it could not connect, or the connection broke


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """The order to this process: one line of JSON on its standard input, which no other user can read."""

    attempt: str
    ssh: tuple[str, ...]
    slots: Mapping[str, tuple[int, ...]]  # by host, in the order of ranks
    master_port: int
    environment: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchRecord:
    """launcher.json: this process, and what it takes to reach its nodes without it."""

    leader: JobRecord
    ssh: tuple[str, ...]
    hosts: tuple[str, ...]


def on_host(ssh: Sequence[str], host: str, what: str) -> list[str]:
    """The command that starts `on_host` on a host. A login shell parses it there, so its words are quoted."""
    remote = [
        "env",
        f"PYTHONPATH={ROOT}",
        sys.executable,
        "-P",
        "-u",
        "-m",
        "sweeps.cluster.hostfile.on_host",
        what,
    ]
    return [*ssh, "--", host, shlex.join(remote)]


def launcher_command(launch: Launch, node: int) -> tuple[str, ...]:
    """The command of DeepSpeed's launcher on one node, which starts our supervisor for each rank."""
    slots = {host: list(ids) for host, ids in launch.slots.items()}
    world = base64.urlsafe_b64encode(json.dumps(slots).encode()).decode()
    return (
        *(sys.executable, "-P", "-u", "-m", "deepspeed.launcher.launch"),
        f"--world_info={world}",
        f"--node_rank={node}",
        f"--master_addr={address_of(next(iter(slots)))}",
        f"--master_port={launch.master_port}",
        *("--module", "--no_local_rank", "sweeps.cluster.node.supervisor", launch.attempt),
    )


def end_nodes(attempt: AttemptDir, record: LaunchRecord) -> list[str]:
    """End an attempt's processes on its hosts, whatever became of its launcher.

    Return the hosts that do not answer.
    """

    def end(item: tuple[int, str]) -> bool:
        node, host = item
        try:
            done = subprocess.run(
                on_host(record.ssh, host, "end"),
                input=dump(End(attempt=str(attempt.path.resolve()), node=node), indent=None) + "\n",
                capture_output=True,
                text=True,
                timeout=ANSWER_S,
            )
        except (OSError, subprocess.TimeoutExpired):  # no ssh here; the host has crashed, or its files hang
            return False
        return done.returncode == 0

    with ThreadPoolExecutor(max_workers=32) as pool:
        done = list(pool.map(end, enumerate(record.hosts)))
    return [host for host, ended in zip(record.hosts, done, strict=True) if not ended]


class _Watch:
    """The trial on all its hosts, as one step with a part for each host."""

    def __init__(self, launch: Launch) -> None:
        self.is_told = False
        self._launch = launch
        self._attempt = AttemptDir(Path(launch.attempt))
        self._step = Step(ENDING_S)
        self._ranks: list[range] = []  # of each part

    def tell(self, _signal: int, _frame: FrameType | None) -> None:
        self.is_told = True

    def start(self) -> None:
        first = 0
        for ids in self._launch.slots.values():
            self._ranks.append(range(first, first + len(ids)))
            first += len(ids)
        self._step = Step.start(
            [self._part(node, host) for node, host in enumerate(self._launch.slots)], ENDING_S
        )

    def _part(self, node: int, host: str) -> Part:
        order = Run(
            attempt=self._launch.attempt,
            node=node,
            command=launcher_command(self._launch, node),
            environment={ADDRESS: address_of(host), **self._launch.environment},
        )
        return Part(
            command=tuple(on_host(self._launch.ssh, host, "run")),
            log=self._attempt.submitit / f"node-{node}.log",
            order=dump(order, indent=None),
        )

    def wait(self) -> None:
        """Wait until all hosts have ended, or one did without a record and the others had time to notice."""
        while not self.is_told and not self._step.reap():
            now = time.monotonic()
            if any(now - (part.over_at or now) > PEERS_S for _, part in self._silent()):
                break
            time.sleep(POLL_S)
        if not self.is_told and (silent := self._silent()):
            write_atomic(self._attempt.scheduler, dump(_word(*silent[0])))

    def _silent(self) -> list[tuple[str, RunningPart]]:
        """Hosts whose part has ended although not all of its ranks have recorded how they ended."""
        there = set(os.listdir(self._attempt.path))  # NFS answers this afresh
        parts = zip(self._launch.slots, self._step.parts, self._ranks, strict=True)
        return [
            (host, part)
            for host, part, ranks in parts
            if part.status is not None and not there >= {self._attempt.exit(rank).name for rank in ranks}
        ]

    def end(self) -> None:
        while not self._step.reap():
            self._step.end()
            time.sleep(POLL_S)


def _word(host: str, part: RunningPart) -> SchedulerWord:
    state = "connection lost" if part.status == LOST_CONNECTION else f"status {part.status}"
    return SchedulerWord(
        scheduler="ssh",
        job_id=host,
        state=state,
        kind=FailureKind.NODE_LOST,
        detail="its ranks did not record how they ended; the end of submitit/node-*.log may say why",
    )


def main() -> int:
    watch = _Watch(load(Launch, sys.stdin.readline()))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, watch.tell)
    os.chdir("/")
    watch.start()
    watch.wait()
    watch.end()
    return 0


if __name__ == "__main__":
    sys.exit(main())
