"""Check a configuration against the cluster before anything is submitted, and report all problems at once."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sweeps.cluster.slots import Layout
from sweeps.cluster.slurm.queries import SINFO, NodeFacts, SlurmError, SlurmSilence, ask, parse_sinfo
from sweeps.cluster.slurm.request import Site, memory, minutes, submitit_parameters
from sweeps.cluster.slurm.submit import Executor
from sweeps.config.schema import ClusterConfig, LimitsConfig
from sweeps.errors import ConfigError
from sweeps.machine import Gpu, Machine
from train_entry.contract import GIB, TimeLimits

# A constraint that demands all of its features; only Slurm can judge any other.
PLAIN_FEATURES = re.compile(r"[\w.&,+-]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class Survey:
    """The nodes that a configuration selects."""

    nodes: tuple[NodeFacts, ...]
    device: str
    longest_min: int | None  # the partition's time limit
    gpu_type: str | None = None  # the type that counts on a node with several; None: all

    def host(self, gpu: Gpu | None) -> Machine:
        """The least that each of the nodes offers to jobs. `gpu`: one of its GPUs, if known."""
        count = self.gpus_per_node if self.device == "cuda" else 0
        cores = min(node.cores for node in self.nodes)
        card = gpu or Gpu(index=0, uuid="", name="GPU", memory_bytes=2**50)  # not known yet
        return Machine(
            device=self.device,
            nodes=len(self.nodes),
            ranks_per_node=count or cores,
            gpus=tuple(
                Gpu(
                    index=index,
                    uuid=f"gpu-{index}",
                    name=card.name,
                    memory_bytes=card.memory_bytes,
                    capability=card.capability,
                )
                for index in range(count)
            ),
            cores=cores,
            host_memory_bytes=min(node.memory_bytes for node in self.nodes),
        )

    @property
    def gpus_per_node(self) -> int:
        """The number of GPUs on a node that trials may have."""
        return min(_gpus(node, self.gpu_type) for node in self.nodes)

    @property
    def gpus_on_node(self) -> int | None:
        """The number of GPUs on a node, whoever uses them; None on CPUs."""
        return max(node.gpu_count for node in self.nodes) if self.device == "cuda" else None


def survey(cluster: ClusterConfig) -> Survey:
    """Find the nodes. Raises ConfigError with every key that contradicts the cluster."""
    try:
        nodes = parse_sinfo(ask("sinfo", "--noheader", "--Node", "-o", SINFO))
    except SlurmError as error:
        raise ConfigError(f"cluster=slurm: {error}") from error
    inside = [
        node
        for node in nodes
        if (node.partition == cluster.partition if cluster.partition else node.is_default)
    ]
    if not inside:
        raise ConfigError(_no_partition(cluster, nodes))
    device = _device(cluster, inside)
    excluded = _excluded(cluster.exclude)
    chosen = [node for node in inside if node.name not in excluded and _suits(node, cluster, device)]
    problems = list(_problems(cluster, inside, chosen, device))
    if problems:
        raise ConfigError(problems)
    return Survey(
        nodes=tuple(chosen),
        device=device,
        longest_min=inside[0].longest_min,
        gpu_type=cluster.gpu_type,
    )


def _no_partition(cluster: ClusterConfig, nodes: Sequence[NodeFacts]) -> str:
    names = ", ".join(sorted({node.partition for node in nodes})) or "none"
    if cluster.partition is None:
        return f"cluster.partition is not set, and this cluster has no default; it has {names}"
    return f"cluster.partition={cluster.partition}: no such partition; the cluster has {names}"


def _device(cluster: ClusterConfig, nodes: Sequence[NodeFacts]) -> str:
    if cluster.device != "auto":
        return cluster.device
    return "cuda" if any(node.gpu_count for node in nodes) else "cpu"


def _suits(node: NodeFacts, cluster: ClusterConfig, device: str) -> bool:
    if not node.is_up:
        return False
    if cluster.constraint and PLAIN_FEATURES.fullmatch(cluster.constraint):
        if not set(re.split("[&,]", cluster.constraint)) <= node.features:
            return False
    if device == "cpu":
        return node.cores >= (cluster.gpus_per_node or 1)
    return _gpus(node, cluster.gpu_type) >= (cluster.gpus_per_node or 1)


def _gpus(node: NodeFacts, gpu_type: str | None) -> int:
    return node.gpus.get(gpu_type, 0) if gpu_type else node.gpu_count


def _excluded(names: str | None) -> Collection[str]:
    """The names of the excluded nodes. Only Slurm can expand a range like n[1-3]. Raises ConfigError."""
    if names is None or "[" not in names:
        return (names or "").split(",")
    try:
        return ask("scontrol", "show", "hostnames", names).split()
    except SlurmError as error:
        raise ConfigError(f"cluster.exclude={names}: {error}") from error


def _problems(
    cluster: ClusterConfig, inside: Sequence[NodeFacts], chosen: Sequence[NodeFacts], device: str
) -> Iterator[str]:
    where = f"partition {inside[0].partition}"
    if len(chosen) < cluster.nodes:
        wanted = _wanted(cluster, device)
        yield f"cluster.nodes={cluster.nodes}: {where} has {len(chosen)} nodes that are up{wanted}"
    if device == "cuda":
        yield from _unlike(cluster, chosen, where)
    longest = inside[0].longest_min
    if cluster.time_min and longest is not None and cluster.time_min > longest:
        yield f"cluster.time_min={cluster.time_min}: {where} allows {longest} minutes at most"
    most = max((node.memory_bytes for node in chosen), default=0) / GIB
    if cluster.memory_gib and chosen and cluster.memory_gib > most:
        yield f"cluster.memory_gib={cluster.memory_gib:g}: nodes of {where} have {most:.1f} GiB"


def _unlike(cluster: ClusterConfig, chosen: Sequence[NodeFacts], where: str) -> Iterator[str]:
    """Problems with unlike nodes: trials on different GPUs do not compare; the slowest GPU sets the pace."""
    types = {kind for node in chosen for kind in node.gpus}
    only_slurm_knows = cluster.constraint and not PLAIN_FEATURES.fullmatch(cluster.constraint)
    if len(types) > 1 and cluster.gpu_type is None and not only_slurm_knows:
        names = " and ".join(sorted(kind or "some that have no type" for kind in types))
        yield f"cluster.gpu_type is not set, and {where} has GPUs of types {names}; choose one"
        return
    counts = {_gpus(node, cluster.gpu_type) for node in chosen}
    if len(counts) > 1 and cluster.gpus_per_node is None:
        numbers = " and ".join(str(count) for count in sorted(counts))
        yield f"cluster.gpus_per_node: {where} has nodes with {numbers} GPUs; set how many to use"


def _wanted(cluster: ClusterConfig, device: str) -> str:
    words = []
    if cluster.gpus_per_node:
        words.append(f"{cluster.gpus_per_node} {'GPUs' if device == 'cuda' else 'cores'} or more")
    elif device == "cuda":
        words.append("GPUs")
    if cluster.gpu_type:
        words.append(f"of type {cluster.gpu_type}")
    if cluster.constraint:
        words.append(f"the features {cluster.constraint}")
    if cluster.exclude:
        words.append(f"names other than {cluster.exclude}")
    return f" and have {', '.join(words)}" if words else ""


def require_acceptable(site: Site, ranks: int, limits: LimitsConfig) -> None:
    """Let sbatch judge a trial's job without submitting it. Raises ConfigError with Slurm's words."""
    layout = Layout.of(ranks, site.machine.ranks_per_node)
    time_limits = TimeLimits(
        attempt_s=limits.attempt_s,
        startup_s=limits.startup_s,
        startup_silence_s=limits.startup_silence_s,
        step_silence_s=limits.step_silence_s,
    )
    with tempfile.TemporaryDirectory(prefix="shardsweep-") as folder:
        executor = Executor(Path(folder))
        executor.update_parameters(
            **submitit_parameters(site, layout, "shardsweep", ""),
            time=minutes(site, time_limits, None),
            mem=memory(site, layout, None),
        )
        script = Path(folder) / "job.sh"
        script.write_text(executor.script(), encoding="utf-8")
        try:
            ask("sbatch", "--test-only", str(script))
        except SlurmSilence as error:
            raise ConfigError(f"cluster=slurm: {error}") from error
        except SlurmError as error:
            raise ConfigError(f"cluster=slurm: sbatch refuses such jobs: {error}") from error
