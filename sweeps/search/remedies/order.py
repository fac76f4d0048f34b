"""The remedies for each memory, the cheapest and most certain first."""

from __future__ import annotations

from sweeps.search.remedies import device, host
from sweeps.search.remedies.base import Remedy
from train_entry.contract import FailureKind

# Activations grow with the batch, so they come first. Smaller buckets save little and cost little. Sharding
# loads the links between GPUs; offloading loads PCIe, which is slower, so it comes last.
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
# A rank on a CPU computes in host memory: offloading to it frees nothing.
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
    """Return remedies in the order to try them; none for failures that are not about memory."""
    if kind is FailureKind.GPU_OOM:
        return FOR_GPUS
    if kind is FailureKind.HOST_OOM:
        return FOR_HOSTS if device_kind == "cuda" else FOR_CPU
    return ()
