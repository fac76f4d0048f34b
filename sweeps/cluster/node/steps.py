"""Start, end and reap a step: the processes that start a trial's ranks on given nodes.

One srun covers all nodes of a step; one ssh covers one host. The holder of an allocation and the launcher of
a trial on a hostfile's hosts both start their steps here.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One process of a step."""

    command: tuple[str, ...]
    log: Path
    environment: Mapping[str, str] | None = None  # None: that of this process
    order: str | None = None  # a line to its standard input; closing that tells it to end. None: SIGTERM does
    last_word: signal.Signals = signal.SIGKILL  # for a part that was told to end and does not


@dataclass
class RunningPart:
    process: subprocess.Popen[bytes]
    part: Part
    told_at: float | None = None
    over_at: float | None = None

    @property
    def status(self) -> int | None:
        """Its exit status; None while it runs."""
        return self.process.poll()

    def tell(self) -> None:
        if self.part.order is None:
            self.process.send_signal(signal.SIGTERM)
        self.close_input()

    def close_input(self) -> None:
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()


@dataclass
class Step:
    """Parts that run together."""

    patience_s: float  # between telling a part to end and its last word
    parts: list[RunningPart] = field(default_factory=list)

    @classmethod
    def start(cls, parts: Sequence[Part], patience_s: float) -> Step:
        return cls(patience_s, [_started(part) for part in parts])

    def reap(self) -> bool:
        """Note which parts have ended; True when all have."""
        for running in self.parts:
            if running.status is not None and running.over_at is None:
                running.over_at = time.monotonic()
                running.close_input()
        return all(running.over_at is not None for running in self.parts)

    def end(self) -> None:
        """Tell the parts that still run to end; send the last word to those that were told `patience_s` ago.

        Returns at once: call it again until `reap` is true.
        """
        now = time.monotonic()
        for running in self.parts:
            if running.status is not None:
                continue
            if running.told_at is None:
                running.tell()
                running.told_at = now
            elif now - running.told_at > self.patience_s:
                running.process.send_signal(running.part.last_word)
                running.told_at = now


def _started(part: Part) -> RunningPart:
    part.log.parent.mkdir(parents=True, exist_ok=True)
    with part.log.open("ab") as log:
        process = subprocess.Popen(
            part.command,
            env=part.environment,
            stdin=subprocess.DEVNULL if part.order is None else subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=part.order is None,  # an ssh stays in our session, and is ended with it
        )
    if part.order is not None and process.stdin is not None:
        with contextlib.suppress(BrokenPipeError):  # then it has ended, and its status says why
            process.stdin.write(part.order.encode() + b"\n")
            process.stdin.flush()
    return RunningPart(process, part)
