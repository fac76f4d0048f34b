"""Write a rank's heartbeats and step metrics, for its supervisor and for the orchestrator.

The rank's main thread writes them all. A helper thread would go on beating while the main thread hangs in a
collective, and the heartbeat exists to show just that.
"""

from __future__ import annotations

import os

from train_entry.contract import AttemptDir, Heartbeat, Phase, StepMetrics, append_line, dump
from train_entry.rank import process_age_s


class Heartbeats:
    """One rank's heartbeat, and on rank 0 the step metrics. Never call its methods inside a timed span."""

    def __init__(self, out: AttemptDir, rank: int) -> None:
        self._out = out
        self._rank = rank
        self._counter = 0
        self._step = 0
        self.phase = Phase.IMPORTS

    def enter(self, phase: Phase) -> None:
        """Begin a new phase. This counts as progress."""
        self.phase = phase
        print(f"[rank {self._rank}] {process_age_s():6.1f} s: {phase}", flush=True)
        self.beat()

    def beat(self) -> None:
        """Report progress: increment the counter and write the heartbeat."""
        self._counter += 1
        heartbeat = Heartbeat(
            rank=self._rank, pid=os.getpid(), counter=self._counter, phase=self.phase, step=self._step
        )
        # Not write_atomic: that waits for the disk, and nobody needs a heartbeat after a power failure. There
        # is only one writer, so the temporary name may be fixed.
        path = self._out.heartbeat(self._rank)
        partial = path.with_name(f".{path.name}.new")
        partial.write_text(dump(heartbeat), encoding="utf-8")
        partial.replace(path)

    @property
    def is_asked_to_stop(self) -> bool:
        """True if the orchestrator asks to time no further step."""
        return self._out.stop.exists()

    def step(self, metrics: StepMetrics) -> None:
        """Record the end of an optimizer step. Metrics cover all ranks, so only rank 0 writes them."""
        self._step = metrics.step
        if self._rank == 0:
            append_line(self._out.metrics, metrics)
        self.beat()
