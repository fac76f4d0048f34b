"""Open the cluster that a configuration names, and find its machine. Wiring that keeps sweep.py short."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from sweeps.cluster import local
from sweeps.cluster.base import Cluster
from sweeps.cluster.hostfile import jobs as hostfile
from sweeps.cluster.hostfile.check import find_hosts, find_machine
from sweeps.cluster.node.devices import as_wanted, detect
from sweeps.cluster.slurm import held, held_steps
from sweeps.cluster.slurm import jobs as slurm
from sweeps.cluster.slurm.check import Survey, require_acceptable, survey
from sweeps.cluster.slurm.held_request import hold_layout, hold_minutes, require_holdable
from sweeps.cluster.slurm.probe import Probe, ask_a_node, known_report, report_path
from sweeps.cluster.slurm.request import Site
from sweeps.config.schema import SweepConfig
from sweeps.errors import ConfigError, SweepError
from sweeps.machine import Machine
from train_entry.contract import GIB, AttemptDir, StudyDir, Submission, read_document


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """The place where a study's trials will run."""

    machine: Machine
    site: Site | None = None  # set for cluster=slurm
    hosts: hostfile.HostSite | None = None  # set for cluster=hostfile


def find_target(config: SweepConfig) -> Target:
    """Find the machine that the configuration names. Raises ConfigError if it lacks what the keys ask for."""
    if config.cluster.kind == "slurm":
        return _slurm_target(config)
    if config.cluster.kind == "hostfile":
        return _hostfile_target(config)
    return Target(machine=detect(config.cluster, config.gate))


def open_cluster(target: Target, parallel: int, study: StudyDir, say: Callable[[str], None]) -> Cluster:
    """Return the target's cluster, which calls `say` once with each reason that keeps trials waiting."""
    if target.site is not None and target.site.cluster.hold:
        return held.HeldCluster(target.site, parallel, study, say=say)
    if target.site is not None:
        return slurm.SlurmCluster(target.site, parallel, say=say)
    if target.hosts is not None:
        return hostfile.HostfileCluster(target.hosts, target.machine, parallel)
    return local.LocalCluster(target.machine, parallel)


def close_cluster(cluster: Cluster) -> list[str]:
    """Give back the allocations that the study holds, except those in which trials still run.

    Return a line for each allocation that may stay.
    """
    return cluster.give_back() if isinstance(cluster, held.HeldCluster) else []


def cancel_attempts(attempts: Sequence[AttemptDir]) -> list[str]:
    """End all processes of attempts, whoever launched them. Return a line for each that may still run."""
    launched: defaultdict[str, list[AttemptDir]] = defaultdict(list)
    for attempt in attempts:
        submission = read_document(attempt.submission, Submission)
        launched[submission.cluster if submission else ""].append(attempt)
    problems = slurm.cancel_attempts(launched.pop(slurm.NAME, []))
    problems += held_steps.cancel_attempts(launched.pop(held.NAME, []))
    for name, those in launched.items():
        end = hostfile.cancel_attempt if name == hostfile.NAME else local.cancel_attempt
        for attempt in those:
            try:
                end(attempt)
            except SweepError as error:
                problems.append(str(error))
    return problems


def _hostfile_target(config: SweepConfig) -> Target:
    hosts = find_hosts(config.cluster)
    machine = find_machine(hosts, config.cluster, config.gate, Path(config.studies_dir))
    return Target(machine=machine, hosts=hostfile.HostSite(cluster=config.cluster, hosts=hosts))


def _slurm_target(config: SweepConfig) -> Target:
    cluster = config.cluster
    seen = survey(cluster)
    site = Site(
        cluster=cluster,
        machine=as_wanted(seen.host(None), dataclasses.replace(cluster, memory_limit_gib=None)),
        longest_min=seen.longest_min,
        gpus_on_node=seen.gpus_on_node,
    )
    ranks = config.ranks or site.machine.default_ranks
    if cluster.hold:
        require_holdable(cluster, ranks, site.machine.ranks_per_node)
        asked = dataclasses.replace(site, cluster=dataclasses.replace(cluster, time_min=hold_minutes(site)))
        require_acceptable(asked, hold_layout(site).ranks, config.limits)
    else:
        require_acceptable(site, ranks, config.limits)
    probe = _probe(config, site, seen)
    machine = as_wanted(_host(probe, seen, cluster.memory_gib), cluster, config.gate)
    if cluster.hold:
        machine = dataclasses.replace(machine, nodes_of_a_trial=cluster.nodes // cluster.holds)
    return Target(
        machine=machine, site=dataclasses.replace(site, machine=machine, ops=probe.ops, ops_cpu=probe.cpu)
    )


def _probe(config: SweepConfig, site: Site, seen: Survey) -> Probe:
    path = report_path(Path(config.studies_dir), config.cluster, seen)
    if known := known_report(path):
        return known
    if config.dry_run:
        raise ConfigError(
            f"cluster=slurm: no node of {seen.nodes[0].partition} has been probed yet; "
            "run `python -m sweeps probe` with the same cluster keys"
        )
    return ask_a_node(path, site, seen)


def _host(probe: Probe, seen: Survey, memory_gib: float | None) -> Machine:
    """Combine what the scheduler says of a node with what only the node itself could tell."""
    there = seen.host(probe.machine.gpus[0] if probe.machine.gpus else None)
    has_bytes = there.host_memory_bytes
    if memory_gib and has_bytes:  # a job gets no more than it asks for
        has_bytes = min(has_bytes, int(memory_gib * GIB))
    return dataclasses.replace(
        probe.machine,
        device=there.device,
        nodes=there.nodes,
        ranks_per_node=there.ranks_per_node,
        gpus=there.gpus,
        cores=there.cores,
        host_memory_bytes=has_bytes,
    )
