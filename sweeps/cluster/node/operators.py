"""DeepSpeed's compiled operators on a node: a copy of its own, free of locks that dead ranks left.

Whoever loads an operator takes its lock, a file. On a file system that all nodes share, a rank that is killed
there stops every later trial, on all nodes. So each node loads from a local copy, where one can see which
lock a living process has open. Operators run on the kind of processor only that they were compiled for: on
another one the first rank compiles them, into a directory for its kind.
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

SOURCE = "SHARDSWEEP_OPS"  # where a job's environment says that they lie compiled
SOURCE_CPU = "SHARDSWEEP_OPS_CPU"  # for processors of this signature
TORCH = "TORCH_EXTENSIONS_DIR"  # where torch looks for them
SETTLE_S = 0.2  # torch closes a lock just before it removes it


@contextmanager
def local_ops(environ: Mapping[str, str], say: Callable[[str], None]) -> Iterator[dict[str, str]]:
    """What a rank's environment needs to load them from this node; nothing where no source is named."""
    source, cpu = environ.get(SOURCE), cpu_signature()
    if source is None:
        yield {}
        return
    name = f"{hashlib.sha256(source.encode()).hexdigest()[:12]}-{cpu}"
    directory = private_directory() / "ops" / name
    directory.mkdir(parents=True, exist_ok=True)
    fits = environ.get(SOURCE_CPU, cpu) == cpu
    if not fits:
        say(f"{source} holds operators for another kind of processor; those that are used here are compiled")
        say(f"by the first rank that needs them, into {directory}")
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
    """Those that no living process of this node has open: their ranks were killed."""
    locks = set(directory.glob("*/lock"))
    if not locks:
        return
    with directory.with_suffix(".cleaning").open("w") as mutex:
        fcntl.flock(mutex, fcntl.LOCK_EX)  # else another one's new lock might be taken for the old one
        left = locks - opened(locks)
        time.sleep(SETTLE_S)
        for lock in left - opened(left):
            lock.unlink(missing_ok=True)


def copy_ops(source: Path, to: Path) -> None:
    """Those that are not there, or older. Times are kept: ninja compiles again what looks newer."""
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
    """What operators are compiled for: DeepSpeed lets the compiler use all that this processor can."""
    text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    lines = re.findall(r"^(?:model name|flags|Features|CPU part)\s*:\s*(.*)$", text, re.MULTILINE)
    words = sorted({word for line in lines for word in line.split()})
    return hashlib.sha256(" ".join(words).encode()).hexdigest()[:12]
