"""A trial on hosts of a hostfile: DeepSpeed's launcher of each node, started over ssh, and watched.

The `deepspeed` command itself needs pdsh, passes the environment on as shell text, and leaves its ranks
behind when it dies. This process does its part: one for each trial, in a session of its own, so that the
trial outlives the orchestrator; and when it dies, its ssh connections end, and with them the ranks.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from sweeps.cluster.hostfile.hosts import address_of
from sweeps.cluster.hostfile.on_host import End, Run
from sweeps.cluster.node.rendezvous import ADDRESS
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
PEERS_S = 15.0  # for the other nodes' supervisors, once one node has ended without a word
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
    """The command that starts `on_host` there. A login shell reads it: our own words, quoted."""
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
    """DeepSpeed's launcher of one node, and what it starts for each rank."""
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
    """End what runs of an attempt on its hosts, whatever became of its launcher; hosts that do not answer."""

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
        except subprocess.TimeoutExpired:  # it has crashed, or its file system hangs
            return False
        return done.returncode == 0

    with ThreadPoolExecutor(max_workers=32) as pool:
        done = list(pool.map(end, enumerate(record.hosts)))
    return [host for host, ended in zip(record.hosts, done, strict=True) if not ended]


@dataclass
class _Node:
    """One host's part of the trial."""

    host: str
    process: subprocess.Popen[bytes]
    ranks: range
    over_at: float | None = None


@dataclass
class _Watch:
    """All nodes of the trial."""

    launch: Launch
    nodes: list[_Node] = field(default_factory=list)
    is_told: bool = False

    def tell(self, _signal: int, _frame: FrameType | None) -> None:
        self.is_told = True

    @property
    def attempt(self) -> AttemptDir:
        return AttemptDir(Path(self.launch.attempt))

    def start(self) -> None:
        first = 0
        self.attempt.submitit.mkdir(parents=True, exist_ok=True)
        for number, (host, ids) in enumerate(self.launch.slots.items()):
            with (self.attempt.submitit / f"node-{number}.log").open("ab") as log:
                process = subprocess.Popen(
                    on_host(self.launch.ssh, host, "run"),
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            self.nodes.append(_Node(host, process, range(first, first + len(ids))))
            first += len(ids)
            self._order(process, self._run(number, host))

    def _run(self, node: int, host: str) -> Run:
        return Run(
            attempt=self.launch.attempt,
            node=node,
            command=launcher_command(self.launch, node),
            environment={ADDRESS: address_of(host), **self.launch.environment},
        )

    def _order(self, process: subprocess.Popen[bytes], order: Run) -> None:
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # then it has ended, and its status says why
            process.stdin.write(dump(order, indent=None).encode() + b"\n")
            process.stdin.flush()

    def wait(self) -> None:
        """Until all nodes have ended, or one has without a word and the others had time to notice."""
        while not self.is_told and any(node.process.poll() is None for node in self.nodes):
            now = time.monotonic()
            for node in self.nodes:
                if node.process.poll() is not None:
                    node.over_at = node.over_at or now
            if any(now - (node.over_at or now) > PEERS_S for node in self._silent()):
                break
            time.sleep(POLL_S)
        if not self.is_told and (silent := list(self._silent())):
            write_atomic(self.attempt.scheduler, dump(_word(silent[0])))

    def _silent(self) -> list[_Node]:
        """Nodes that have ended, and whose ranks have not all said how."""
        over = [node for node in self.nodes if node.process.poll() is not None]
        for node in over:
            node.over_at = node.over_at or time.monotonic()
        there = set(os.listdir(self.attempt.path))  # NFS answers this afresh
        return [node for node in over if not there >= {self.attempt.exit(rank).name for rank in node.ranks}]

    def end(self) -> None:
        for node in self.nodes:
            if node.process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    node.process.stdin.close()
        deadline = time.monotonic() + ENDING_S
        for node in self.nodes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                node.process.wait(max(0.0, deadline - time.monotonic()))
            node.process.kill()


def _word(node: _Node) -> SchedulerWord:
    status = node.process.returncode
    state = "connection lost" if status == LOST_CONNECTION else f"status {status}"
    return SchedulerWord(
        scheduler="ssh",
        job_id=node.host,
        state=state,
        kind=FailureKind.NODE_LOST,
        detail="its ranks left no word; the end of submitit/node-*.log may say why",
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
