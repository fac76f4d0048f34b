"""Identify this process among the ranks, and prepare it before heavy imports.

torch is not imported at module level, so that a wrong launch is refused in milliseconds.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import time
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from train_entry.install.operators import prepare_extensions

if TYPE_CHECKING:
    import torch

PR_SET_PDEATHSIG = 1  # linux/prctl.h


class LaunchError(ValueError):
    """This process was not started as the plan requires. The message says how to start it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankInfo:
    """One process of a job."""

    rank: int
    ranks: int
    local_rank: int  # index among the ranks of this host
    init_method: str  # the torch.distributed URL at which the ranks meet

    @classmethod
    def from_env(cls, environ: Mapping[str, str], planned_ranks: int) -> RankInfo:
        """Read the launcher's environment variables. Raise LaunchError if they do not fit the plan."""
        how = f"torchrun --nproc-per-node {planned_ranks} -m train_entry ATTEMPT_DIR --out DIR"
        if "RANK" not in environ or "WORLD_SIZE" not in environ:
            if planned_ranks == 1:
                return cls(rank=0, ranks=1, local_rank=0, init_method="env://")
            raise LaunchError(
                f"the plan has {planned_ranks} ranks, but RANK is not set; launch it with: {how}"
            )
        ranks = int(environ["WORLD_SIZE"])
        if ranks != planned_ranks:
            raise LaunchError(
                f"the plan has {planned_ranks} ranks, but WORLD_SIZE is {ranks}; launch it with: {how}"
            )
        rank = int(environ["RANK"])
        return cls(
            rank=rank,
            ranks=ranks,
            local_rank=int(environ.get("LOCAL_RANK", rank)),
            init_method=environ.get("SHARDSWEEP_RENDEZVOUS", "env://"),
        )

    def device(self, kind: str) -> torch.device:
        """Return the rank's own device and make it current, so that nothing lands on GPU 0 by accident."""
        import torch  # takes seconds, which belong to the phase `imports`

        if kind == "cpu":
            torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
            return torch.device("cpu")
        # With some launchers a rank sees all GPUs of its host, with others only its own.
        device = torch.device("cuda", self.local_rank % max(1, torch.cuda.device_count()))
        torch.cuda.set_device(device)
        # DeepSpeed takes its device from this variable, without the modulus.
        os.environ["LOCAL_RANK"] = str(device.index)
        return device


def prepare_process(where: RankInfo, device_kind: str, expandable_segments: bool = False) -> None:
    """Set the variables that libraries read at import, and let this process die with its parent."""
    prepare_extensions()
    if device_kind == "cuda":
        set_segments(os.environ, version("torch"), expandable_segments)
    die_with_parent()
    os.environ["DS_ACCELERATOR"] = device_kind  # otherwise DeepSpeed guesses, and warns on a CPU
    os.environ["LOCAL_RANK"] = str(where.local_rank)  # DeepSpeed requires it
    if where.ranks == 1:  # a single rank meets no others: any free port will do
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "0")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is local; a compute node may have no network
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def set_segments(environ: MutableMapping[str, str], torch_version: str, expandable: bool) -> None:
    """Set whether torch's CUDA allocator uses expandable segments. Keep the user's other settings for it."""
    release = tuple(int(part) for part in torch_version.split(".")[:2])
    old, new = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"  # torch 2.9 renamed it, and warns of the old
    asked = environ.pop(old, "")
    if release >= (2, 9):
        asked = environ.get(new) or asked
    if not expandable and "expandable_segments" not in asked:
        ours = ""  # off is torch's default
    else:
        ours = f"expandable_segments:{expandable}"  # of contradicting settings the last counts
    if words := ",".join(filter(None, (asked, ours))):
        environ[new if release >= (2, 9) else old] = words


def die_with_parent() -> None:
    """Ask Linux to kill this process when its parent ends, so that no rank is orphaned."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    supervisor = os.environ.get("SHARDSWEEP_SUPERVISOR")
    if supervisor is not None and os.getppid() != int(supervisor):  # it ended before the prctl call
        raise SystemExit("the supervisor is gone")


def dump_stacks_on_signal(path: Path) -> None:
    """Write the stacks of all threads to `path` on SIGUSR1, and to the log on a fatal signal.

    A Python signal handler would not do: it waits for C++ code to return, and a stuck collective never does.
    """
    faulthandler.enable()  # DeepSpeed's C++ code aborts, for example if the disk it offloads to is full
    file = path.open("w")  # stays open as long as the process lives: faulthandler keeps a reference
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)


def process_age_s() -> float:
    """Return the seconds since this process was started, the interpreter's own start included."""
    # Field 22 of proc(5) stat, counted from the closing parenthesis, since a process name may hold spaces.
    after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started_s = int(after_name[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
