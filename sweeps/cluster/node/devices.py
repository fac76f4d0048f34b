"""Find this host's GPUs, and those of them that we may use. The only module that imports pynvml."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from sweeps.cluster.node.facilities import (
    cpu_has_fp16,
    find_nvme,
    has_flash_attention,
    has_libaio,
    host_memory_bytes,
)
from sweeps.config.schema import ClusterConfig, GateConfig
from sweeps.errors import ConfigError
from sweeps.machine import Gpu, Machine
from train_entry.contract import GIB


def find_gpus(environment: Mapping[str, str] = os.environ) -> tuple[Gpu, ...]:
    """The GPUs that CUDA_VISIBLE_DEVICES selects; all if it is unset, none without a driver."""
    return visible(_nvml_gpus(), environment.get("CUDA_VISIBLE_DEVICES"))


def visible(gpus: Sequence[Gpu], setting: str | None) -> tuple[Gpu, ...]:
    """Return the GPUs that CUDA would show for `setting`, a list of indices or UUID prefixes.

    Like CUDA, keep the order of the setting and stop at its first unknown or ambiguous name.
    """
    if setting is None:
        return tuple(gpus)
    chosen: list[Gpu] = []
    for name in (part.strip() for part in setting.split(",")):
        matching = [gpu for gpu in gpus if name and gpu.uuid.startswith(name)]
        if name.isdigit() and int(name) < len(gpus):
            matching = [gpus[int(name)]]
        if len(matching) != 1:
            break
        chosen += matching
    return tuple(chosen)


def detect(cluster: ClusterConfig, gate: GateConfig | None = None) -> Machine:
    """This host as the configuration wants it used. Raises ConfigError where that is impossible.

    `gate` is given where plans will be judged: its headroom is checked against the GPUs' memory.
    """
    gpus = () if cluster.device == "cpu" else find_gpus()
    if not gpus and (cluster.device == "cuda" or (cluster.device == "auto" and _are_misnamed(os.environ))):
        raise ConfigError(
            f"cluster.device={cluster.device}: no GPU is visible; see nvidia-smi, and "
            "CUDA_VISIBLE_DEVICES (whole GPUs, by index or UUID); or set cluster.device=cpu"
        )
    return as_wanted(host_with(gpus, cluster.nvme_path), cluster, gate)


def host_with(gpus: Sequence[Gpu], nvme_path: str | None) -> Machine:
    """This whole host, with these of its GPUs."""
    cores = len(os.sched_getaffinity(0))
    return Machine(
        device="cuda" if gpus else "cpu",
        nodes=1,
        ranks_per_node=len(gpus) or cores,
        gpus=tuple(gpus),
        cores=cores,
        host_memory_bytes=host_memory_bytes(),
        nvme=find_nvme(nvme_path),
        has_libaio=has_libaio(),
        has_fp16=bool(gpus) or cpu_has_fp16(),
        has_flash_attention=has_flash_attention(),
    )


def as_wanted(host: Machine, cluster: ClusterConfig, gate: GateConfig | None = None) -> Machine:
    """The part of such hosts that the configuration uses. Raises ConfigError if they have less."""
    if not host.gpus:
        require_memory_limits(cluster, gate, ())
        return dataclasses.replace(
            host, nodes=cluster.nodes, ranks_per_node=cluster.gpus_per_node or host.cores
        )
    (name, alike), *_ = Counter(gpu.name for gpu in host.gpus).most_common(1)  # a study uses one GPU model
    if cluster.gpus_per_node and cluster.gpus_per_node > alike:
        raise ConfigError(
            f"cluster.gpus_per_node={cluster.gpus_per_node}: only {alike} GPUs of one model are visible"
        )
    count = cluster.gpus_per_node or alike
    ours = tuple(gpu for gpu in host.gpus if gpu.name == name)[:count]
    require_memory_limits(cluster, gate, ours)
    return dataclasses.replace(host, nodes=cluster.nodes, ranks_per_node=count, gpus=ours)


def require_memory_limits(cluster: ClusterConfig, gate: GateConfig | None, gpus: Sequence[Gpu]) -> None:
    """Raise ConfigError where a memory limit would have no effect, or would leave no memory."""
    limit_gib, headroom_gib = cluster.memory_limit_gib, gate.headroom_gib if gate else 0.0
    problems = _limits_of_gpus(limit_gib, headroom_gib, gpus) if gpus else _limits(limit_gib, headroom_gib)
    if problems:
        raise ConfigError(problems)


def _limits_of_gpus(limit_gib: float | None, headroom_gib: float, gpus: Sequence[Gpu]) -> list[str]:
    card_gib = min(gpu.memory_bytes for gpu in gpus) / GIB
    has = f"{gpus[0].name} has {card_gib:.1f} GiB"
    problems = []
    if limit_gib is not None and limit_gib > card_gib:
        problems.append(f"cluster.memory_limit_gib={limit_gib:g}: {has}; null uses all of it")
    if headroom_gib >= card_gib:
        problems.append(f"gate.headroom_gib={headroom_gib:g}: {has}, so no memory would be left; lower it")
    elif limit_gib is not None and limit_gib <= headroom_gib:
        problems.append(
            f"gate.headroom_gib={headroom_gib:g}: nothing would be left of "
            f"cluster.memory_limit_gib={limit_gib:g} ({has}); lower it"
        )
    return problems


def _limits(limit_gib: float | None, headroom_gib: float) -> list[str]:
    """Problems with limits that are set although there are no GPUs."""
    why = "it applies to GPUs; on a CPU ranks share the host's memory"
    problems = []
    if limit_gib is not None:
        problems.append(f"cluster.memory_limit_gib={limit_gib:g}: {why}; leave it at null")
    if headroom_gib > 0:
        problems.append(f"gate.headroom_gib={headroom_gib:g}: {why}; leave it at 0")
    return problems


def _are_misnamed(environment: Mapping[str, str]) -> bool:
    """True if CUDA_VISIBLE_DEVICES names GPUs although none was found. Empty or -1 hides them on purpose."""
    return environment.get("CUDA_VISIBLE_DEVICES", "") not in ("", "-1")


def _nvml_gpus() -> list[Gpu]:
    import pynvml  # only here, so that a machine without it can still run on CPU

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return [
            Gpu(
                index=index,
                uuid=str(pynvml.nvmlDeviceGetUUID(handle)),
                name=str(pynvml.nvmlDeviceGetName(handle)),
                memory_bytes=_memory_bytes(pynvml, handle),
                capability=_capability(pynvml.nvmlDeviceGetCudaComputeCapability(handle)),
            )
            for index, handle in enumerate(handles)
        ]
    finally:
        pynvml.nvmlShutdown()


def _memory_bytes(pynvml: Any, handle: Any) -> int:
    """The memory that CUDA can allocate: the driver reserves part of the total, 0.6 GiB on an H200."""
    try:
        info = pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2)
        return int(info.total - info.reserved)
    except (pynvml.NVMLError, AttributeError):  # an older driver or pynvml does not report it
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)


def _capability(pair: Sequence[int]) -> tuple[int, int]:
    major, minor = pair
    return int(major), int(minor)
