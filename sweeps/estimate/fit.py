"""Decide whether a plan fits before it is launched: compare what it needs with what it may use. Pure."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from sweeps.config.schema import ClusterConfig, GateConfig
from sweeps.errors import ConfigError
from sweeps.estimate.hardware import Hardware
from sweeps.estimate.memory.account import Memory
from sweeps.estimate.memory.model import MemoryFactors, needed_bytes
from sweeps.machine import Machine
from train_entry.contract import GIB, Fit, gib

MEDIAN = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """The memory and disk that each rank and each node may use."""

    device_bytes: int  # of each GPU; on a CPU, the host memory that all ranks of a node share
    counts_context: bool  # device_bytes includes memory outside of torch's allocator
    what: str  # where device_bytes comes from, in the words of the configuration
    is_host: bool = False  # on a CPU: device_bytes are the host's memory
    is_imposed: bool = False  # on each rank, since device_bytes is less than the GPU has
    headroom_bytes: int = 0  # the part of device_bytes to leave free
    host_bytes: int | None = None  # of a node; None: unknown
    nvme_bytes: int | None = None  # free on the node's disk; None: unknown


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """The verdict on whether a plan fits, and the numbers behind it."""

    fit: Fit
    why: str  # empty if it fits
    needed_bytes: int  # of one device, at the gate's quantile
    limit_bytes: int  # of one device


def room_of(cluster: ClusterConfig, gate: GateConfig, machine: Machine) -> Room:
    """Return what a trial may use of the machine. The ranks of a CPU share the host's memory."""
    at_once = -(-(cluster.parallel or machine.nodes) // machine.nodes)  # trials on one node
    host = machine.host_memory_bytes // at_once if machine.host_memory_bytes else None
    nvme = machine.nvme.free_bytes // at_once if machine.nvme else None
    if not machine.gpus:
        return Room(
            device_bytes=host or sys.maxsize,
            counts_context=False,
            what="a rank's share of the host's memory",
            is_host=True,
            host_bytes=host,
            nvme_bytes=nvme,
        )
    card = min(gpu.memory_bytes for gpu in machine.gpus)
    asked = int(cluster.memory_limit_gib * GIB) if cluster.memory_limit_gib else card
    headroom = int(gate.headroom_gib * GIB)
    is_imposed = asked < card
    what = f"cluster.memory_limit_gib={cluster.memory_limit_gib:g}" if is_imposed else machine.device_name
    return Room(
        device_bytes=min(asked, card),
        counts_context=cluster.limit_counts_context or not is_imposed,
        what=f"{what} less gate.headroom_gib={gate.headroom_gib:g}" if headroom else what,
        is_imposed=is_imposed,
        headroom_bytes=headroom,
        host_bytes=host,
        nvme_bytes=nvme,
    )


def require_room(room: Room, hardware: Hardware) -> None:
    """Raise ConfigError if an imposed limit is no larger than CUDA's own context."""
    if room.is_imposed and room.counts_context and room.device_bytes <= hardware.context_bytes:
        raise ConfigError(
            f"{room.what}: CUDA's context alone takes {gib(hardware.context_bytes)} GiB; "
            "raise the limit, or set cluster.limit_counts_context=false"
        )


def judge(memory: Memory, factors: MemoryFactors, room: Room, quantile: float) -> Judgement:
    """Compare what a plan needs with what there is: devices, host memory, disk.

    A plan is borderline if it fits at the median, and only the safety margin exceeds the limit.
    """
    limit = room.device_bytes - room.headroom_bytes
    if room.is_host and room.host_bytes is not None:
        limit = limit * memory.peak_bytes // max(1, memory.host_bytes)
    context = memory.context_bytes if room.counts_context else 0
    needed = needed_bytes(memory, factors, quantile) + context
    likely = needed_bytes(memory, factors, MEDIAN) + context
    problems = [problem for problem in (_host(memory, room), _nvme(memory, room)) if problem]
    fit = Fit.TOO_LARGE if problems else Fit.FITS
    if needed > limit:
        problems.insert(0, _device(memory, room, needed, limit))
        if fit is Fit.FITS:
            fit = Fit.BORDERLINE if likely <= limit else Fit.TOO_LARGE
    return Judgement(fit=fit, why="; ".join(problems), needed_bytes=needed, limit_bytes=limit)


def _device(memory: Memory, room: Room, needed: int, limit: int) -> str:
    fullest = memory.fullest
    where = f" on stage {fullest.stage}" if len(memory.stages) > 1 else ""
    beside = f", {gib(memory.context_bytes)} GiB of it CUDA's context" if room.counts_context else ""
    return f"needs {gib(needed)} GiB{where} ({fullest.peak.phase}{beside}) of {gib(limit)} GiB, {room.what}"


def _host(memory: Memory, room: Room) -> str | None:
    """Return the problem if the states that are kept in host memory exceed it, else None.

    Processes do not count: they share pages, so the sum of their resident memory is more than they need.
    """
    kept = memory.host_bytes - memory.process_bytes
    if room.is_host or room.host_bytes is None or kept <= room.host_bytes:
        return None
    return f"needs {gib(kept)} GiB of the node's {gib(room.host_bytes)} GiB of host memory"


def _nvme(memory: Memory, room: Room) -> str | None:
    if room.nvme_bytes is None or memory.nvme_bytes <= room.nvme_bytes:
        return None
    return f"needs {gib(memory.nvme_bytes)} GiB of the {gib(room.nvme_bytes)} GiB free on the NVMe"
