"""Hardware figures from which memory and time are estimated. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from train_entry.contract import GIB, Precision
from train_entry.contract.shared.cards import GIGA, TERA, Card, card_of

# Share of a link's data-sheet rate that copies reach: 396 of 450 GB/s between two H200s, 55 of 63 GB/s
# between an H200 and its host (ml-engineering, chapters on network and storage benchmarks).
LINK_SHARE = 0.88
# The eight memory channels of a socket carry 307 GB/s with DDR5-4800, 205 with DDR4-3200. A server has two
# sockets; a program that reads and writes gets about two thirds of their rate.
SERVER_MEMORY_BYTES_PER_S = 300e9
NVME_BYTES_PER_S = 6e9  # a PCIe 4.0 x4 drive reads 7 GB/s and writes 5 (data sheets of data-centre drives)
# CUDA 12 and 13 take 0.5 GiB on an H200; NCCL's first buffers come on top.
CONTEXT_BYTES = int(0.55 * GIB)

# A core with AVX2 does two fused multiply-adds of eight fp32 numbers per cycle: 80 GFLOP/s at 2.5 GHz. On
# such a core torch reached 54 GFLOP/s in fp32, and 0.9 in bf16, which it emulates (1,024-wide products, one
# thread). AMX or AVX-512 would make bf16 much faster; these figures do not know of it.
CORE_FP32_FLOPS_PER_S = 80e9
CORE_HALF_FLOPS_PER_S = 1.4e9
CORE_MEMORY_BYTES_PER_S = 6e9  # one thread that adds large vectors reached 4 to 10 GB/s
# gloo copies through sockets, also within one host.
GLOO_BYTES_PER_S = 1.5e9
ETHERNET_BYTES_PER_S = 1.25e9  # 10 Gbit/s

# An unknown GPU gets the figures of the first of these whose GiB are no more than its own.
LIKE_BY_GIB = (
    (150, "NVIDIA B200"),
    (110, "NVIDIA H200"),
    (70, "NVIDIA A100-SXM4-80GB"),
    (40, "NVIDIA L40S"),
    (20, "NVIDIA A10"),
    (0, "Tesla T4"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """The devices of a study, all alike, and their links. Bytes, FLOP/s and bytes/s of one device."""

    name: str  # of the device, as CUDA or Linux reports it
    device: str  # cuda or cpu
    ranks_per_node: int
    memory_bytes: int  # of the device; on a CPU, the host's memory, which all ranks share
    host_memory_bytes: int  # of a node
    half_flops_per_s: float  # peak rate of dense matrix products; on a CPU, of one core
    fp32_flops_per_s: float
    memory_bytes_per_s: float  # of the device's own memory
    link_bytes_per_s: float  # to another device of the node, one way
    network_bytes_per_s: float  # to a device of another node, one way
    host_link_bytes_per_s: float  # between device and host memory, one way
    host_memory_bytes_per_s: float  # of a node's memory, which its ranks share
    nvme_bytes_per_s: float  # of a node's disk, which its ranks share
    context_bytes: int  # on the device outside of torch's allocator: CUDA context and kernels
    is_known: bool = True  # False: the figures are those of a similar GPU

    def flops_per_s(self, precision: Precision) -> float:
        return self.fp32_flops_per_s if precision is Precision.FP32 else self.half_flops_per_s

    @property
    def is_cpu(self) -> bool:
        return self.device == "cpu"


def hardware_of(
    device_name: str, device: str, ranks_per_node: int, memory_bytes: int, host_memory_bytes: int
) -> Hardware:
    """Return the data-sheet figures of such devices; for an unknown GPU, the figures of a similar one."""
    if device == "cpu":
        return _cpu(device_name, ranks_per_node, host_memory_bytes)
    card = card_of(device_name)
    like = card or _card_like(memory_bytes)
    return Hardware(
        name=device_name,
        device=device,
        ranks_per_node=ranks_per_node,
        memory_bytes=memory_bytes,
        host_memory_bytes=host_memory_bytes,
        half_flops_per_s=like.half * TERA,
        fp32_flops_per_s=like.fp32 * TERA,
        memory_bytes_per_s=like.memory * GIGA,
        link_bytes_per_s=like.link * GIGA * LINK_SHARE,
        network_bytes_per_s=like.network * GIGA * LINK_SHARE,
        host_link_bytes_per_s=like.host_link * GIGA * LINK_SHARE,
        host_memory_bytes_per_s=SERVER_MEMORY_BYTES_PER_S,
        nvme_bytes_per_s=NVME_BYTES_PER_S,
        context_bytes=CONTEXT_BYTES,
        is_known=card is not None,
    )


def _card_like(memory_bytes: int) -> Card:
    gib = memory_bytes / GIB
    name = next(name for least_gib, name in LIKE_BY_GIB if gib >= least_gib)
    card = card_of(name)
    assert card is not None, f"{name} is in the table of GPUs"
    return card


def _cpu(device_name: str, ranks_per_node: int, host_memory_bytes: int) -> Hardware:
    """Return the figures of a CPU: each rank takes a core, and all ranks share the host's memory."""
    shared = min(SERVER_MEMORY_BYTES_PER_S, ranks_per_node * CORE_MEMORY_BYTES_PER_S)
    return Hardware(
        name=device_name,
        device="cpu",
        ranks_per_node=ranks_per_node,
        memory_bytes=host_memory_bytes,
        host_memory_bytes=host_memory_bytes,
        half_flops_per_s=CORE_HALF_FLOPS_PER_S,
        fp32_flops_per_s=CORE_FP32_FLOPS_PER_S,
        memory_bytes_per_s=CORE_MEMORY_BYTES_PER_S,
        link_bytes_per_s=GLOO_BYTES_PER_S,
        network_bytes_per_s=ETHERNET_BYTES_PER_S,
        host_link_bytes_per_s=shared,
        host_memory_bytes_per_s=shared,
        nvme_bytes_per_s=NVME_BYTES_PER_S,
        context_bytes=0,
        is_known=False,
    )
