"""Rules on number formats that a device, a stage or DeepSpeed does not support, or gets wrong."""

from __future__ import annotations

from sweeps.plan.rules.base import Draft, rule


@rule(source="DeepSpeed issue 8393; its runtime/engine.py scales the loss for ZeRO optimizers only")
def fp16_needs_a_zero_stage(draft: Draft) -> str | None:
    """DeepSpeed 0.19 divides gradients by a loss scale that it never applied: updates are far too small."""
    if not draft.is_deepspeed or draft.precision != "fp16" or draft.stage > 0:
        return None
    return (
        "precision=fp16 with zero.stage=0 trains wrongly in DeepSpeed 0.19: it divides gradients by a loss "
        "scale that it never applied; zero.stage may be 1, 2 or 3"
    )


@rule(source="deepspeed/runtime/engine.py, _do_sanity_check: Type fp16 is not supported on your device")
def fp16_needs_a_cpu_that_has_it(draft: Draft) -> str | None:
    """DeepSpeed refuses fp16 if oneDNN has no kernels for it: on x86 before AVX512-FP16."""
    if draft.precision != "fp16" or not draft.is_deepspeed or draft.machine.device != "cpu":
        return None
    if draft.machine.has_fp16:
        return None
    return (
        "precision=fp16: DeepSpeed refuses it on this CPU, which has no fp16; precision may be fp32 or bf16"
    )


@rule(source="CUDA C++ programming guide: bf16 arithmetic from compute capability 8.0 on")
def bf16_needs_a_card_that_has_it(draft: Draft) -> str | None:
    """V100 and T4 have no bf16: it is slowly emulated, or refused."""
    if draft.precision != "bf16" or draft.machine.has_bf16:
        return None
    card = next(gpu for gpu in draft.machine.gpus if gpu.capability and gpu.capability < (8, 0))
    major, minor = card.capability or (0, 0)
    return (
        f"precision=bf16: {card.name} has compute capability {major}.{minor}, and bf16 needs 8.0; "
        "precision may be fp16 or fp32"
    )


@rule(source="deepspeed/runtime/fp16/unfused_optimizer.py steps once with zero gradients, to make its states")
def decay_by_sgd_needs_a_zero_stage_in_bf16(draft: Draft) -> str | None:
    """DeepSpeed decays the weights at the peak rate before the first step, and starts with that momentum."""
    config = draft.config
    is_sgd = config.optimizer.name == "sgd" and config.optimizer.weight_decay > 0
    is_plain = draft.is_deepspeed and draft.stage == 0 and draft.pipeline == 1
    if not is_plain or draft.precision != "bf16" or not is_sgd:
        return None
    return (
        f"optimizer=sgd with optimizer.weight_decay={config.optimizer.weight_decay:g}, precision=bf16 and "
        "zero.stage=0 changes the weights before the first step; zero.stage may be 1, 2 or 3, or "
        "optimizer.weight_decay=0"
    )


@rule(source="deepspeed/runtime/engine.py, _do_optimizer_sanity_check: unsupported mix of dtypes")
def accumulation_in_another_format_needs_a_zero_stage(draft: Draft) -> str | None:
    """Without ZeRO, gradients have the format of the parameters."""
    asked = draft.config.grad_accum_dtype
    if not draft.is_deepspeed or draft.stage > 0 or asked in ("auto", draft.precision):
        return None
    way_out = "zero.stage may be 1, 2 or 3, or grad_accum_dtype=auto" if asked == "fp32" else "it may be auto"
    return (
        f"grad_accum_dtype={asked} with zero.stage=0 and precision={draft.precision}: DeepSpeed accumulates "
        f"gradients in another format only with ZeRO; {way_out}"
    )


@rule(source="seen: ZeRO-2 gives the losses of the wider format, ZeRO-1 and 3 those of the narrower")
def accumulation_is_in_a_wider_format(draft: Draft) -> str | None:
    """DeepSpeed accepts a format that is no wider, but it depends on the stage if it is used."""
    asked = draft.config.grad_accum_dtype
    if draft.stage == 0 or asked in ("auto", "fp32", draft.precision):
        return None
    return (
        f"grad_accum_dtype={asked} with precision={draft.precision}: it is no wider: ZeRO-2 ignores it, and "
        "ZeRO-1 and ZeRO-3 lose digits; grad_accum_dtype may be auto or fp32"
    )


@rule(source="deepspeed/runtime/fp16/loss_scaler.py: it stops when it would fall below the minimum")
def the_loss_scale_begins_above_its_minimum(draft: Draft) -> str | None:
    """A loss scale that starts at its minimum ends the run at the first overflow."""
    fp16 = draft.config.fp16
    if draft.precision != "fp16" or not draft.is_deepspeed or fp16.loss_scale > 0:
        return None
    if 2**fp16.initial_scale_power > fp16.min_loss_scale:
        return None
    return (
        f"fp16.initial_scale_power={fp16.initial_scale_power} starts at {2**fp16.initial_scale_power}, not "
        f"above fp16.min_loss_scale={fp16.min_loss_scale:g}: the first overflow would end the run"
    )


RULES = (
    fp16_needs_a_zero_stage,
    decay_by_sgd_needs_a_zero_stage_in_bf16,
    fp16_needs_a_cpu_that_has_it,
    bf16_needs_a_card_that_has_it,
    accumulation_in_another_format_needs_a_zero_stage,
    accumulation_is_in_a_wider_format,
    the_loss_scale_begins_above_its_minimum,
)
