"""Rules on the model, its attention and the learning rate."""

from __future__ import annotations

from sweeps.config.keys import block_interval
from sweeps.plan.rules.base import Draft, rule

LEAST_WARMUP_STEPS = 2  # minimum of DeepSpeed's schedules: deepspeed/runtime/lr_schedules.py


@rule(source="every k-th of L transformer blocks, counted in each stage of a pipeline")
def a_block_is_checkpointed(draft: Draft) -> str | None:
    """A k beyond the number of blocks has the effect of k = their number, so it must be a mistake."""
    every = block_interval(draft.config.activation_checkpointing) or 0
    blocks = max(1, draft.model.layers // draft.pipeline)
    if every <= blocks:
        return None
    whose = draft.model.name if draft.pipeline == 1 else f"a stage of pipeline={draft.pipeline}"
    return (
        f"activation_checkpointing={every} is more than the {blocks} blocks of {whose}; it may be none, "
        f"full, or up to {blocks}"
    )


@rule(source="train_entry/model/split.py: every tensor rank would add the biases once more")
def a_hybrid_splits_no_biases(draft: Draft) -> str | None:
    """Within a pipeline, matrices are split without their biases, which most Llamas do not have."""
    if draft.tensor == 1 or draft.pipeline == 1 or not draft.model.has_biases:
        return None
    return (
        f"tensor={draft.tensor} with pipeline={draft.pipeline}: the matrices of {draft.model.name} have "
        "biases, which cannot be split within a pipeline; one of the degrees may be 1"
    )


@rule(source="the Python environment; the package is compiled for one torch and CUDA")
def flash_attention_is_installed(draft: Draft) -> str | None:
    """transformers only loads the package; it does not install it."""
    if draft.config.attention != "flash_attention_2" or draft.machine.has_flash_attention:
        return None
    return "attention=flash_attention_2: flash-attn is not installed; attention may be sdpa or eager"


@rule(source="flash-attn's documentation: CUDA, fp16 and bf16 only")
def flash_attention_needs_half_precision_on_gpus(draft: Draft) -> str | None:
    """Its kernels exist only for half precision (bf16, fp16) on GPUs."""
    if draft.config.attention != "flash_attention_2":
        return None
    if draft.machine.device == "cuda" and draft.precision in ("fp16", "bf16"):
        return None
    where = "GPUs" if draft.machine.device == "cuda" else "a CPU"
    return (
        f"attention=flash_attention_2 with precision={draft.precision} on {where}: it has kernels only "
        "for bf16 and fp16 on GPUs; attention may be sdpa or eager"
    )


@rule(source="flash-attn's documentation: compute capability 8.0 and later")
def flash_attention_needs_a_card_that_has_it(draft: Draft) -> str | None:
    """FlashAttention-2 needs Ampere or later."""
    if draft.config.attention != "flash_attention_2" or draft.machine.has_bf16:
        return None
    return (
        f"attention=flash_attention_2: {draft.machine.device_name} is older than compute capability 8.0; "
        "attention may be sdpa or eager"
    )


@rule(source="deepspeed/runtime/lr_schedules.py: the rate jumps to its end after such a warm-up")
def the_warmup_ends_before_the_decay(draft: Draft) -> str | None:
    """total_steps counts the warm-up too."""
    lr = draft.config.lr
    warmup = max(LEAST_WARMUP_STEPS, draft.warmup_steps)
    if lr.schedule == "constant" or lr.total_steps is None or lr.total_steps > warmup:
        return None
    return (
        f"lr.total_steps={lr.total_steps} leaves no step to decay after a warm-up of {warmup} steps "
        f"(at least {LEAST_WARMUP_STEPS}); lr.total_steps must be more than {warmup}"
    )


@rule(source="deepspeed/runtime/lr_schedules.py accepts it, and the rate falls towards its peak")
def the_ends_of_the_rate_are_below_its_peak(draft: Draft) -> str | None:
    """A rate that falls during the warm-up is a mistake, such as a wrong power of ten."""
    lr = draft.config.lr
    ends = ("warmup_from", "end") if lr.schedule == "cosine" else ("warmup_from",)
    above = [name for name in ends if getattr(lr, name) > lr.base]
    if not above:
        return None
    asked = " and ".join(f"lr.{name}={getattr(lr, name):g}" for name in above)
    return f"{asked} must not exceed the peak, lr.base={lr.base:g}"


RULES = (
    a_block_is_checkpointed,
    a_hybrid_splits_no_biases,
    flash_attention_is_installed,
    flash_attention_needs_half_precision_on_gpus,
    flash_attention_needs_a_card_that_has_it,
    the_warmup_ends_before_the_decay,
    the_ends_of_the_rate_are_below_its_peak,
)
