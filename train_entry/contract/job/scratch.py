"""A rank's directory on the disk that its plan offloads to: its name, and how to tell that it is abandoned.

A rank that is killed cannot delete what it wrote, and what is left counts as used when a plan asks for space.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
from contextlib import suppress
from pathlib import Path


def scratch_prefix() -> str:
    """How the names of this host's directories begin, and no other host's.

    flock may know the locks of one host only: on a shared file system others' live directories look unlocked.
    """
    return f"shardsweep-{socket.gethostname()}@"  # no hostname holds an @, so none begins another


def lock_scratch(directory: Path) -> int | None:
    """The lock that shows a directory to be in use, dropped by the kernel with the processes that hold it.

    None where somebody else holds it, or the directory is gone. Raises OSError where it cannot be locked.
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
    """Delete what ranks of this host, now gone, left below `root`; what cannot be deleted stays."""
    with suppress(OSError):  # not ours, or not a file system that knows locks
        for directory in root.glob(f"{scratch_prefix()}*"):
            _delete_unlocked(directory)


def _delete_unlocked(directory: Path) -> None:
    with suppress(OSError):
        lock = lock_scratch(directory)
        if lock is not None:
            shutil.rmtree(directory, ignore_errors=True)
            os.close(lock)
