"""The keys of `cluster`: where trials run, and how a scheduler is asked. Part of the schema."""

from __future__ import annotations

from dataclasses import dataclass

from sweeps.config.knob import knob


@dataclass
class ClusterConfig:
    kind: str = knob("local", "where trials run", choices=("local",))
    device: str = knob("auto", "auto: GPUs where there are any", choices=("auto", "cpu", "cuda"))
    nodes: int = knob(1, "machines", low=1, high=1)
    gpus_per_node: int | None = knob(None, "ranks a node holds; null: all GPUs, or all cores on CPU", low=1)
    parallel: int | None = knob(None, "most trials at once; null: one a node", low=1)
    on_interrupt: str = knob("cancel", "Ctrl-C: running trials", choices=("cancel", "leave"))
    nvme_path: str | None = knob(None, "a directory on a fast local disk, for offload to NVMe")
    memory_limit_gib: float | None = knob(
        None, "memory of a GPU that a rank may use; null: all of it", unit="GiB", above=0
    )
    price_per_gpu_hour: float | None = knob(
        None, "for limits.cost and objective=cost, in any currency", above=0
    )
    limit_counts_context: bool = knob(
        True, "memory_limit_gib includes CUDA's context, as a smaller card's would"
    )
