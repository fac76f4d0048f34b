"""Trains many attempts one after another in one process a rank: `python -m tests.support.matrix DIR...`.

A process costs ten seconds before its first step, another engine in it less than one. Everything that trains
is the product's own `main.train`; only the ranks meet once, for all.
"""

from __future__ import annotations

import gc
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from train_entry import main as product
from train_entry.contract import AttemptDir, Phase, RankOutcome, TrialSpec, dump, load, write_atomic
from train_entry.failures import failure_from
from train_entry.progress import Heartbeats
from train_entry.rank import RankInfo, prepare_process


class Watching(Heartbeats):
    """Notes at the end what a rank has written to the disk that it offloads to, before that is deleted."""

    def __init__(self, spec: TrialSpec, attempt: AttemptDir, rank: int) -> None:
        super().__init__(attempt, rank)
        self._disk = spec.plan.offload.nvme_path
        self._note = attempt.path / f"offloaded.rank{rank}.txt"

    def enter(self, phase: Phase) -> None:
        super().enter(phase)
        if phase is Phase.REPORT and self._disk is not None:
            files = sorted(path.parent.parent.name for path in Path(self._disk).glob("*/*/*/*/*.swp"))
            self._note.write_text("\n".join(files))


def main(directories: list[str]) -> None:
    attempts = [AttemptDir(Path(directory)) for directory in directories]
    specs = [load(TrialSpec, attempt.spec.read_text()) for attempt in attempts]
    where = RankInfo.from_env(os.environ, specs[0].plan.ranks)
    meet_once(where)
    functional: Any = import_module("torch.nn.functional")
    linear = functional.linear
    product.rest = collect
    gc.freeze()
    for spec, attempt in zip(specs, attempts, strict=True):
        write_atomic(attempt.outcome(where.rank), dump(outcome_of(spec, attempt, where)))
        # ZeRO-3 puts its own there for good, which other cases must not train with.
        functional.linear = linear
        gc.collect()  # an engine's hooks and buffers form cycles


def collect() -> None:
    """As `main.rest`, which also keeps what it sees out of the collector's sight; a case ends here."""
    gc.collect()


def meet_once(where: RankInfo) -> None:
    """DeepSpeed's group serves both engines."""
    prepare_process(where, "cpu")
    from train_entry.engines import ddp as engine_ddp
    from train_entry.engines import deepspeed as engine_deepspeed

    engine_deepspeed.join_ranks("gloo", where)
    accelerator = import_module("deepspeed.accelerator").get_accelerator()
    accelerator.is_fp16_supported = lambda: True  # any CPU can; DeepSpeed wants one that is fast at it
    for engine in (engine_ddp, engine_deepspeed):
        engine.join_ranks = lambda collectives, where: None  # type: ignore[attr-defined]


def outcome_of(spec: TrialSpec, attempt: AttemptDir, where: RankInfo) -> RankOutcome:
    """As in `main.run_rank`; a plan that raises on all ranks does not keep the next from running."""
    progress = Watching(spec, attempt, where.rank)
    try:
        return product.train(spec, attempt, where, progress)
    except Exception as error:
        return failure_from(error, where.rank, progress.phase)


if __name__ == "__main__":
    main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # as main.leave: the clean-up at the interpreter's end can hang
