"""Who uses which GPU or core of this host, over all studies of this user.

A lease is a file that names its owner, a process, by pid and start time: while that process lives the slot
is taken, afterwards it is free, whatever ended it. First the orchestrator owns it, then the job.
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
    kind: str  # the card's model, or CPU: slots of one trial are of one kind


def default_directory() -> Path:
    """Local to the host and to the user; SHARDSWEEP_STATE_DIR overrides it."""
    named = os.environ.get("SHARDSWEEP_STATE_DIR")
    return Path(named) if named else Path(f"/tmp/shardsweep-{os.getuid()}")


def private_directory() -> Path:
    """The default directory, made if need be. Raises ConfigError where it is not ours alone."""
    directory = default_directory()
    _require_private(directory)
    return directory


def _require_private(directory: Path) -> None:
    """Make the directory, or raise ConfigError where it is not ours alone: /tmp is everybody's."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
        raise ConfigError(
            f"{directory}: not a directory that only you can write to; "
            "remove it, or set SHARDSWEEP_STATE_DIR to another one on this host"
        )


class LeasePool:
    """Slots of one host."""

    def __init__(self, slots: Sequence[Slot], directory: Path) -> None:
        self._slots = tuple(slots)
        _require_private(directory)
        self._directory = directory / "leases"
        self._directory.mkdir(exist_ok=True, mode=0o700)

    def acquire(self, count: int, owner: int) -> tuple[str, ...] | None:
        """Take `count` slots of one kind for a process; None while so many are not free."""
        with self._locked():
            free = [slot for slot in self._slots if not self._is_taken(slot.name)]
            for kind in dict.fromkeys(slot.kind for slot in free):
                names = [slot.name for slot in free if slot.kind == kind][:count]
                if len(names) == count:
                    self._write(names, owner)
                    return tuple(names)
        return None

    def free(self) -> int:
        """How many slots of one kind a trial could have now."""
        with self._locked():
            kinds = Counter(slot.kind for slot in self._slots if not self._is_taken(slot.name))
        return max(kinds.values(), default=0)

    def has_others(self, ours: Collection[str]) -> bool:
        """Whether anybody holds a slot of this host beside these."""
        with self._locked():
            held = [file.stem for file in self._directory.glob("*.json") if self._is_taken(file.stem)]
        return not set(held) <= set(ours)

    def hand_over(self, names: Sequence[str], owner: int) -> None:
        """Make another process the owner: the job outlives the orchestrator that launched it."""
        with self._locked():
            self._write(names, owner)

    def release(self, names: Sequence[str], owners: Sequence[int | None]) -> None:
        """Give slots back, unless they have gone to somebody else meanwhile."""
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
        """Empty where nobody, or nobody readable, holds the slot."""
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
