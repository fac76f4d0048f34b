"""Rules on offload: states that cannot be kept in the place that the configuration asks for."""

from __future__ import annotations

import math

from sweeps.plan.rules.base import Draft, rule
from train_entry.contract import size_text

# Bytes that ZeRO-3 writes per parameter of the model, over all ranks: fp32 master, and two moments or one.
OPTIMIZER_BYTES = {"adamw": 12, "sgd": 8}
GRADIENT_BYTES = 4  # ... and fp32 gradients


def _offloads_anything(draft: Draft) -> bool:
    return bool({draft.config.zero.offload_optimizer, draft.config.zero.offload_param} - {"none"})


def _uses_nvme(draft: Draft) -> bool:
    return "nvme" in (draft.config.zero.offload_optimizer, draft.config.zero.offload_param)


def _is_ratio_in_use(draft: Draft) -> bool:
    return draft.config.offload.ratio < 1 and draft.config.zero.offload_optimizer == "cpu"


@rule(source="torch DistributedDataParallel has no offload")
def ddp_offloads_nothing(draft: Draft) -> str | None:
    """Offload is a part of ZeRO, which ddp does not use."""
    if draft.is_deepspeed or not _offloads_anything(draft):
        return None
    zero = draft.config.zero
    asked = f"zero.offload_optimizer={zero.offload_optimizer}, zero.offload_param={zero.offload_param}"
    return f"engine=ddp cannot offload, but {asked}; strategy=zero2_offload can"


@rule(source="deepspeed/runtime/engine.py: the optimizer's class changes, its tensors stay on the device")
def optimizer_offload_needs_a_zero_stage(draft: Draft) -> str | None:
    """At stage 0 DeepSpeed uses its CPU optimizer but moves nothing."""
    device = draft.config.zero.offload_optimizer
    if not draft.is_deepspeed or draft.stage > 0 or device == "none":
        return None
    return f"zero.offload_optimizer={device} with zero.stage=0 moves nothing; zero.stage may be 1, 2 or 3"


@rule(source="DeepSpeed's documentation: offload_param is valid only with stage 3; seen: ignored below")
def param_offload_needs_stage_3(draft: Draft) -> str | None:
    """Below stage 3 every rank needs all weights all the time."""
    device = draft.config.zero.offload_param
    if not draft.is_deepspeed or draft.stage == 3 or device == "none":
        return None
    return (
        f"zero.offload_param={device} with zero.stage={draft.stage} would be ignored: only stage 3 "
        "shards weights; zero.stage may be 3"
    )


@rule(source="deepspeed/runtime/zero/stage_1_and_2.py: any device but none counts as cpu")
def nvme_needs_stage_3(draft: Draft) -> str | None:
    """Stages 1 and 2 treat nvme like cpu, and write nothing to disk."""
    if draft.stage not in (1, 2) or draft.config.zero.offload_optimizer != "nvme":
        return None
    return (
        f"zero.offload_optimizer=nvme with zero.stage={draft.stage} would be treated like cpu; "
        "zero.offload_optimizer may be cpu, or zero.stage 3"
    )


@rule(source="deepspeed/runtime/zero/config.py: Partial offloading only supported for ZeRO Stage 3")
def a_ratio_needs_stage_3(draft: Draft) -> str | None:
    """Twin-Flow splits the update between CPU and device by sub-groups, which only stage 3 has."""
    if not draft.is_deepspeed or draft.stage == 3 or not _is_ratio_in_use(draft):
        return None
    return (
        f"offload.ratio={draft.config.offload.ratio:g} with zero.stage={draft.stage}: only stage 3 "
        "splits the update; offload.ratio may be 1"
    )


@rule(source="deepspeed/runtime/zero/stage3.py: Hybrid Optimizer Only Supports DeepSpeedCPUAdam")
def a_ratio_needs_adamw(draft: Draft) -> str | None:
    """DeepSpeed updates the device's share with a separate Adam."""
    name = draft.config.optimizer.name
    if not _is_ratio_in_use(draft) or draft.stage != 3 or name == "adamw":
        return None
    return (
        f"offload.ratio={draft.config.offload.ratio:g} with optimizer={name}: DeepSpeed splits AdamW only; "
        "offload.ratio may be 1"
    )


@rule(source="deepspeed/runtime/zero/stage3.py: backup_optimizer takes its rate once, from the first group")
def a_ratio_needs_a_constant_rate(draft: Draft) -> str | None:
    """The scheduler does not reach the device's share: it is always updated at the initial rate."""
    lr = draft.config.lr
    if not _is_ratio_in_use(draft) or draft.stage != 3:
        return None
    if draft.warmup_steps == 0 and lr.schedule == "constant":
        return None
    return (
        f"offload.ratio={draft.config.offload.ratio:g} with a learning rate that changes: DeepSpeed "
        "always updates the device's share at the initial rate; offload.ratio may be 1, or the "
        "rate constant: lr.warmup=0 and lr.schedule=constant"
    )


