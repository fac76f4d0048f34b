"""Check whether processes of this host are alive, and end whole jobs."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Collection
from pathlib import Path

import psutil

PR_SET_PDEATHSIG = 1  # linux/prctl.h
PR_SET_CHILD_SUBREAPER = 36


def start_ticks(pid: int) -> int | None:
    """Return the start time of a process, in clock ticks since boot; None if it is gone or a zombie.

    Pid and start time together identify a process for good: pids are reused, such pairs are not.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()  # the command's name may hold spaces
    return None if fields[0] in ("Z", "X") else int(fields[19])


def is_alive(pid: int, ticks: int) -> bool:
    return start_ticks(pid) == ticks


def opened(files: Collection[Path]) -> set[Path]:
    """Return the files among `files` that a process of this user on this host has open."""
    names = {_identity(file): file for file in files}
    found: set[Path] = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # another user's, or gone
            seen = {_identity(process / "fd" / number) for number in os.listdir(process / "fd")}
            found |= {file for name, file in names.items() if name is not None and name in seen}
    return found


def _identity(file: Path) -> tuple[int, int] | None:
    try:
        there = file.stat()
    except OSError:
        return None
    return there.st_dev, there.st_ino


def die_with_parent() -> None:
    """Have the kernel kill this process when its parent ends, for whatever reason."""
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent or parent == 1:  # it ended before prctl took effect
        raise SystemExit("the parent is gone")


def adopt_orphans() -> None:
    """Become the parent of orphaned descendants, so that none escapes `end_descendants`."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1)


def end_descendants() -> None:
    """Kill all processes below this one."""
    _kill(psutil.Process().children(recursive=True))


def end_session(leader: int, patience_s: float) -> None:
    """End a session and all its descendants: SIGINT to the leader, then SIGKILL to what is left."""
    members = _session(leader)
    if leader in {process.pid for process in members}:  # else it is gone, and its pid may be another's
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(leader, signal.SIGINT)
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline and any(process.is_running() for process in members):
        psutil.wait_procs(members, timeout=0.1)
        members = [process for process in members if _runs(process)]
    _kill(_session(leader) + members)


def _session(leader: int) -> list[psutil.Process]:
    """Members of the session, and their descendants that left it."""
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getsid(process.pid) == leader:
                found[process.pid] = process
                found |= {child.pid: child for child in process.children(recursive=True)}
    return [process for process in found.values() if process.pid != os.getpid()]


def _runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=3)
