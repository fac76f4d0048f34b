"""Signs of life of a rank, for its supervisor and for the orchestrator.

Everything here is written by the rank's main thread. A helper thread would go on beating while the main
thread hangs in a collective, and hide what the heartbeat exists to show.
"""

from __future__ import annotations

import os

from train_entry.contract import AttemptDir, Heartbeat, Phase, StepMetrics, append_line, dump
from train_entry.rank import process_age_s


class Heartbeats:
    """Writes one rank's heartbeat, and rank 0's step metrics. Never call it inside a timed span."""

    def __init__(self, out: AttemptDir, rank: int) -> None:
        self._out = out
        self._rank = rank
        self._counter = 0
        self._step = 0
        self.phase = Phase.IMPORTS

    def enter(self, phase: Phase) -> None:
        """A new phase begins, which is progress."""
        self.phase = phase
        print(f"[rank {self._rank}] {process_age_s():6.1f} s: {phase}", flush=True)
        self.beat()

    def beat(self) -> None:
        """Something was achieved; the counter moves."""
        self._counter += 1
        heartbeat = Heartbeat(
            rank=self._rank, pid=os.getpid(), counter=self._counter, phase=self.phase, step=self._step
        )
        # Not write_atomic: it waits for the disk, and a beat is worth nothing after a power cut. One writer,
        # so the temporary name may be fixed.
        path = self._out.heartbeat(self._rank)
        partial = path.with_name(f".{path.name}.new")
        partial.write_text(dump(heartbeat), encoding="utf-8")
        partial.replace(path)

    @property
    def is_asked_to_stop(self) -> bool:
        """Whether the orchestrator wants no further step timed."""
        return self._out.stop.exists()

    def step(self, metrics: StepMetrics) -> None:
        """An optimizer step has ended. The numbers are those of all ranks, so rank 0 alone records them."""
        self._step = metrics.step
        if self._rank == 0:
            append_line(self._out.metrics, metrics)
        self.beat()
