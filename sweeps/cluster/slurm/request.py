"""Compute what a trial requests from Slurm: nodes, tasks, GPUs, minutes and bytes. Pure."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sweeps.cluster.node.operators import SOURCE, SOURCE_CPU
from sweeps.cluster.node.rendezvous import INTERFACE, PORTS
from sweeps.cluster.slots import Layout
from sweeps.config.schema import ClusterConfig
from sweeps.machine import Machine
from sweeps.paths import ROOT
from train_entry.contract import GIB, MIB, TimeLimits, TrialSpec

# Times the estimated time of the steps, which may be off by a factor of a few on unknown nodes.
RUN_FACTOR = 10.0
RUN_LEAST_S = 300.0
ENDING_S = 180.0  # our own limits end a job first; Slurm checks its limits twice a minute
MEMORY_FACTOR = 1.5  # times the estimated resident memory, plus the following for each rank
MEMORY_BESIDE_BYTES = 2 * GIB
WARNING_S = 30  # Slurm warns a job this long before its time ends


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """The settings that all jobs of a study share."""

    cluster: ClusterConfig
    machine: Machine
    longest_min: int | None = None  # the partition's limit; None: no limit
    gpus_on_node: int | None = None  # whoever uses them; None: no more than ours
    ops: str | None = None  # the directory of DeepSpeed's compiled operators; None: not known yet
    ops_cpu: str | None = None  # the signature of the CPU that they were compiled for

    @property
    def slots_on_node(self) -> int:
        """The number of slots on a node; more than ours if the configuration uses only part of its GPUs."""
        return max(self.gpus_on_node or 0, self.machine.ranks_per_node)

    @property
    def cores_per_rank(self) -> int:
        """A rank's share of the node's cores. If the node is all ours, our ranks share all of them."""
        sharing = self.machine.ranks_per_node if self.cluster.exclusive else self.slots_on_node
        return self.cluster.cpus_per_rank or max(1, self.machine.cores // sharing)


def submitit_parameters(site: Site, layout: Layout, name: str, comment: str) -> dict[str, Any]:
    """Parameters of submitit's SlurmExecutor apart from time and memory: where, how many, under what name."""
    cluster, machine, cores = site.cluster, site.machine, site.cores_per_rank
    parameters = {
        "job_name": name,
        "comment": comment,
        "partition": cluster.partition,
        "account": cluster.account,
        "qos": cluster.qos,
        "constraint": cluster.constraint,
        "exclude": cluster.exclude,
        "exclusive": cluster.exclusive or None,
        "nodes": layout.nodes,
        "ntasks_per_node": layout.tasks_per_node,
        "cpus_per_task": cores,
        "gpus_per_node": gpus(cluster, layout) if machine.device == "cuda" else None,
        "stderr_to_stdout": True,
        "signal_delay_s": WARNING_S,
        "setup": setup_lines(site),
        # srun does not inherit the number of cores of a task: Slurm 22.05's release notes.
        "srun_args": [f"--cpus-per-task={cores}", *cluster.srun_args],
        "additional_parameters": {
            "no-requeue": True,  # we open the next attempt ourselves
            **({} if layout.is_even else {"ntasks": layout.ranks, "distribution": "block"}),
            **arguments(cluster.sbatch_args),
        },
    }
    return {key: value for key, value in parameters.items() if value is not None}


def trial_parameters(site: Site, spec: TrialSpec, comment: str) -> dict[str, Any]:
    """All parameters of submitit's SlurmExecutor for one attempt."""
    layout = Layout.of(spec.plan.ranks, site.machine.ranks_per_node)
    return {
        **submitit_parameters(site, layout, job_name(spec), comment),
        "time": minutes(site, spec.limits, spec.expected.steps_s if spec.expected else None),
        "mem": memory(site, layout, spec.expected.host_bytes if spec.expected else None),
    }


def job_name(spec: TrialSpec) -> str:
    return f"{spec.study}/{spec.trial:04d}/{spec.attempt}"


def minutes(site: Site, limits: TimeLimits, steps_s: float | None) -> int:
    """The job's time limit: a shorter job starts sooner, but a limit too short would end a good trial."""
    if site.cluster.time_min is not None:
        return site.cluster.time_min
    run_s = limits.attempt_s
    if steps_s is not None:
        run_s = min(run_s, max(RUN_LEAST_S, RUN_FACTOR * steps_s))
    wanted = math.ceil((limits.startup_s + run_s + ENDING_S) / 60)
    return wanted if site.longest_min is None else min(wanted, site.longest_min)


def memory(site: Site, layout: Layout, host_bytes: int | None) -> str:
    """The memory to request on each node, as Slurm writes it; 0 means all of it."""
    cluster, has_bytes = site.cluster, site.machine.host_memory_bytes
    if cluster.memory_gib is not None:
        return f"{math.ceil(cluster.memory_gib * GIB / MIB)}M" if cluster.memory_gib else "0"
    if cluster.exclusive or host_bytes is None:  # no other job uses it, or the need is unknown
        return "0"
    wanted = MEMORY_FACTOR * host_bytes + layout.tasks_per_node * MEMORY_BESIDE_BYTES
    return f"{math.ceil(min(wanted, has_bytes or wanted) / MIB)}M"


def setup_lines(site: Site) -> list[str]:
    """Shell lines that run before the ranks start: variables for the ranks, then the user's own lines."""
    variables = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", PORTS: site.cluster.ports}
    if site.cluster.interface:
        variables[INTERFACE] = site.cluster.interface
    if site.ops and site.ops_cpu:
        variables |= {SOURCE: site.ops, SOURCE_CPU: site.ops_cpu}
    if site.machine.device == "cpu":
        variables["CUDA_VISIBLE_DEVICES"] = ""
    exports = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
    path = f"export PYTHONPATH={shlex.quote(str(ROOT))}${{PYTHONPATH:+:$PYTHONPATH}}"
    return [path, *exports, *site.cluster.setup]


def arguments(given: list[str]) -> Mapping[str, Any]:
    """Convert `--name=value` and `--name` to submitit's form."""
    pairs = (argument.lstrip("-").partition("=") for argument in given)
    return {name: value if equals else True for name, equals, value in pairs}


def gpus(cluster: ClusterConfig, layout: Layout) -> str:
    count = str(layout.tasks_per_node)
    return f"{cluster.gpu_type}:{count}" if cluster.gpu_type else count
