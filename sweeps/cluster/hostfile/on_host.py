"""Run on a host of a hostfile, started over ssh: look around, run a trial's part on this node, or end it.

    python -m sweeps.cluster.hostfile.on_host look|run|end

It reads its order, one line of JSON, from standard input.

`run` lives as long as its standard input: when the ssh that started it ends, its ranks end too.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from sweeps.cluster.node.devices import find_gpus, host_with
from sweeps.cluster.node.processes import adopt_orphans, end_descendants, end_session, is_alive, start_ticks
from sweeps.machine import Machine
from train_entry.contract import AttemptDir, ContractError, JobRecord, dump, load, read_document, write_atomic

POLL_S = 0.2
PATIENCE_S = 5.0  # for supervisors to write how their ranks ended
COMPARED = ("torch", "deepspeed")


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """The order of `look`."""

    token: str  # a file in the directory of studies, which all hosts must see
    device: str
    nvme_path: str | None
    hosts: tuple[str, ...]  # names that this host must resolve


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """The answer of `look`."""

    versions: Mapping[str, str]
    sees_studies: bool
    unknown_hosts: tuple[str, ...]
    machine: Machine


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """The order of `run`."""

    attempt: str
    node: int
    command: tuple[str, ...]
    environment: Mapping[str, str]


@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """The order of `end`."""

    attempt: str
    node: int


def versions() -> dict[str, str]:
    """The versions that must be the same on all hosts; empty for a missing package."""
    found = {"Python": platform.python_version()}
    for name in COMPARED:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = ""
    return found


def look(order: Look) -> Seen:
    gpus = () if order.device == "cpu" else find_gpus()
    return Seen(
        versions=versions(),
        sees_studies=Path(order.token).exists(),
        unknown_hosts=tuple(host for host in order.hosts if not _is_known(host)),
        machine=host_with(gpus, order.nvme_path),
    )


def _is_known(host: str) -> bool:
    try:
        return bool(socket.getaddrinfo(host, None))
    except OSError:
        return False


class _Stop:
    """A request to end: a signal, or the end of our standard input."""

    def __init__(self) -> None:
        self.is_told = False
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._tell)

    def _tell(self, _signal: int, _frame: FrameType | None) -> None:
        self.is_told = True

    def wait(self, seconds: float) -> bool:
        """Sleep up to `seconds`. Return True if we are to end."""
        readable, _, _ = select.select([0], [], [], seconds)
        if readable and not os.read(0, 4096):
            self.is_told = True
        return self.is_told


def run(order: Run) -> int:
    """Run DeepSpeed's launcher of this node to its end, and leave nothing behind."""
    stop = _Stop()
    adopt_orphans()
    attempt = AttemptDir(Path(order.attempt))
    write_atomic(attempt.node(order.node), dump(_record()))
    process = subprocess.Popen(
        order.command,
        env={**os.environ, **order.environment},
        stdin=subprocess.DEVNULL,
        cwd=attempt.path,
    )
    while process.poll() is None and not stop.wait(POLL_S):
        pass
    if process.poll() is None:
        process.terminate()  # it passes that on to the supervisors
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE_S)
    returncode = process.poll()
    end_descendants()
    return 1 if returncode is None else abs(returncode)


def _record() -> JobRecord:
    with contextlib.suppress(PermissionError):  # we lead a session already, or our shell does
        os.setsid()
    leader = os.getsid(0)
    return JobRecord(
        job_id=str(leader),
        host=socket.gethostname(),
        leader_pid=leader,
        leader_start_ticks=start_ticks(leader) or 0,
        started_at=time.time(),
    )


def end(order: End) -> None:
    """End what `run` left on a node, if anything. Pid and start time ensure that no other process is hit."""
    record = read_document(AttemptDir(Path(order.attempt)).node(order.node), JobRecord)
    if record is None or record.host != socket.gethostname():
        return
    if is_alive(record.leader_pid, record.leader_start_ticks):
        end_session(record.leader_pid, PATIENCE_S)


def _line() -> str:
    """Read a line of standard input and not a byte more: `run` watches the rest for its end."""
    found = b""
    while (byte := os.read(0, 1)) not in (b"", b"\n"):
        found += byte
    return found.decode()


def main(arguments: list[str]) -> int:
    try:
        match arguments:
            case ["look"]:
                print(dump(look(load(Look, _line())), indent=None), flush=True)
            case ["run"]:
                return run(load(Run, _line()))
            case ["end"]:
                end(load(End, _line()))
            case _:
                print("usage: python -m sweeps.cluster.hostfile.on_host look|run|end", file=sys.stderr)
                return 2
    except ContractError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
