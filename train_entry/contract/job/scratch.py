"""Name, lock and clean up a rank's scratch directory on the disk that its plan offloads to.

A killed rank cannot delete what it wrote, and its files take the disk space that later plans need.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
from contextlib import suppress
from pathlib import Path


def scratch_prefix() -> str:
    """The prefix of this host's scratch directories; no other host uses it.

    flock may work within one host only: on a shared file system, other hosts' live directories look unlocked.
    """
    return f"shardsweep-{socket.gethostname()}@"  # no hostname contains @, so no prefix is part of another


def lock_scratch(directory: Path) -> int | None:
    """Lock a directory to mark it as in use, and return the lock's file descriptor.

    The kernel drops the lock when the last process that holds it ends. Return None if another process holds
    it or the directory is gone. Raise OSError if the directory cannot be locked.
    """
    try:
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    except OSError:
        os.close(handle)
        raise
    return handle


def delete_abandoned_scratch(root: Path) -> None:
    """Delete the directories that dead ranks of this host left below `root`, as far as that is possible."""
    with suppress(OSError):  # another user's root, or a file system without locks
        for directory in root.glob(f"{scratch_prefix()}*"):
            _delete_unlocked(directory)


def _delete_unlocked(directory: Path) -> None:
    with suppress(OSError):
        lock = lock_scratch(directory)
        if lock is not None:
            shutil.rmtree(directory, ignore_errors=True)
            os.close(lock)
