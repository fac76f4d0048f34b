"""Compute the request of a held allocation and of a trial in it, and what its end means to a trial. Pure."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sweeps.cluster.slots import Layout
from sweeps.cluster.slurm.queries import JobFacts
from sweeps.cluster.slurm.request import Site, gpus, job_name, memory, submitit_parameters
from sweeps.cluster.slurm.states import KINDS
from sweeps.config.schema import ClusterConfig
from sweeps.errors import ConfigError
from train_entry.contract import GIB, MIB, AttemptDir, FailureKind, SchedulerWord, StudyDir, TrialSpec

HOLD_MIN = 480
LONGER = 2.0  # times the longest trial so far plus the expected steps: trials differ
ENDING_S = 60.0  # Slurm warns trials, and ends them, before the last moment
PART_OF_MEMORY = 0.95  # of a node's memory, for all steps side by side: Slurm keeps some
# Final states of an allocation that say nothing about the trials in it.
TAKEN_BACK = ("TIMEOUT", "DEADLINE", "CANCELLED", "PREEMPTED", "REVOKED", "COMPLETED", "GONE")


def require_holdable(cluster: ClusterConfig, ranks: int, ranks_per_node: int) -> None:
    """Raise ConfigError if the allocations do not divide the nodes, or are too small for a trial."""
    problems = []
    if cluster.nodes % cluster.holds:
        problems.append(f"cluster.holds={cluster.holds}: does not divide cluster.nodes={cluster.nodes}")
    elif ranks > (fits := cluster.nodes // cluster.holds * ranks_per_node):
        problems.append(
            f"ranks={ranks}: an allocation of {cluster.nodes // cluster.holds} nodes holds {fits}; "
            "use fewer ranks, more cluster.nodes, or fewer cluster.holds"
        )
    if problems:
        raise ConfigError(problems)


def hold_minutes(site: Site) -> int:
    wanted = site.cluster.hold_min or HOLD_MIN
    return wanted if site.longest_min is None else min(wanted, site.longest_min)


def hold_name(study: StudyDir, index: int) -> str:
    return f"{study.path.name}/hold-{index}"


def hold_layout(site: Site) -> Layout:
    nodes = site.cluster.nodes // site.cluster.holds
    return Layout(ranks=nodes * site.machine.ranks_per_node, nodes=nodes)


def hold_parameters(site: Site, name: str, directory: Path) -> dict[str, Any]:
    """submitit's parameters for a job that holds nodes: one process on the first node, no step of its own."""
    layout = hold_layout(site)
    return {
        **submitit_parameters(site, layout, name, str(directory.resolve())),
        "use_srun": False,
        "time": hold_minutes(site),
        "mem": memory(site, layout, None),
    }


def step_name(attempt: AttemptDir) -> str:
    return f"{attempt.path.parent.name}.{attempt.path.name}"


def hold_of(slots: Sequence[str]) -> int:
    """The index of the allocation, from slots `hold-INDEX.node-NODE/SLOT`; -1 if they lie in none."""
    head = slots[0].partition(".")[0] if slots else ""
    number = head.removeprefix("hold-")
    return int(number) if number.isdigit() else -1


def nodes_of(slots: Sequence[str]) -> list[int]:
    """The nodes of slots `hold-INDEX.node-NODE/SLOT`, each once."""
    nodes = (slot.partition(".node-")[2].partition("/")[0] for slot in slots)
    return list(map(int, dict.fromkeys(nodes)))


def step_command(
    site: Site, spec: TrialSpec, attempt: AttemptDir, job_id: str, hosts: Sequence[str]
) -> tuple[str, ...]:
    """The command that runs the trial as a step of the allocation, on these of its hosts."""
    layout = Layout.of(spec.plan.ranks, site.machine.ranks_per_node)
    return (
        "srun",
        f"--jobid={job_id}",
        f"--job-name={job_name(spec)}",
        f"--nodes={layout.nodes}",
        f"--nodelist={','.join(hosts)}",
        f"--ntasks={layout.ranks}",
        f"--ntasks-per-node={layout.tasks_per_node}",
        "--distribution=block",
        f"--cpus-per-task={site.cores_per_rank}",
        "--exact",  # other steps may run beside it
        "--wait=0",
        "--kill-on-bad-exit=0",
        "--unbuffered",
        *_share(site, layout),
        *site.cluster.srun_args,
        *(sys.executable, "-P", "-m", "sweeps.cluster.node.supervisor", str(attempt.path.resolve())),
    )


def _share(site: Site, layout: Layout) -> list[str]:
    """The step's GPUs on each node, and its part of the memory if it does not fill the node."""
    cluster, machine, tasks = site.cluster, site.machine, layout.tasks_per_node
    found = []
    if machine.device == "cuda":
        found.append(f"--gpus-per-node={gpus(cluster, layout)}")
    has_bytes = cluster.memory_gib * GIB if cluster.memory_gib else machine.host_memory_bytes
    if tasks < machine.ranks_per_node and has_bytes:
        part = has_bytes * tasks / machine.ranks_per_node * PART_OF_MEMORY
        found.append(f"--mem={math.floor(part / MIB)}M")
    return found


def needed_s(site: Site, spec: TrialSpec, longest_s: float) -> float:
    """The time that an allocation must still last for a trial to begin in it."""
    limits = spec.limits
    if not longest_s:  # nothing is known yet
        wanted = limits.startup_s + limits.attempt_s
    else:
        wanted = LONGER * (longest_s + (spec.expected.steps_s if spec.expected else 0.0))
    return min(wanted, 60 * hold_minutes(site) / 2) + ENDING_S


def never_started(job_id: str, waited_s: float) -> SchedulerWord:
    """The scheduler's word on a trial whose step started none of its supervisors."""
    return SchedulerWord(
        scheduler="Slurm",
        job_id=job_id,
        state="STEP NOT STARTED",
        kind=FailureKind.NODE_LOST,
        detail=f"srun started none of its ranks within {waited_s:.0f} s (limits.startup_s)",
    )


def hold_word(final: JobFacts, had_its_time: bool) -> SchedulerWord:
    """The scheduler's word on a trial that ran in an allocation when that ended.

    A trial that had the time it needs and was not done is too slow. With less time, it is not to blame.
    """
    kind = (
        FailureKind.PREEMPTED if final.state in TAKEN_BACK else KINDS.get(final.state, FailureKind.NODE_LOST)
    )
    if final.state in ("TIMEOUT", "DEADLINE") and had_its_time:
        kind = FailureKind.TIMED_OUT
    if final.state == "FAILED":  # the holder failed, not the trial
        kind = FailureKind.NODE_LOST
    return SchedulerWord(
        scheduler="Slurm",
        job_id=final.job_id,
        state=final.state,
        kind=kind,
        detail="the allocation that it ran in has ended",
    )
