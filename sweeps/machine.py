"""What trials share: how many ranks a node holds, and on what. Pure; `sweeps.cluster.devices` looks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    index: int  # in PCI bus order, as NVML counts; what CUDA_VISIBLE_DEVICES calls it
    uuid: str
    name: str
    memory_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """The capacity of a cluster. On CPU a rank takes a core, on GPUs a card."""

    device: str  # cuda or cpu
    nodes: int
    ranks_per_node: int
    gpus: tuple[Gpu, ...] = ()  # of this node; empty on CPU
    cores: int = 1

    @property
    def capacity(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def device_name(self) -> str:
        return self.gpus[0].name if self.gpus else "CPU"
