"""Train many attempts in one process per rank, one after another: `python -m tests.support.matrix DIR...`.

A new process takes ten seconds until its first step, another engine in the same process less than one.
Training is the product's own `main.train`; only the rendezvous happens once for all attempts.
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
    """Heartbeats that, at the end, also record the files offloaded to disk, before these are deleted."""

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
        # ZeRO-3 replaces it permanently, and other cases must not train with the replacement.
        functional.linear = linear
        gc.collect()  # an engine's hooks and buffers form cycles
        gc.freeze()  # DeepSpeed holds what is left, and every later collection would look through it again


def collect() -> None:
    """Replace `main.rest`, which also freezes all objects: a case's objects must be freed after it."""
    gc.collect()


def meet_once(where: RankInfo) -> None:
    """Create DeepSpeed's process group once, and let both engines use it."""
    prepare_process(where, "cpu")
    from train_entry.engines import ddp as engine_ddp
    from train_entry.engines import deepspeed as engine_deepspeed

    engine_deepspeed.join_ranks("gloo", where)
    accelerator = import_module("deepspeed.accelerator").get_accelerator()
    accelerator.is_fp16_supported = lambda: True  # any CPU can compute in fp16; DeepSpeed asks for a fast one
    for engine in (engine_ddp, engine_deepspeed):
        engine.join_ranks = lambda collectives, where: None  # type: ignore[attr-defined]


def outcome_of(spec: TrialSpec, attempt: AttemptDir, where: RankInfo) -> RankOutcome:
    """Train one attempt as `main.run_rank` does. If it raises on all ranks, the next attempt still runs."""
    progress = Watching(spec, attempt, where.rank)
    try:
        return product.train(spec, attempt, where, progress)
    except Exception as error:
        return failure_from(error, where.rank, progress.phase)


if __name__ == "__main__":
    main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # like main.leave: clean-up code at the interpreter's exit can hang
