"""Which remedies there are for which memory, cheapest and surest first."""

from __future__ import annotations

from sweeps.search.remedies import device, host
from sweeps.search.remedies.base import Remedy
from train_entry.contract import FailureKind

# Activations are what grows with the batch, so they come first. Buckets save little and cost little. Sharding
# costs the links between GPUs; offloading costs PCIe, which is slower, so it is last.
_EVERYWHERE = (
    device.activation_checkpointing,
    device.micro_batch,
    device.buckets,
    device.overlap,
    device.live_weights,
)
FOR_GPUS = (
    *_EVERYWHERE,
    device.allocator,
    device.sharding,
    device.optimizer_to_cpu,
    device.weights_to_cpu,
    device.optimizer_to_nvme,
    device.weights_to_nvme,
)
# A rank on CPU computes in host memory: what is offloaded there has not gone anywhere.
FOR_CPU = (
    *_EVERYWHERE,
    device.sharding,
    device.optimizer_to_nvme,
    device.weights_to_nvme,
    host.optimizer_on_to_nvme,
    host.weights_on_to_nvme,
)
FOR_HOSTS = (
    host.unpinned,
    host.weights_back,
    host.half_the_optimizer,
    host.weights_on_to_nvme,
    host.optimizer_on_to_nvme,
    host.optimizer_back,
)
ALL = {remedy.name: remedy for remedy in (*FOR_GPUS, *FOR_HOSTS)}


def remedies_for(kind: FailureKind, device_kind: str) -> tuple[Remedy, ...]:
    """In the order in which to try them; none for failures that are not about memory."""
    if kind is FailureKind.GPU_OOM:
        return FOR_GPUS
    if kind is FailureKind.HOST_OOM:
        return FOR_HOSTS if device_kind == "cuda" else FOR_CPU
    return ()