@rule(source="deepspeed/runtime/zero/stage3.py: int((1 - ratio) x sub-groups) of them stay on the device")
def a_ratio_leaves_a_sub_group(draft: Draft) -> str | None:
    """The update is split by whole sub-groups: with only one, all of it goes to the CPU."""
    config = draft.config
    if not _is_ratio_in_use(draft) or draft.stage != 3 or draft.machine.device == "cpu":
        return None
    share = draft.model.parameters / draft.ranks
    groups = math.ceil(share / config.zero.sub_group_size)
    if int((1 - config.offload.ratio) * groups) >= 1:
        return None
    wanted = math.ceil(1 / (1 - config.offload.ratio))
    return (
        f"offload.ratio={config.offload.ratio:g} with {groups} sub-group{'s' * (groups > 1)} per rank leaves "
        f"none on the device; {wanted} are needed: zero.sub_group_size may be at most {share / wanted:.2g}"
    )


@rule(source="deepspeed/runtime/zero/stage3.py joins nvme_path, which cannot be left out")
def nvme_needs_a_path(draft: Draft) -> str | None:
    """The path is a property of the nodes, so it is no knob."""
    if not _uses_nvme(draft) or draft.machine.nvme is not None:
        return None
    return "offload to nvme needs a directory on a local disk; set cluster.nvme_path=DIR"


@rule(source="the directory itself")
def the_nvme_path_can_be_written(draft: Draft) -> str | None:
    """The directory is checked before anything is launched."""
    nvme = draft.machine.nvme
    if not _uses_nvme(draft) or nvme is None or nvme.problem is None:
        return None
    return f"cluster.nvme_path={nvme.path} {nvme.problem}; give a directory that can be written"


@rule(source="deepspeed/op_builder/async_io.py compiles against libaio")
def nvme_needs_libaio(draft: Draft) -> str | None:
    """DeepSpeed reads and writes through its async_io operator."""
    if not _uses_nvme(draft) or draft.machine.has_libaio:
        return None
    return "offload to nvme needs libaio's header and library here; on Debian: apt install libaio-dev"


@rule(source="seen: bytes per parameter under nvme_path")
def the_nvme_has_space(draft: Draft) -> str | None:
    """All ranks of a node share its disk."""
    nvme = draft.machine.nvme
    if not _uses_nvme(draft) or nvme is None or nvme.problem is not None:
        return None
    need_bytes = nvme_bytes(draft)
    if need_bytes <= nvme.free_bytes:
        return None
    return (
        f"offload to nvme writes {size_text(need_bytes)} per node, but cluster.nvme_path={nvme.path} has "
        f"only {size_text(nvme.free_bytes)} free"
    )


def nvme_bytes(draft: Draft) -> int:
    """Bytes that a node writes: its ranks' share of the states that go to NVMe."""
    zero = draft.config.zero
    weight_bytes = 4 if draft.precision == "fp32" else 2
    states = OPTIMIZER_BYTES[draft.config.optimizer.name]
    per_parameter = (states + GRADIENT_BYTES) * (zero.offload_optimizer == "nvme")
    per_parameter += weight_bytes * (zero.offload_param == "nvme")
    within = min(draft.ranks, draft.machine.ranks_per_node)
    return math.ceil(draft.model.parameters * per_parameter * within / draft.ranks)


@rule(source="deepspeed/runtime/swap_tensor/partitioned_param_swapper.py")
def a_buffer_holds_the_largest_parameter(draft: Draft) -> str | None:
    """DeepSpeed reads a whole shard into one buffer."""
    config, largest = draft.config, draft.largest_parameter
    if config.zero.offload_param != "nvme" or draft.stage != 3:
        return None
    shard = math.ceil(largest / draft.ranks)
    if shard <= config.offload.buffer_size:
        return None
    return (
        f"offload.buffer_size={config.offload.buffer_size:g} elements cannot hold a rank's share of the "
        f"largest parameter, {shard:,}; offload.buffer_size may be {shard} or more"
    )


@rule(source="DeepSpeed issue 3062; seen: Not enough buffers 0 for swapping 1")
def weights_on_nvme_are_not_kept(draft: Draft) -> str | None:
    """A weight that is kept for its next use also keeps its buffer, and the buffers run out."""
    config = draft.config
    if config.zero.offload_param != "nvme" or draft.stage != 3 or config.zero.max_reuse_distance == 0:
        return None
    share = math.ceil(draft.model.parameters / draft.ranks)
    if share <= config.offload.max_in_cpu:
        return None  # all of it stays in host memory
    return (
        f"zero.max_reuse_distance={config.zero.max_reuse_distance:g} with weights on nvme: DeepSpeed keeps "
        "their buffers and runs out of buffers; zero.max_reuse_distance may be 0"
    )


RULES = (
    ddp_offloads_nothing,
    optimizer_offload_needs_a_zero_stage,
    param_offload_needs_stage_3,
    nvme_needs_stage_3,
    a_ratio_needs_stage_3,
    a_ratio_needs_adamw,
    a_ratio_needs_a_constant_rate,
    a_ratio_leaves_a_sub_group,
    nvme_needs_a_path,
    the_nvme_path_can_be_written,
    nvme_needs_libaio,
    the_nvme_has_space,
    a_buffer_holds_the_largest_parameter,
    weights_on_nvme_are_not_kept,
)
