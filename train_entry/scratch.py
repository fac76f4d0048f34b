"""A rank's own directory on the disk that its plan offloads to, gone when the rank is.

DeepSpeed writes below `nvme_path` under names that are the same in every job, and deletes nothing.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

PREFIX = "shardsweep-"
OFFLOADS = ("offload_optimizer", "offload_param")


@contextmanager
def own_nvme_path(ds_config: Mapping[str, Any], owner: str) -> Iterator[dict[str, Any]]:
    """The configuration, its `nvme_path` led into a new directory that is deleted at the end.

    What killed ranks left beside it is deleted at the beginning. Raises ValueError where there is no disk.
    """
    zero = dict(ds_config.get("zero_optimization", {}))
    with ExitStack() as stack:
        own: dict[str, str] = {}
        for section in OFFLOADS:
            root = zero.get(section, {}).get("nvme_path")
            if root is None:
                continue
            if root not in own:
                own[root] = str(stack.enter_context(_own_directory(Path(root), owner)))
            zero[section] = {**zero[section], "nvme_path": own[root]}
        yield {**ds_config, "zero_optimization": zero} if own else dict(ds_config)


@contextmanager
def _own_directory(root: Path, owner: str) -> Iterator[Path]:
    if not root.is_dir():
        raise ValueError(f"cluster.nvme_path: {root} is no directory on {socket.gethostname()}")
    _delete_abandoned(root)
    directory, lock = _locked_directory(root, owner)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(lock)


def _locked_directory(root: Path, owner: str) -> tuple[Path, int]:
    """A new directory and the lock that shows it to be in use: the kernel drops it with the process."""
    while True:
        directory = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{owner}-", dir=root))
        lock = _lock(directory)
        if lock is not None and directory.exists():
            return directory, lock
        if lock is not None:  # another rank, looking for what is abandoned, was faster
            os.close(lock)


def _delete_abandoned(root: Path) -> None:
    for directory in root.glob(f"{PREFIX}*"):
        lock = _lock(directory)
        if lock is not None:
            shutil.rmtree(directory, ignore_errors=True)
            os.close(lock)


def _lock(directory: Path) -> int | None:
    """The lock of a directory; None where somebody holds it, or where it is gone or not ours."""
    with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            return None
        return handle
    return None
