"""Compile DeepSpeed's C++ operators, once per environment: `python -m train_entry.install.operators`.

DeepSpeed compiles an operator at its first use. In the first trial, that would take minutes of the trial's
time limit, and a rank killed while compiling leaves a lock for which every later job waits forever.
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

STALE_LOCK_S = 60 * 60  # over three times the longest build seen (18 minutes, on two busy cores)
USES_LIBAIO = "#include <libaio.h>\nint main() { return io_destroy(0); }\n"


@dataclass(frozen=True, kw_only=True, slots=True)
class Op:
    """An operator that DeepSpeed compiles."""

    folder: str  # in the directory of extensions; the library has the same name
    builder: str  # DeepSpeed's class
    used_by: str
    takes: str  # compile time on two cores
    always: bool = False  # every job on CPUs needs it
    with_gpus: bool = False  # a C++ compiler is enough also where jobs run on GPUs
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
# GPU jobs need another build of it, which needs the CUDA toolkit and a visible GPU.
ASYNC_IO = Op(
    folder="async_io",
    builder="AsyncIOBuilder",  # compiles pin_memory as well
    used_by="offload to NVMe",
    takes="4 to 8 minutes",
    libaio=True,
)
OPS = (SHM_COMM, CPU_ADAM, ASYNC_IO)


def extensions() -> Path:
    """The directory of compiled operators: inside the environment, since they fit only its torch."""
    return Path(os.environ.get("TORCH_EXTENSIONS_DIR", Path(sys.prefix) / "torch_extensions"))


def prepare_extensions() -> Path:
    """Prepare the directory of compiled operators, remove stale locks in it, and return it.

    Also let torch find ninja, which it starts by name even to load a compiled operator: ninja lies beside
    this interpreter, and PATH contains that directory only if the environment is activated.
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
    """Delete compile locks that are so old that their builder must be gone. Return the deleted ones."""
    removed = []
    for lock in compile_locks(directory):
        with suppress(OSError):  # another rank deleted it first, or it belongs to another user
            if time.time() - lock.stat().st_mtime >= older_than_s:
                lock.unlink()
                removed.append(lock)
    return removed


def compile_locks(directory: Path) -> list[Path]:
    """The locks that now exist. A process that loads an operator waits until its lock is gone."""
    return list(directory.glob("*/lock"))  # torch/utils/cpp_extension.py, _jit_compile; file_baton.py


def has_libaio() -> bool:
    """True if a program that uses libaio can be compiled and linked, as DeepSpeed does it."""
    command = [
        *("c++", "-x", "c++", "-", "-o", os.devnull),
        *os.environ.get("CFLAGS", "").split(),
        *os.environ.get("LDFLAGS", "").split(),
        "-laio",
    ]
    try:
        return subprocess.run(command, input=USES_LIBAIO, text=True, capture_output=True).returncode == 0
    except OSError:  # no compiler, or not one that we may run
        return False


def why_left_out(op: Op, gpus: bool, libaio: bool) -> str | None:
    """The reason why an operator cannot be compiled on this machine now; None if it can."""
    if gpus and not op.with_gpus:
        return "not for GPUs" if op.always else "the first trial compiles it (needs nvcc and libaio-dev)"
    if op.libaio and not libaio:
        return (
            "libaio is missing: `apt-get install libaio-dev`, then `python -m train_entry.install.operators`"
        )
    return None


def left_out(gpus: bool) -> list[str]:
    """Return one line for each operator that cannot be compiled now, with the reason."""
    libaio = has_libaio()
    reasons = {op: why_left_out(op, gpus, libaio) for op in OPS if not (gpus and op.always)}
    return [
        f"{op.folder} (for {op.used_by}) not compiled: {reason}" for op, reason in reasons.items() if reason
    ]


def build(gpus: bool) -> int:
    """Compile the missing operators, one at a time, and print each.

    Return the exit status: 1 if an operator that every job needs fails, else 0.
    """
    directory = prepare_extensions()
    for line in left_out(gpus):
        print(line)
    libaio = has_libaio()
    wanted = [op for op in OPS if why_left_out(op, gpus, libaio) is None]
    for op in wanted:
        if not op.is_there(directory):
            print(f"compiling {op.folder} (for {op.used_by}), once: {op.takes} on two cores", flush=True)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # also on a machine with GPUs: these need no CUDA
    os.environ.setdefault("MAX_JOBS", str(os.cpu_count() or 1))
    failed = [op for op in wanted if not load(op)]  # compiled ones too: loading rebuilds those out of date
    print(f"DeepSpeed's operators are ready in {directory}: {len(wanted) - len(failed)} of {len(wanted)}")
    return int(any(op.always for op in failed))


def load(op: Op) -> bool:
    """Load an operator, compiling it first if necessary. Return True if that succeeded."""
    from deepspeed.accelerator import get_accelerator  # slow

    try:
        get_accelerator().create_op_builder(op.builder).load()
    except (RuntimeError, OSError, ImportError) as error:  # what torch's and DeepSpeed's builders raise
        print(f"{op.folder} (for {op.used_by}) failed; the first trial that needs it tries again:\n{error}")
        return False
    return True


def listing(gpus: bool) -> str:
    """Return one line for each operator: its name, what uses it, and its state."""
    directory, libaio = prepare_extensions(), has_libaio()
    lines = []
    for op in OPS:
        state = "ready" if op.is_there(directory) else why_left_out(op, gpus, libaio) or "not compiled"
        lines.append(f"{op.folder:<19} {op.used_by:<18} {state}")
    return "\n".join(lines)


def missing(gpus: bool) -> list[str]:
    """The operators that can be compiled here but are not yet."""
    directory, libaio = extensions(), has_libaio()
    return [op.folder for op in OPS if why_left_out(op, gpus, libaio) is None and not op.is_there(directory)]


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m train_entry.install.operators", description="Compile DeepSpeed's operators."
    )
    parser.add_argument("--gpus", action="store_true", help="the operators for jobs on GPUs")
    parser.add_argument("--list", action="store_true", help="only print each operator's state")
    parser.add_argument("--missing", action="store_true", help="only print the names of those to be compiled")
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
