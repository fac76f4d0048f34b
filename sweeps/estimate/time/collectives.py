"""Estimate the time of collective communication by ring formulas. Pure.

A rank's number is (pipe * data + d) * tensor + t: tensor-parallel groups are innermost, so they lie within a
node if they can; data-parallel groups come next, and pipeline stages are outermost.
"""

from __future__ import annotations

from dataclasses import dataclass

from sweeps.estimate.hardware import Hardware
from train_entry.contract import Plan

# Latency of one step of a ring. NCCL's own cost model counts 3.4 microseconds through NVLink, 5.7 through
# PCIe, 14 through a network (nccl, src/graph/tuning.cc: hwLat, ring, simple protocol).
NODE_HOP_S = 5e-6
NETWORK_HOP_S = 14e-6
# NCCL's rings reach about this share of a plain copy's rate; less with messages of tens of megabytes.
RING_SHARE = 0.8


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Ranks that exchange tensors: their number, and the rate and latency to the next rank of the ring."""

    size: int
    bytes_per_s: float
    hop_s: float

    def all_reduce_s(self, size_bytes: float) -> float:
        """Seconds until every rank has the sum: 2 (n-1)/n of the bytes pass each link, in 2 (n-1) steps."""
        return 2 * self.all_gather_s(size_bytes)

    def all_gather_s(self, size_bytes: float) -> float:
        """Seconds until every rank has all `size_bytes`: (n-1)/n of them pass each link, in n-1 steps."""
        steps = self.size - 1
        return steps / self.size * size_bytes / self.bytes_per_s + steps * self.hop_s

    def reduce_scatter_s(self, size_bytes: float) -> float:
        """Seconds until every rank has its part of the sum of `size_bytes`: an all-gather in reverse."""
        return self.all_gather_s(size_bytes)

    def send_s(self, size_bytes: float) -> float:
        """Seconds to send `size_bytes` from one rank to the next."""
        return size_bytes / self.bytes_per_s + self.hop_s if self.size > 1 else 0.0


def tensor_group(plan: Plan, hardware: Hardware) -> Group:
    return _group(plan.tensor, 1, hardware)


def data_group(plan: Plan, hardware: Hardware) -> Group:
    return _group(plan.data, plan.tensor, hardware)


def pipeline_group(plan: Plan, hardware: Hardware) -> Group:
    return _group(plan.pipeline, plan.tensor * plan.data, hardware)


def secondary_group(plan: Plan, hardware: Hardware) -> Group:
    """Return the ranks that hold one second copy of the weights among themselves (ZeRO++)."""
    return _group(min(plan.zero.hpz_partition_size, plan.data), plan.tensor, hardware)


def nodes_of(plan: Plan, hardware: Hardware) -> int:
    """Number of nodes over which the ranks of a plan spread."""
    return -(-plan.ranks // hardware.ranks_per_node)


def _group(size: int, stride: int, hardware: Hardware) -> Group:
    """Return a group of `size` ranks, `stride` apart. Across nodes each rank uses its own network adapter."""
    if size * stride <= hardware.ranks_per_node:
        rate, hop_s = hardware.link_bytes_per_s, NODE_HOP_S
    else:
        members = max(1, min(size, hardware.ranks_per_node // stride))  # of the group on one node
        rate, hop_s = min(hardware.link_bytes_per_s, members * hardware.network_bytes_per_s), NETWORK_HOP_S
    return Group(size=size, bytes_per_s=rate * RING_SHARE, hop_s=hop_s)
