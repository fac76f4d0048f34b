"""Compiles DeepSpeed's C++ operators, once per environment: `python -m train_entry.install.operators`.

DeepSpeed compiles operators when they are first used. Left to the first trial, that would take minutes out
of its time limit; and a rank killed while compiling leaves a lock that every later job waits on for ever.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

STALE_LOCK_S = 60 * 60  # several times the longest build seen (18 minutes, on two busy cores)
USES_LIBAIO = "#include <libaio.h>\nint main() { return io_destroy(0); }\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class Op:
    """What DeepSpeed compiles for itself."""

    folder: str  # in the directory of extensions; its library has the same name
    builder: str  # DeepSpeed's class
    used_by: str
    takes: str  # to compile, on two cores
    always: bool = False  # no job here runs without
    with_gpus: bool = False  # a C++ compiler is enough where DeepSpeed runs on GPUs
    libaio: bool = False

    def is_there(self, directory: Path) -> bool:
        return bool(list(directory.glob(f"**/{self.folder}/{self.folder}.so")))


SHM_COMM = Op(
    folder="deepspeed_shm_comm",
    builder="ShareMemCommBuilder",
    used_by="every job on CPUs",
    takes="60 to 90 s",
    always=True,
)
CPU_ADAM = Op(
    folder="cpu_adam",
    builder="CPUAdamBuilder",
    used_by="offload.optimizer",
    takes="70 to 110 s",
    with_gpus=True,
)
# For GPUs it is another build, which wants the CUDA toolkit and a GPU in sight.
ASYNC_IO = Op(
    folder="async_io",
    builder="AsyncIOBuilder",  # compiles pin_memory as well
    used_by="offload to NVMe",
    takes="4 to 8 minutes",
    libaio=True,
)
OPS = (SHM_COMM, CPU_ADAM, ASYNC_IO)


def extensions() -> Path:
    """Where compiled operators live: inside the environment, whose torch alone they fit."""
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR", Path(sys.prefix) / "torch_extensions"))


def prepare_extensions() -> Path:
    """Where compiled operators live, free of stale locks.

    Also lets torch find ninja, which it starts by name even to load what is compiled: it lies beside this
    interpreter, and PATH leads there only where somebody activated the environment.
    """
    beside_python = str(Path(sys.executable).parent)
    path = os.environ.get("PATH", os.defpath)
    if path.split(os.pathsep)[0] != beside_python:  # another ninja cannot read this one's log, and rebuilds
        os.environ["PATH"] = f"{beside_python}{os.pathsep}{path}"
    directory = extensions()
    os.environ["TORCH_EXTENSIONS_DIR"] = str(directory)
    for lock in remove_stale_locks(directory, STALE_LOCK_S):
        print(f"removed a stale compile lock: {lock}")
    return directory


def remove_stale_locks(directory: Path, older_than_s: float) -> list[Path]:
    """Delete compile locks whose builder must be gone; returns those deleted."""
    removed = []
    for lock in compile_locks(directory):
        with suppress(OSError):  # another rank was faster, or may what we may not
            if time.time() - lock.stat().st_mtime >= older_than_s:
                lock.unlink()
                removed.append(lock)
    return removed


def compile_locks(directory: Path) -> list[Path]:
    """Whoever loads an operator waits for its lock, if it is there."""
    return list(directory.glob("*/lock"))  # torch/utils/cpp_extension.py, _jit_compile; file_baton.py


def has_libaio() -> bool:
    """Whether a program that uses libaio can be compiled and linked, as DeepSpeed will."""
    command = [
        *("c++", "-x", "c++", "-", "-o", os.devnull),
        *os.environ.get("CFLAGS", "").split(),
        *os.environ.get("LDFLAGS", "").split(),
        "-laio",
    ]
    try:
        return subprocess.run(command, input=USES_LIBAIO, text=True, capture_output=True).returncode == 0
    except FileNotFoundError:  # no compiler
        return False


def why_left_out(op: Op, gpus: bool, libaio: bool) -> str | None:
    """What keeps an operator from being compiled here and now; None where nothing does."""
    if gpus and not op.with_gpus:
        return "not for GPUs" if op.always else "its first trial compiles it: wants nvcc and libaio-dev there"
    if op.libaio and not libaio:
        return (
            "libaio is missing: `apt-get install libaio-dev`, then `python -m train_entry.install.operators`"
        )
    return None


def left_out(gpus: bool) -> list[str]:
    """A line for each operator that something keeps from being compiled."""
    libaio = has_libaio()
    reasons = {op: why_left_out(op, gpus, libaio) for op in OPS if not (gpus and op.always)}
    return [
        f"{op.folder} (for {op.used_by}) is left out; {reason}" for op, reason in reasons.items() if reason
    ]


def build(gpus: bool) -> int:
    """Compile what is missing, one at a time, saying so; 1 where an operator that all jobs need fails."""
    directory = prepare_extensions()
    for line in left_out(gpus):
        print(line)
    libaio = has_libaio()
    wanted = [op for op in OPS if why_left_out(op, gpus, libaio) is None]
    for op in wanted:
        if not op.is_there(directory):
            print(f"compiling {op.folder} (for {op.used_by}), once: {op.takes} on two cores", flush=True)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # on a machine with GPUs too: CUDA is not needed for these
    os.environ.setdefault("MAX_JOBS", str(os.cpu_count() or 1))
    failed = [op for op in wanted if not load(op)]  # also those there: what is out of date is rebuilt now
    print(f"DeepSpeed's operators are ready in {directory}: {len(wanted) - len(failed)} of {len(wanted)}")
    return int(any(op.always for op in failed))


def load(op: Op) -> bool:
    """Whether it could be loaded, compiled first if need be."""
    from deepspeed.accelerator import get_accelerator  # slow

    try:
        get_accelerator().create_op_builder(op.builder).load()
    except (RuntimeError, OSError, ImportError) as error:  # what torch's and DeepSpeed's builders raise
        print(
            f"{op.folder} (for {op.used_by}) failed; the first trial that needs it will try again:\n{error}"
        )
        return False
    return True


def listing(gpus: bool) -> str:
    """A line for each operator: whether it is there, and who needs it."""
    directory, libaio = prepare_extensions(), has_libaio()
    lines = []
    for op in OPS:
        state = "ready" if op.is_there(directory) else why_left_out(op, gpus, libaio) or "not compiled"
        lines.append(f"{op.folder:<19} {op.used_by:<18} {state}")
    return "\n".join(lines)


def missing(gpus: bool) -> list[str]:
    """Operators that could be compiled here, and are not."""
    directory, libaio = extensions(), has_libaio()
    return [op.folder for op in OPS if why_left_out(op, gpus, libaio) is None and not op.is_there(directory)]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m train_entry.install.operators", description="Compile DeepSpeed's operators."
    )
    parser.add_argument("--gpus", action="store_true", help="those for a machine whose jobs run on GPUs")
    parser.add_argument("--list", action="store_true", help="only say which are there")
    parser.add_argument("--missing", action="store_true", help="only name those to be compiled")
    asked = parser.parse_args(arguments)
    if asked.list:
        print(listing(asked.gpus))
        return 0
    if asked.missing:
        print("\n".join(missing(asked.gpus)))
        return 0
    return build(asked.gpus)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
