"""DeepSpeed's compiled operators on a node: a copy of its own, free of locks that dead ranks left.

Whoever loads an operator takes its lock. On a file system that all nodes share, a rank that is killed
there stops every later trial, on all nodes. So each node loads from a local copy; and a supervisor that
finds no other at work on its node knows that whatever is locked there is locked by nobody.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from sweeps.cluster.leases import private_directory

SOURCE = "SHARDSWEEP_OPS"  # where a job's environment says that they lie compiled
TORCH = "TORCH_EXTENSIONS_DIR"  # where torch looks for them


@contextmanager
def local_ops(environ: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """What a rank's environment needs to load them from this node; nothing where no source is named."""
    source = environ.get(SOURCE)
    if source is None:
        yield {}
        return
    directory = private_directory() / "ops" / hashlib.sha256(source.encode()).hexdigest()[:12]
    directory.mkdir(parents=True, exist_ok=True)
    with directory.with_suffix(".lock").open("w") as guard:
        if _is_alone(guard.fileno()):
            remove_locks(directory)
            copy_ops(Path(source), directory)
        fcntl.flock(guard, fcntl.LOCK_SH)  # others wait here until the copy is made
        yield {TORCH: str(directory)}


def _is_alone(guard: int) -> bool:
    try:
        fcntl.flock(guard, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def remove_locks(directory: Path) -> None:
    for lock in directory.glob("*/lock"):
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
