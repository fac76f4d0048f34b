"""Where this process stands among its peers, and what it needs before anything heavy is imported.

No torch at module level: a wrong launch is refused in milliseconds.
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
    """This process was not started as the plan needs; the message says how to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankInfo:
    """One process of a job."""

    rank: int
    ranks: int
    local_rank: int  # among those of this host
    init_method: str  # where the ranks meet: a torch.distributed URL

    @classmethod
    def from_env(cls, environ: Mapping[str, str], planned_ranks: int) -> RankInfo:
        """Read what the launcher set. Raises LaunchError where that is not what the plan asks for."""
        how = f"torchrun --nproc-per-node {planned_ranks} -m train_entry ATTEMPT_DIR --out DIR"
        if "RANK" not in environ or "WORLD_SIZE" not in environ:
            if planned_ranks == 1:
                return cls(rank=0, ranks=1, local_rank=0, init_method="env://")
            raise LaunchError(
                f"the plan has {planned_ranks} ranks and RANK is not set; launch it with: {how}"
            )
        ranks = int(environ["WORLD_SIZE"])
        if ranks != planned_ranks:
            raise LaunchError(
                f"the plan has {planned_ranks} ranks and WORLD_SIZE is {ranks}; launch it with: {how}"
            )
        rank = int(environ["RANK"])
        return cls(
            rank=rank,
            ranks=ranks,
            local_rank=int(environ.get("LOCAL_RANK", rank)),
            init_method=environ.get("SHARDSWEEP_RENDEZVOUS", "env://"),
        )

    def device(self, kind: str) -> torch.device:
        """The rank's own; made current, so that nothing lands on GPU 0 by accident."""
        import torch  # seconds; the phase `imports` accounts for it

        if kind == "cpu":
            torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
            return torch.device("cpu")
        # Launchers differ in whether a rank sees all cards of its host or only its own.
        device = torch.device("cuda", self.local_rank % max(1, torch.cuda.device_count()))
        torch.cuda.set_device(device)
        # DeepSpeed takes its device from this variable, without the modulus.
        os.environ["LOCAL_RANK"] = str(device.index)
        return device


def prepare_process(where: RankInfo, device_kind: str, expandable_segments: bool = False) -> None:
    """Set what libraries read while they are imported, and tie this process to its parent."""
    prepare_extensions()
    if device_kind == "cuda":
        set_segments(os.environ, version("torch"), expandable_segments)
    die_with_parent()
    os.environ["DS_ACCELERATOR"] = device_kind  # else DeepSpeed guesses, and warns on a CPU
    os.environ["LOCAL_RANK"] = str(where.local_rank)  # DeepSpeed insists on it
    if where.ranks == 1:  # it meets nobody, at any free port
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "0")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is local; a compute node may have no network
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def set_segments(environ: MutableMapping[str, str], torch_version: str, expandable: bool) -> None:
    """Let torch's CUDA allocator grow its segments, or not, beside whatever else the user asks of it."""
    release = tuple(int(part) for part in torch_version.split(".")[:2])
    old, new = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"  # torch 2.9 renamed it, and warns of the old
    asked = environ.pop(old, "")
    if release >= (2, 9):
        asked = environ.get(new) or asked
    if not expandable and "expandable_segments" not in asked:
        ours = ""  # off is torch's default
    else:
        ours = f"expandable_segments:{expandable}"  # the last word counts
    if words := ",".join(filter(None, (asked, ours))):
        environ[new if release >= (2, 9) else old] = words


def die_with_parent() -> None:
    """Ask Linux to kill this process when the one that started it is gone, so that no rank is orphaned."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    supervisor = os.environ.get("SHARDSWEEP_SUPERVISOR")
    if supervisor is not None and os.getppid() != int(supervisor):  # it ended before the kernel knew
        raise SystemExit("the supervisor is gone")


def dump_stacks_on_signal(path: Path) -> None:
    """On SIGUSR1 write the stacks of all threads to `path`; on a fatal signal, to the log.

    Not a Python handler: that would wait until a collective stuck in C++ returns, which is never.
    """
    faulthandler.enable()  # DeepSpeed's C++ aborts, as when the disk it offloads to is full
    file = path.open("w")  # stays open as long as the process lives; faulthandler keeps a reference
    faulthandler.register(signal.SIGUSR1, file=file, all_threads=True)


def process_age_s() -> float:
    """Seconds since this process was started, its interpreter's own start included."""
    # Field 22 of proc(5) stat, counted behind the parenthesis since a process name may hold spaces.
    after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started_s = int(after_name[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
