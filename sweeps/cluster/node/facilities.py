"""Find what some plans need besides GPUs: host memory, a fast disk, libaio, the flash-attn package."""

from __future__ import annotations

import ctypes.util
import importlib.util
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from sweeps.machine import Nvme
from train_entry.contract import delete_abandoned_scratch

# CPU flags for fp16 arithmetic, as Linux lists them, on x86 (Sapphire Rapids and later; AMX) and ARM.
FP16_FLAGS = ("avx512_fp16", "amx_fp16", "avx_ne_convert", "asimdhp")
LIBAIO_HEADERS = ("/usr/include/libaio.h", "/usr/local/include/libaio.h")

KIB = 1024


def host_memory_bytes(root: Path = Path("/")) -> int | None:
    """Host memory that this process may ever use: all of it, or what its cgroups allow; None if unknown.

    Free memory would not do: it differs from one start to the next, and so would the study's verdicts.
    """
    limits = [*_installed(root), *_allowed(root)]
    return min(limits, default=None)


def _installed(root: Path) -> Iterator[int]:
    found = re.search(r"^MemTotal:\s+(\d+) kB", _text(root / "proc/meminfo"), re.MULTILINE)
    if found:
        yield int(found[1]) * KIB


def _allowed(root: Path) -> Iterator[int]:
    """Limits of the process's cgroup and of all above it, each of which binds: cgroups(7), versions 2 and 1.

    A container sees its own cgroup as the top one, whatever path /proc names. For no limit, version 2 writes
    `max`, and version 1 a number larger than any host's memory.
    """
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            top, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        here = PurePosixPath(path.lstrip("/"))
        texts = [_text(top / folder / name).strip() for folder in (here, *here.parents)]
        yield from (int(text) for text in texts if text.isdigit())


def _text(path: Path) -> str:
    """The text of a kernel file; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def find_nvme(path: str | None) -> Nvme | None:
    """Check the directory for NVMe offload and delete what dead ranks left in it; None if none is named."""
    if path is None:
        return None
    where = Path(path).resolve()
    problem = None
    if not where.is_dir():
        problem = "is not a directory"
    elif not os.access(where, os.W_OK | os.X_OK):
        problem = "cannot be written"
    if problem is None:
        delete_abandoned_scratch(where)  # a supervisor killed with its rank leaves some
    free_bytes = 0 if problem else shutil.disk_usage(where).free
    return Nvme(path=str(where), free_bytes=free_bytes, problem=problem)


def has_libaio() -> bool:
    """True if DeepSpeed can use libaio: its header (to compile) and its library (to run) are installed."""
    header = any(Path(name).is_file() for name in LIBAIO_HEADERS)
    return header and ctypes.util.find_library("aio") is not None


def cpu_has_fp16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """True if oneDNN has fp16 kernels for this CPU, which is what DeepSpeed checks."""
    words = set(cpuinfo.read_text().split())
    return not words.isdisjoint(FP16_FLAGS)


def has_flash_attention() -> bool:
    """True if the flash-attn package is installed. It is not imported, since that would import torch."""
    return importlib.util.find_spec("flash_attn") is not None
