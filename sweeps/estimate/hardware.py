"""What a machine can do: the numbers that estimates of memory and time are made of. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from train_entry.contract import Precision


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """The devices of a study, all alike, and what joins them. Bytes, FLOP/s and bytes/s of one device."""

    name: str  # as CUDA, or Linux, calls the device
    device: str  # cuda or cpu
    ranks_per_node: int
    memory_bytes: int  # of the device; on a CPU the host's, which all ranks share
    host_memory_bytes: int  # of a node
    half_flops_per_s: float  # dense matrix products at best
    fp32_flops_per_s: float
    memory_bytes_per_s: float  # of the device's own memory
    link_bytes_per_s: float  # to another device of the node, one way
    network_bytes_per_s: float  # to a device of another node, one way
    host_link_bytes_per_s: float  # between device and host memory, one way
    host_memory_bytes_per_s: float  # of a node's memory, which its ranks share
    nvme_bytes_per_s: float  # of a node's disk, which its ranks share
    context_bytes: int  # on the device, outside of torch's allocator: CUDA context and kernels
    is_known: bool = True  # False: figures of a card like it

    def flops_per_s(self, precision: Precision) -> float:
        return self.fp32_flops_per_s if precision is Precision.FP32 else self.half_flops_per_s
