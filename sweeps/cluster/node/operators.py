"""DeepSpeed's compiled operators on a node: a copy of its own, free of locks that dead ranks left.

A process that loads an operator takes its lock, a file. On a file system that all nodes share, a rank that is
killed while it holds the lock stops every later trial, on all nodes. So each node loads from a local copy,
where we can see which locks living processes have open. Operators run only on the kind of CPU that they were
compiled for: on another kind the first rank compiles them, into a directory for that kind.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from sweeps.cluster.node.leases import private_directory
from sweeps.cluster.node.processes import opened

SOURCE = "SHARDSWEEP_OPS"  # the directory of the compiled operators, in a job's environment
SOURCE_CPU = "SHARDSWEEP_OPS_CPU"  # the signature of the CPU that they were compiled for
TORCH = "TORCH_EXTENSIONS_DIR"  # where torch looks for them
SETTLE_S = 0.2  # torch closes a lock just before it removes it


@contextmanager
def local_ops(environ: Mapping[str, str], say: Callable[[str], None]) -> Iterator[dict[str, str]]:
    """Yield the variables with which a rank loads them from this node; none if no source is named."""
    source, cpu = environ.get(SOURCE), cpu_signature()
    if source is None:
        yield {}
        return
    name = f"{hashlib.sha256(source.encode()).hexdigest()[:12]}-{cpu}"
    directory = private_directory() / "ops" / name
    directory.mkdir(parents=True, exist_ok=True)
    fits = environ.get(SOURCE_CPU, cpu) == cpu
    if not fits:
        say(f"{source} holds operators for another kind of CPU; the first rank that needs an operator here")
        say(f"compiles it into {directory}")
    with directory.with_suffix(".lock").open("w") as guard:
        if fits and _is_alone(guard.fileno()):
            copy_ops(Path(source), directory)
        fcntl.flock(guard, fcntl.LOCK_SH)  # others wait here until the copy is made
        remove_locks(directory)
        yield {TORCH: str(directory)}


def _is_alone(guard: int) -> bool:
    try:
        fcntl.flock(guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def remove_locks(directory: Path) -> None:
    """Remove the locks that no living process of this node has open: their ranks were killed."""
    locks = set(directory.glob("*/lock"))
    if not locks:
        return
    with directory.with_suffix(".cleaning").open("w") as mutex:
        fcntl.flock(mutex, fcntl.LOCK_EX)  # else two cleaners might remove a lock that is new
        left = locks - opened(locks)
        time.sleep(SETTLE_S)
        for lock in left - opened(left):
            lock.unlink(missing_ok=True)


def copy_ops(source: Path, to: Path) -> None:
    """Copy operators that are missing or older in `to`. Keep their times: ninja rebuilds what looks newer."""
    for library in sorted(source.glob("*/*.so")):
        folder = library.parent
        copied = to / folder.name / library.name
        if copied.exists() and copied.stat().st_mtime >= library.stat().st_mtime:
            continue
        partial = Path(tempfile.mkdtemp(prefix=".copy-", dir=to))
        shutil.copytree(folder, partial, ignore=shutil.ignore_patterns("lock"), dirs_exist_ok=True)
        shutil.rmtree(to / folder.name, ignore_errors=True)
        os.replace(partial, to / folder.name)


def cpu_signature(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """A hash of what operators are compiled for: DeepSpeed lets the compiler use every feature of the CPU."""
    text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    lines = re.findall(r"^(?:model name|flags|Features|CPU part)\s*:\s*(.*)$", text, re.MULTILINE)
    words = sorted({word for line in lines for word in line.split()})
    return hashlib.sha256(" ".join(words).encode()).hexdigest()[:12]
