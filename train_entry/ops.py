"""DeepSpeed's CPU operators, compiled once per environment: `python -m train_entry.ops`.

DeepSpeed compiles operators when they are first used. Left to the first trial, that would take minutes out
of its time limit; and a rank killed while compiling leaves a lock that every later job waits on for ever.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

# Name of the operator's folder, and of its builder in DeepSpeed. shm_comm is loaded by every process group
# on CPU, whatever the strategy.
CPU_OPS = {"deepspeed_shm_comm": "ShareMemCommBuilder"}
STALE_LOCK_S = 15 * 60  # several times the longest build seen (97 s on one core)


def prepare_extensions() -> Path:
    """Where compiled operators live: inside the environment, since they fit one torch version only.

    Also lets torch find ninja, which it starts by name even to load what is compiled: it lies beside this
    interpreter, and PATH leads there only where somebody activated the environment.
    """
    beside_python = str(Path(sys.executable).parent)
    path = os.environ.get("PATH", os.defpath)
    if path.split(os.pathsep)[0] != beside_python:  # another ninja cannot read this one's log, and rebuilds
        os.environ["PATH"] = f"{beside_python}{os.pathsep}{path}"
    default = Path(sys.prefix) / "torch_extensions"
    return Path(os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(default)))


def remove_stale_locks(directory: Path, older_than_s: float) -> list[Path]:
    """Delete compile locks whose builder must be gone; returns those deleted."""
    stale = [lock for lock in directory.glob("**/lock") if time.time() - lock.stat().st_mtime >= older_than_s]
    for lock in stale:
        lock.unlink(missing_ok=True)
    return stale


def build_cpu_ops() -> None:
    """Compile what is missing, one at a time, saying so."""
    directory = prepare_extensions()
    for lock in remove_stale_locks(directory, STALE_LOCK_S):
        print(f"removed a stale compile lock: {lock}")
    missing = [op for op in CPU_OPS if not list(directory.glob(f"**/{op}/{op}.so"))]
    if missing:
        print(
            f"Compiling DeepSpeed's CPU operators, once: {', '.join(missing)} (1 to 3 minutes) ...",
            flush=True,
        )
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("MAX_JOBS", str(os.cpu_count() or 1))
    from deepspeed.accelerator import get_accelerator  # slow

    for builder in CPU_OPS.values():  # also those that seem to be there: what is out of date is rebuilt now
        get_accelerator().create_op_builder(builder).load()
    print(f"DeepSpeed's CPU operators are ready in {directory}")


if __name__ == "__main__":
    build_cpu_ops()
