"""Which cluster a configuration means, and what machine it is. Wiring, so that sweep.py stays short."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from sweeps.cluster import held, hostfile, local, slurm
from sweeps.cluster.base import Cluster
from sweeps.cluster.devices import as_wanted, detect
from sweeps.cluster.held_request import hold_layout, hold_minutes, require_holdable
from sweeps.cluster.host_check import find_hosts, find_machine
from sweeps.cluster.probe import Probe, ask_a_node, known_report, report_path
from sweeps.cluster.slurm_check import Survey, require_acceptable, survey
from sweeps.cluster.slurm_request import Site
from sweeps.config.schema import SweepConfig
from sweeps.errors import ConfigError
from sweeps.machine import Machine
from sweeps.plan import default_ranks
from train_entry.contract import AttemptDir, StudyDir, Submission, read_document


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a study's trials will run."""

    machine: Machine
    site: Site | None = None  # of Slurm
    hosts: hostfile.HostSite | None = None  # of a hostfile


def find_place(config: SweepConfig) -> Place:
    """Look at what the configuration names. Raises ConfigError where it contradicts what is there."""
    if config.cluster.kind == "slurm":
        return _slurm_place(config)
    if config.cluster.kind == "hostfile":
        return _hostfile_place(config)
    return Place(machine=detect(config.cluster, config.gate))


def open_cluster(place: Place, parallel: int, study: StudyDir) -> Cluster:
    if place.site is not None and place.site.cluster.hold:
        return held.HeldCluster(place.site, parallel, study)
    if place.site is not None:
        return slurm.SlurmCluster(place.site, parallel)
    if place.hosts is not None:
        return hostfile.HostfileCluster(place.hosts, place.machine, parallel)
    return local.LocalCluster(place.machine, parallel)


def close_cluster(cluster: Cluster) -> None:
    """Give back what is held for the study, unless trials still run in it."""
    if isinstance(cluster, held.HeldCluster):
        cluster.give_back()


def cancel_attempt(attempt: AttemptDir) -> None:
    """End all processes of an attempt, whoever launched it. Raises SweepError where it cannot."""
    submission = read_document(attempt.submission, Submission)
    if submission is not None and submission.cluster == slurm.NAME:
        slurm.cancel_attempt(attempt)
    elif submission is not None and submission.cluster == held.NAME:
        held.cancel_attempt(attempt)
    elif submission is not None and submission.cluster == hostfile.NAME:
        hostfile.cancel_attempt(attempt)
    else:
        local.cancel_attempt(attempt)


def _hostfile_place(config: SweepConfig) -> Place:
    hosts = find_hosts(config.cluster)
    machine = find_machine(hosts, config.cluster, config.gate, Path(config.studies_dir))
    return Place(machine=machine, hosts=hostfile.HostSite(cluster=config.cluster, hosts=hosts))


def _slurm_place(config: SweepConfig) -> Place:
    cluster = config.cluster
    seen = survey(cluster)
    site = Site(
        cluster=cluster,
        machine=as_wanted(seen.host(None), dataclasses.replace(cluster, memory_limit_gib=None)),
        longest_min=seen.longest_min,
    )
    ranks = config.ranks or default_ranks(site.machine)
    if cluster.hold:
        require_holdable(cluster, ranks, site.machine.ranks_per_node)
        asked = dataclasses.replace(site, cluster=dataclasses.replace(cluster, time_min=hold_minutes(site)))
        require_acceptable(asked, hold_layout(site).ranks, config.limits)
    else:
        require_acceptable(site, ranks, config.limits)
    probe = _probe(config, site, seen)
    machine = as_wanted(_host(probe, seen), cluster, config.gate)
    if cluster.hold:
        machine = dataclasses.replace(machine, nodes_of_a_trial=cluster.nodes // cluster.holds)
    return Place(machine=machine, site=dataclasses.replace(site, machine=machine, ops=probe.ops))


def _probe(config: SweepConfig, site: Site, seen: Survey) -> Probe:
    path = report_path(Path(config.studies_dir), config.cluster, seen)
    if known := known_report(path):
        return known
    if config.dry_run:
        raise ConfigError(
            f"cluster=slurm: nobody has asked a node of {seen.nodes[0].partition} yet what it has; "
            "`python -m sweeps probe` with the same cluster keys does"
        )
    return ask_a_node(path, site, seen)


def _host(probe: Probe, seen: Survey) -> Machine:
    """What the scheduler gives of a node, and what only the node itself could tell."""
    there = seen.host(probe.machine.gpus[0] if probe.machine.gpus else None)
    return dataclasses.replace(
        probe.machine,
        device=there.device,
        nodes=there.nodes,
        ranks_per_node=there.ranks_per_node,
        gpus=there.gpus,
        cores=there.cores,
        host_memory_bytes=there.host_memory_bytes,
    )
