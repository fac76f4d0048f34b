"""Describe machines other than this one: nodes of a GPU given by name, or the machine where a study ran."""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from sweeps.cluster.choose import find_target
from sweeps.cluster.node.devices import detect, find_gpus, require_memory_limits
from sweeps.config.compose import open_composer
from sweeps.config.schema import SweepConfig
from sweeps.errors import ConfigError, SweepError
from sweeps.machine import Gpu, Machine, Nvme
from train_entry.contract import GIB, Measurement, StudyRecord, Trial, gib
from train_entry.contract.shared.cards import card_of

DEFAULT_CARD = "H100"
GPUS_PER_NODE = 8  # in a usual server
# GiB of memory by GPU. Drivers report up to a tenth less than the nominal size if the memory has ECC. The
# first entry found in a GPU's name counts, unless the name itself contains a size: A100-40GB.
MEMORY_GIB = (
    ("B200", 178.0),
    ("H200", 139.8),
    ("H100 NVL", 93.0),
    ("H100", 80.0),
    ("A100", 80.0),
    ("L40S", 45.0),
    ("A10", 22.5),
    ("L4", 22.5),
    ("4090", 24.0),
    ("3090", 24.0),
    ("V100", 16.0),
    ("T4", 15.0),
)


def named_gpu(name: str, memory_gib: float | None) -> Gpu:
    """Return the GPU of this name. Raises ConfigError if its memory is neither known nor given."""
    name = name if card_of(name) else name.upper() if card_of(name.upper()) else name
    size_gib = memory_gib if memory_gib is not None else _memory_gib(name)
    if size_gib is None:
        known = ", ".join(known for known, _ in MEMORY_GIB)
        raise ConfigError(f"--card {name}: not known here; add --memory-gib N, or take one of {known}")
    if size_gib <= 0 or not math.isfinite(size_gib * GIB):
        raise ConfigError(f"--memory-gib {size_gib:g}: give a finite number above 0")
    card = card_of(name)
    capability = None if card is None else (8, 0) if card.has_bf16 else (7, 0)
    return Gpu(index=0, uuid=name, name=name, memory_bytes=round(size_gib * GIB), capability=capability)


def chosen_gpu(name: str | None, memory_gib: float | None) -> tuple[Gpu, str]:
    """Return the GPU that is asked for, else this machine's, else the default; and why it was chosen."""
    if name is not None:
        return named_gpu(name, memory_gib), "as asked"
    here = find_gpus()
    if here:
        size_gib = here[0].memory_bytes / GIB if memory_gib is None else memory_gib
        return named_gpu(here[0].name, size_gib), "this machine's; --card and --memory-gib choose another"
    return (
        named_gpu(DEFAULT_CARD, memory_gib),
        "there is no GPU here; --card and --memory-gib choose another",
    )


def machine_with(gpu: Gpu, ranks_per_node: int, nodes: int, nvme_path: str | None = None) -> Machine:
    """Return nodes full of GPUs of one kind, with all software that any plan needs."""
    where = str(Path(nvme_path).resolve()) if nvme_path else None
    return Machine(
        device="cuda",
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        gpus=(gpu,) * ranks_per_node,
        cores=ranks_per_node,
        nvme=Nvme(path=where, free_bytes=sys.maxsize) if where else None,
        has_libaio=True,
        has_flash_attention=True,
    )


def study_machine(record: StudyRecord, trials: Iterable[Trial], config: SweepConfig) -> tuple[Machine, str]:
    """Return the machine where a study ran, and a note on what is assumed of it; empty if it is this one.

    Raises ConfigError if the GPU's memory is not known.
    """
    cluster, gate = config.cluster, config.gate
    device = record.versions.get("device", "CPU")
    known = list(trials)
    if cluster.kind != "local":
        with suppress(
            SweepError
        ):  # another site, or nodes that were never probed: use what is on record, below
            return find_target(dataclasses.replace(config, dry_run=True)).machine, ""
    ranks = max([_asked_ranks(record), *(trial.plan.ranks for trial in known if trial.plan)])
    if device == "CPU":
        here = detect(dataclasses.replace(cluster, device="cpu"), gate)
        return dataclasses.replace(here, ranks_per_node=max(here.ranks_per_node, ranks)), ""
    if sum(gpu.name == device for gpu in find_gpus()) >= (cluster.gpus_per_node or ranks):
        return detect(cluster, gate), ""
    size_bytes = _seen_bytes(known)
    if size_bytes is None and _memory_gib(device) is None:
        raise ConfigError(
            f"study {record.name} ran on {device}, whose memory is unknown here; "
            "run this command where the study ran"
        )
    gpu = named_gpu(device, size_bytes / GIB if size_bytes else None)
    require_memory_limits(cluster, gate, (gpu,))
    per_node = cluster.gpus_per_node or math.ceil(ranks / cluster.nodes)
    return (
        machine_with(gpu, per_node, cluster.nodes, cluster.nvme_path),
        f"estimated for {device}, {gib(gpu.memory_bytes)} GiB, where the study ran",
    )


def probe_lines(overrides: Sequence[str]) -> Iterator[str]:
    """Yield what a node of the cluster has. A job finds out, unless it is known. Raises ConfigError."""
    config = open_composer(lambda: bool(find_gpus())).with_fixed(["cluster=slurm", *overrides]).compose()
    machine = find_target(config).machine
    memory_gib = (machine.host_memory_bytes or 0) / GIB
    yield f"device:       {machine.ranks_per_node} x {machine.device_name} a node"
    yield f"nodes:        {machine.nodes}, each with {machine.cores} cores and {memory_gib:.1f} GiB"


def _memory_gib(name: str) -> float | None:
    if said := re.search(r"(\d+) ?Gi?B", name):
        return float(said[1])
    return next((size for known, size in MEMORY_GIB if re.search(rf"\b{known}\b", name)), None)


def _asked_ranks(record: StudyRecord) -> int:
    ranks = record.asked.get("ranks")
    return ranks if isinstance(ranks, int) else 1


def _seen_bytes(trials: Iterable[Trial]) -> int | None:
    """Return a GPU's memory in bytes, as a rank measured it; None if no rank did."""
    measured = (trial.outcome for trial in trials if isinstance(trial.outcome, Measurement))
    seen = (rank.device_total_bytes for outcome in measured for rank in outcome.ranks)
    return next((size for size in seen if size), None)
