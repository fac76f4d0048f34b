"""The machine that trials share. Pure; `sweeps.cluster.node.devices` detects what this host has."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    index: int  # in PCI bus order, as NVML counts; CUDA_VISIBLE_DEVICES uses it too
    uuid: str
    name: str
    memory_bytes: int
    capability: tuple[int, int] | None = None  # CUDA compute capability; None: unknown


@dataclass(frozen=True, kw_only=True, slots=True)
class Nvme:
    """The directory for offload to NVMe, as it was found."""

    path: str
    free_bytes: int
    problem: str | None = None  # why nothing can be written there


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """The capacity of a cluster. A rank takes a GPU, or a core on CPU."""

    device: str  # cuda or cpu
    nodes: int
    ranks_per_node: int
    gpus: tuple[Gpu, ...] = ()  # of this node; empty on CPU
    cores: int = 1
    host_memory_bytes: int | None = None  # of one node, as far as this process may use it; None: unknown
    nvme: Nvme | None = None  # None: cluster.nvme_path is not set
    has_libaio: bool = False  # DeepSpeed's async_io is compiled, or can be
    has_fp16: bool = True  # a CPU may lack native fp16 arithmetic, which DeepSpeed requires
    has_flash_attention: bool = False  # the flash-attn package is installed
    nodes_of_a_trial: int | None = None  # the most, where several allocations hold the nodes; None: all

    @property
    def capacity(self) -> int:
        """The most ranks that one trial may have."""
        return (self.nodes_of_a_trial or self.nodes) * self.ranks_per_node

    @property
    def has_bf16(self) -> bool:
        """True from compute capability 8.0 (Ampere) on: CUDA C++ programming guide. A CPU emulates bf16."""
        return all(gpu.capability is None or gpu.capability >= (8, 0) for gpu in self.gpus)

    @property
    def default_ranks(self) -> int:
        """All GPUs of a node. On a CPU two: each rank costs memory, and all ranks share its bandwidth."""
        return self.ranks_per_node if self.device == "cuda" else min(2, self.ranks_per_node)

    def precision(self, asked: str) -> str:
        """Resolve `auto`: bf16 on GPUs that have it, else fp16; fp32 on a CPU, which emulates both."""
        if asked != "auto":
            return asked
        if self.device != "cuda":
            return "fp32"
        return "bf16" if self.has_bf16 else "fp16"

    @property
    def device_name(self) -> str:
        return self.gpus[0].name if self.gpus else "CPU"
