"""Memory estimates of other tools, by their published formulas, to compare with ours on the same trials.

Each function returns bytes per GPU, or None if the tool does not cover such a plan.
"""

from __future__ import annotations

from collections.abc import Callable

from sweeps.estimate.memory.activations import saved
from sweeps.estimate.memory.share import census
from train_entry.contract import Engine, ModelShape, Offload, Plan, Precision

Rival = Callable[[Plan, ModelShape], float | None]


def _stage(plan: Plan) -> int:
    return plan.zero.stage if plan.engine is Engine.DEEPSPEED else 0


def deepspeed_estimators(plan: Plan, model: ModelShape) -> float | None:
    """Apply estimate_zero2_model_states_mem_needs and its ZeRO-3 counterpart, which cover model states only.

    The source is deepspeed/runtime/zero/stage_1_and_2.py and stage3.py, 0.19. The user has to add the rest.
    """
    count = model.parameters / (plan.tensor * plan.pipeline)
    off_loads = plan.offload.optimizer is not Offload.NONE
    if _stage(plan) == 2:
        return 2 * count + (0 if off_loads else 18 * count / plan.data)
    if _stage(plan) == 3:
        largest = 4.0 * max(model.vocab * model.hidden, model.hidden * model.ffn)
        if plan.offload.param is not Offload.NONE:
            return largest
        return largest + (2 if off_loads else 18) * count / plan.data
    return None


def deepspeed_autotuning(plan: Plan, model: ModelShape) -> float | None:
    """Apply get_instantiation_memory_required_per_gpu, plus activations of one sequence x the micro-batch.

    The source is deepspeed/autotuning/autotuner.py. It only checks for fp16, so bf16 counts as fp32. It
    measures activations as the growth of allocated memory over one forward pass. Here they are our own count,
    plus the logits and the result of log-softmax.
    """
    is_half = plan.precision is Precision.FP16
    count = model.parameters
    weights, gradients = (2 if is_half else 4) * count, (2 if is_half else 4) * count
    optimizer = (16 if is_half else 8) * count
    stage, ranks = _stage(plan), plan.ranks
    optimizer = optimizer // ranks if stage >= 1 else optimizer
    gradients = gradients // ranks if stage >= 2 else gradients
    weights = weights // ranks if stage >= 3 else weights
    kept = saved(plan, model)
    blocks = model.layers * (kept.block_input if plan.checkpoint_every else kept.block)
    tokens = plan.micro_batch * plan.seq_len
    return (weights + gradients + optimizer) / plan.tensor + blocks + tokens * model.vocab * 6


def eleuther_cookbook(plan: Plan, model: ModelShape) -> float | None:
    """Apply calc_transformer_mem.py of EleutherAI's cookbook, with its defaults."""
    low, hidden, layers = (4 if plan.precision is Precision.FP32 else 2), model.hidden, model.layers
    matrices = 3 if census(model).is_gated else 2
    grouped = model.kv_heads / model.heads
    count = 2 * model.vocab * hidden + hidden * plan.seq_len + 8 * hidden * layers + 2 * hidden
    count += int(2 * (1 + grouped) * layers * hidden**2) + matrices * layers * hidden * model.ffn
    stage, ranks = _stage(plan), plan.ranks
    weights = count * low / (plan.tensor * plan.pipeline) / (ranks if stage == 3 else 1)
    gradients = 4 * count / (ranks if stage >= 2 else 1)
    optimizer = 12 * count / (ranks if stage >= 1 else 1)
    buffers = 5e8 * low if stage >= 1 and ranks > 1 else 0
    buffers += 1e9 * low if stage == 3 else 0
    places = plan.micro_batch * plan.seq_len * hidden * layers
    per_place = 16.0 * low + 2
    if not plan.checkpoint_every:
        per_place += (2 * low + 1) * model.heads * plan.seq_len / hidden
    return weights + gradients + optimizer + buffers + places * per_place


def megatron(plan: Plan, model: ModelShape) -> float | None:
    """Apply theoretical_memory_usage.py of Megatron-LM, without sequence parallelism."""
    hidden, layers, degree = model.hidden, model.layers, plan.tensor
    gate = 1.5 if census(model).is_gated else 1.0
    norms = 1 if census(model).is_gated else 2
    grouped = model.kv_heads / model.heads
    layer = 2 * hidden * (model.ffn * gate + norms) + 2 * hidden**2 * (1 + grouped)
    embedding = hidden * model.vocab
    both = embedding * (1 if model.tied_embeddings or plan.pipeline > 1 else 2)
    count = ((layers * layer + norms * hidden) / plan.pipeline + both) / degree
    each = 6 + 12 / plan.data if _stage(plan) >= 1 else 18.0
    places = plan.seq_len * plan.micro_batch * hidden
    kept = places * (10 + 24 / degree) * layers
    kept += 8 * plan.seq_len * plan.micro_batch * plan.pipeline + places * plan.pipeline
    if plan.pipeline > 1:
        kept *= min(1.0, plan.grad_accum / plan.pipeline)
    else:
        kept += 2 * (plan.seq_len * plan.micro_batch * model.vocab / degree + places)
    return count * each + 1.05 * kept


RIVALS: dict[str, Rival] = {
    "DeepSpeed's estimators": deepspeed_estimators,
    "DeepSpeed Autotuning's gate": deepspeed_autotuning,
    "EleutherAI cookbook": eleuther_cookbook,
    "Megatron-LM": megatron,
}
