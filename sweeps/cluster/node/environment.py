"""Environment variables of another job or launch, which must not reach the ranks of ours."""

from __future__ import annotations

import re

# A surrounding job's variables would place our jobs in it. Those in KEPT only tell how to reach Slurm.
FOREIGN = re.compile(r"(SLURM|SLURMD|SBATCH|SRUN|SALLOC|SUBMITIT)_")
KEPT = ("SLURM_CONF", "SLURM_JWT")
FOREIGN_LAUNCHERS = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "CROSS_SIZE",
    "CROSS_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
)


def is_foreign(name: str) -> bool:
    """True if a variable describes another job or launch than the one to come."""
    return (bool(FOREIGN.match(name)) and name not in KEPT) or name in FOREIGN_LAUNCHERS
