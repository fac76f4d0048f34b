"""What Slurm is asked for: how many nodes, tasks, GPUs, minutes and bytes a trial takes. Pure."""

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

# Of the time that the estimate expects for the steps: it may be off by a factor of a few on unknown nodes.
RUN_FACTOR = 10.0
RUN_LEAST_S = 300.0
ENDING_S = 180.0  # our own limits end a job first; Slurm looks at its limits twice a minute
MEMORY_FACTOR = 1.5  # of the estimate's resident memory, and so much for each rank beside
MEMORY_BESIDE_BYTES = 2 * GIB
WARNING_S = 30  # before the end of its time a job hears of it


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """What all jobs of a study share."""

    cluster: ClusterConfig
    machine: Machine
    longest_min: int | None = None  # the partition's limit; None: none
    gpus_on_node: int | None = None  # whoever uses them; None: no more than ours
    ops: str | None = None  # where DeepSpeed's operators lie, compiled; None: not known yet
    ops_cpu: str | None = None  # for processors of this signature

    @property
    def slots_on_node(self) -> int:
        """More than ours where the configuration takes a part of a node's GPUs."""
        return max(self.gpus_on_node or 0, self.machine.ranks_per_node)

    @property
    def cores_per_rank(self) -> int:
        """Its share of the node's; of a node that is all ours, all are shared by our ranks."""
        sharing = self.machine.ranks_per_node if self.cluster.exclusive else self.slots_on_node
        return self.cluster.cpus_per_rank or max(1, self.machine.cores // sharing)


def submitit_parameters(site: Site, layout: Layout, name: str, comment: str) -> dict[str, Any]:
    """Those of submitit's SlurmExecutor that no single trial changes: where, how many, under what name."""
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
        # srun does not take over how many cores a task has: Slurm 22.05's release notes.
        "srun_args": [f"--cpus-per-task={cores}", *cluster.srun_args],
        "additional_parameters": {
            "no-requeue": True,  # the next attempt is ours to open
            **({} if layout.is_even else {"ntasks": layout.ranks, "distribution": "block"}),
            **arguments(cluster.sbatch_args),
        },
    }
    return {key: value for key, value in parameters.items() if value is not None}


def trial_parameters(site: Site, spec: TrialSpec, comment: str) -> dict[str, Any]:
    """All of them, for one attempt."""
    layout = Layout.of(spec.plan.ranks, site.machine.ranks_per_node)
    return {
        **submitit_parameters(site, layout, job_name(spec), comment),
        "time": minutes(site, spec.limits, spec.expected.steps_s if spec.expected else None),
        "mem": memory(site, layout, spec.expected.host_bytes if spec.expected else None),
    }


def job_name(spec: TrialSpec) -> str:
    return f"{spec.study}/{spec.trial:04d}/{spec.attempt}"


def minutes(site: Site, limits: TimeLimits, steps_s: float | None) -> int:
    """How long the job may take: less is started sooner, and too little would end a good trial."""
    if site.cluster.time_min is not None:
        return site.cluster.time_min
    run_s = limits.attempt_s
    if steps_s is not None:
        run_s = min(run_s, max(RUN_LEAST_S, RUN_FACTOR * steps_s))
    wanted = math.ceil((limits.startup_s + run_s + ENDING_S) / 60)
    return wanted if site.longest_min is None else min(wanted, site.longest_min)


def memory(site: Site, layout: Layout, host_bytes: int | None) -> str:
    """Of a node, as Slurm writes it; 0 is all of it."""
    cluster, has_bytes = site.cluster, site.machine.host_memory_bytes
    if cluster.memory_gib is not None:
        return f"{math.ceil(cluster.memory_gib * GIB / MIB)}M" if cluster.memory_gib else "0"
    if cluster.exclusive or host_bytes is None:  # nobody else is there to use it
        return "0"
    wanted = MEMORY_FACTOR * host_bytes + layout.tasks_per_node * MEMORY_BESIDE_BYTES
    return f"{math.ceil(min(wanted, has_bytes or wanted) / MIB)}M"


def setup_lines(site: Site) -> list[str]:
    """Shell lines before the ranks start: what they need to know, then the user's own."""
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
    """`--name=value` and `--name` as submitit takes them."""
    pairs = (argument.lstrip("-").partition("=") for argument in given)
    return {name: value if equals else True for name, equals, value in pairs}


def gpus(cluster: ClusterConfig, layout: Layout) -> str:
    count = str(layout.tasks_per_node)
    return f"{cluster.gpu_type}:{count}" if cluster.gpu_type else count
