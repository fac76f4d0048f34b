"""Lease the GPUs or cores of this host to trials, across all studies of this user.

A lease is a file that names its owner, a process, by pid and start time. The slot is taken while that process
lives, and free afterwards, whatever ended it. The orchestrator owns the lease first, then the job.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sweeps.cluster.node.processes import is_alive, start_ticks
from sweeps.errors import ConfigError
from train_entry.contract import write_atomic


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    name: str  # a GPU's UUID, or core-N
    kind: str  # the GPU's model, or CPU; all slots of a trial are of one kind


def default_directory() -> Path:
    """The state directory, local to the host and the user; SHARDSWEEP_STATE_DIR overrides it."""
    named = os.environ.get("SHARDSWEEP_STATE_DIR")
    return Path(named) if named else Path(f"/tmp/shardsweep-{os.getuid()}")


def private_directory() -> Path:
    """Return the default directory, created if needed. Raises ConfigError if others can write to it."""
    directory = default_directory()
    _require_private(directory)
    return directory


def _require_private(directory: Path) -> None:
    """Create the directory if needed. Raises ConfigError if others own it or can write to it, as in /tmp."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise ConfigError(
            f"{directory}: not a directory that only you can write to; "
            "remove it, or set SHARDSWEEP_STATE_DIR to another one on this host"
        )


class LeasePool:
    """The slots of one host, and their leases."""

    def __init__(self, slots: Sequence[Slot], directory: Path) -> None:
        self._slots = tuple(slots)
        _require_private(directory)
        self._directory = directory / "leases"
        self._directory.mkdir(exist_ok=True, mode=0o700)

    def acquire(self, count: int, owner: int) -> tuple[str, ...] | None:
        """Lease `count` slots of one kind to a process; None while fewer are free."""
        with self._locked():
            free = [slot for slot in self._slots if not self._is_taken(slot.name)]
            for kind in dict.fromkeys(slot.kind for slot in free):
                names = [slot.name for slot in free if slot.kind == kind][:count]
                if len(names) == count:
                    self._write(names, owner)
                    return tuple(names)
        return None

    def free(self) -> int:
        """The number of slots of one kind that a trial could have now."""
        with self._locked():
            kinds = Counter(slot.kind for slot in self._slots if not self._is_taken(slot.name))
        return max(kinds.values(), default=0)

    def has_others(self, ours: Collection[str]) -> bool:
        """True if any other slot of this host than `ours` is taken."""
        with self._locked():
            held = [file.stem for file in self._directory.glob("*.json") if self._is_taken(file.stem)]
        return not set(held) <= set(ours)

    def hand_over(self, names: Sequence[str], owner: int) -> None:
        """Make another process the owner: the job outlives the orchestrator that launched it."""
        with self._locked():
            self._write(names, owner)

    def release(self, names: Sequence[str], owners: Sequence[int | None]) -> None:
        """Give back those of the slots that these owners still hold."""
        with self._locked():
            for name in names:
                if self._owner(name).get("pid") in owners:
                    self._file(name).unlink(missing_ok=True)

    def _write(self, names: Sequence[str], owner: int) -> None:
        ticks = start_ticks(owner)
        for name in names:
            write_atomic(self._file(name), json.dumps({"pid": owner, "start_ticks": ticks}))

    def _is_taken(self, name: str) -> bool:
        owner = self._owner(name)
        return bool(owner) and is_alive(owner["pid"], owner["start_ticks"])

    def _owner(self, name: str) -> dict[str, int]:
        """Return the pid and start time of the slot's owner; empty if the lease is missing or unreadable."""
        try:
            owner = json.loads(self._file(name).read_text())
            return {"pid": int(owner["pid"]), "start_ticks": int(owner["start_ticks"])}
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return {}

    def _file(self, name: str) -> Path:
        return self._directory / f"{name}.json"

    @contextmanager
    def _locked(self) -> Iterator[None]:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(self._directory / ".lock", flags, 0o600), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
