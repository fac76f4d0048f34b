"""Build the trained model from a shape or from a local transformers directory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights
from transformers.modeling_layers import GradientCheckpointingLayer

from train_entry.contract import Attention, ModelShape, Plan
from train_entry.model.sharding import Replicated, Sharding, copies_of
from train_entry.model.weights import NewWeights, SavedWeights, has_weights, pour


def build_model(
    shape: ModelShape,
    plan: Plan,
    device: torch.device,
    sharding: Sharding | None = None,
    beat: Callable[[], None] = lambda: None,
) -> PreTrainedModel:
    """Build the model with its parameters placed by `sharding`; None puts them whole, in fp32, on the device.

    Every strategy starts from the same weights. `beat` is called after each parameter. Raise ValueError if
    shape, weights and plan do not fit together.
    """
    sharding = sharding or Replicated(device)
    _refuse_absent_attention(plan.attention)
    with sharding.construct(), no_init_weights():
        model = _from_config(config_of(shape), sharding.dtype, plan.attention)
        model.tie_weights()
    sharding.place(model)
    twin = _without_storage(config_of(shape))
    if shape.path is not None and has_weights(Path(shape.path)):
        saved = SavedWeights(Path(shape.path), twin)
        saved.fill_buffers(model)
        pour(saved, model, sharding, beat)
    else:
        pour(NewWeights(twin, plan.seed, device), model, sharding, beat)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # with ZeRO-3, rank 0 has created all parameters, the others only shards
    torch.manual_seed(plan.seed)  # the draws so far differ between the ranks of ZeRO-3
    # The default, set explicitly since transformers warns about it otherwise.
    model.loss_type = "ForCausalLM"
    model.config.use_cache = False  # cached keys and values serve generation and cost memory in training
    if plan.checkpoint_every:
        recompute_blocks(model, plan.checkpoint_every)
    model.train()
    return model


def recompute_blocks(model: PreTrainedModel, every: int) -> None:
    """Let every `every`-th transformer block, from the first on, keep only its input and recompute the rest.

    Raise ValueError for a model without such blocks.
    """
    blocks = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not blocks:
        raise ValueError(
            f"checkpoint_every={every}: a model of type {model.config.model_type} has no blocks that "
            "transformers can recompute; 0 turns this off"
        )
    for block in blocks[::every]:
        block.gradient_checkpointing = True
        # The reentrant kind runs one backward pass inside another, which hooks of DDP and ZeRO do not expect.
        block._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)


def config_of(shape: ModelShape) -> PreTrainedConfig:
    """Return the transformers configuration of a shape. Raise ValueError for an unknown family."""
    if shape.path is not None:
        return local_config(Path(shape.path))
    builders = {"llama": _llama_config, "gpt2": _gpt2_config}
    if shape.family not in builders:
        raise ValueError(
            f"model.family is {shape.family}; without model.path only {' and '.join(builders)} can be built: "
            "set model.path to a directory with its config.json"
        )
    return builders[shape.family](shape)


def local_config(directory: Path) -> PreTrainedConfig:
    """Read config.json. Raise ValueError or OSError, as transformers does."""
    if not (directory / "config.json").is_file():
        raise ValueError(f"no config.json in {directory}")
    config: PreTrainedConfig = AutoConfig.from_pretrained(directory, local_files_only=True)
    return without_dropout(config)


def without_dropout(config: PreTrainedConfig) -> PreTrainedConfig:
    """Turn off a configuration's dropout: its random numbers differ by rank and strategy, so losses would."""
    for name, value in vars(config).items():
        if name.endswith(("dropout", "pdrop")) and isinstance(value, float):
            setattr(config, name, 0.0)
    return config


def count_parameters(config: PreTrainedConfig) -> int:
    """Count all parameters, tied ones once, without allocating them."""
    return parameters_of(_without_storage(config))


def parameters_of(model: torch.nn.Module) -> int:
    """Count all parameters of a module, tied ones once. A parameter sharded by ZeRO-3 counts as a whole."""
    return sum(map(_numel, model.parameters()))


def count_over_ranks(model: torch.nn.Module, plan: Plan, device: torch.device) -> int:
    """Count the parameters of the whole model over all ranks, each of which may hold a part. Collective."""
    own = sum(_numel(parameter) / copies_of(parameter, plan) for parameter in model.parameters())
    total = torch.tensor(own, dtype=torch.float64, device=device)
    torch.distributed.all_reduce(total)
    return round(float(total))


def _numel(parameter: torch.nn.Parameter) -> int:
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _without_storage(config: PreTrainedConfig) -> Any:
    with torch.device("meta"):
        return _from_config(config, torch.float32, Attention.SDPA)


def _from_config(config: PreTrainedConfig, dtype: torch.dtype, attention: Attention) -> Any:
    try:
        return AutoModelForCausalLM.from_config(config, attn_implementation=attention.value, dtype=dtype)
    except ImportError as error:  # transformers raises it if the machine lacks a package or feature
        raise ValueError(f"attention={attention}: {error}") from error


def _refuse_absent_attention(attention: Attention) -> None:
    """Raise ValueError if flash-attn is missing: transformers would look for a kernel on the network."""
    if attention is Attention.FLASH and find_spec("flash_attn") is None:
        raise ValueError(
            f"attention={attention} needs the package flash-attn, which is not installed; sdpa needs none"
        )


def _llama_config(shape: ModelShape) -> PreTrainedConfig:
    return LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.positions,
        tie_word_embeddings=shape.tied_embeddings,
        bos_token_id=None,  # the default ids lie outside a small vocabulary
        eos_token_id=None,
    )


def _gpt2_config(shape: ModelShape) -> PreTrainedConfig:
    config: PreTrainedConfig = GPT2Config(
        vocab_size=shape.vocab,
        n_embd=shape.hidden,
        n_inner=shape.ffn,
        n_layer=shape.layers,
        n_head=shape.heads,
        n_positions=shape.positions,
        tie_word_embeddings=shape.tied_embeddings,
        bos_token_id=None,
        eos_token_id=None,
    )
    return without_dropout(config)
