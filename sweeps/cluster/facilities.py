"""What some plans need of a host beside its cards: a fast disk, libaio, the flash-attn package."""

from __future__ import annotations

import ctypes.util
import importlib.util
import os
import shutil
from pathlib import Path

from sweeps.machine import Nvme
from train_entry.contract import delete_abandoned_scratch

# x86 (Sapphire Rapids and later; AMX) and ARM names of fp16 arithmetic, as Linux lists them.
FP16_FLAGS = ("avx512_fp16", "amx_fp16", "avx_ne_convert", "asimdhp")
LIBAIO_HEADERS = ("/usr/include/libaio.h", "/usr/local/include/libaio.h")


def find_nvme(path: str | None) -> Nvme | None:
    """The directory for offload to NVMe, free of what dead ranks left there; None where none is named."""
    if path is None:
        return None
    where = Path(path).resolve()
    problem = None
    if not where.is_dir():
        problem = "is not a directory"
    elif not os.access(where, os.W_OK | os.X_OK):
        problem = "cannot be written"
    if problem is None:
        delete_abandoned_scratch(where)  # as after a supervisor that was killed with its rank
    free_bytes = 0 if problem else shutil.disk_usage(where).free
    return Nvme(path=str(where), free_bytes=free_bytes, problem=problem)


def has_libaio() -> bool:
    """Whether DeepSpeed can use libaio: its header to compile against, and the library to run with."""
    header = any(Path(name).is_file() for name in LIBAIO_HEADERS)
    return header and ctypes.util.find_library("aio") is not None


def cpu_has_fp16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether oneDNN has fp16 kernels for this CPU, which is what DeepSpeed asks."""
    words = set(cpuinfo.read_text().split())
    return not words.isdisjoint(FP16_FLAGS)


def has_flash_attention() -> bool:
    """Whether the flash-attn package is installed; it is not imported, since that would import torch."""
    return importlib.util.find_spec("flash_attn") is not None
