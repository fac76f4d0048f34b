"""The model that is trained: from a shape, or from a local transformers directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from train_entry.contract import Checkpointing, ModelShape, Plan

WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")


def build_model(shape: ModelShape, plan: Plan, device: torch.device) -> PreTrainedModel:
    """The model in fp32 on the rank's device. Every strategy starts from the same weights."""
    torch.manual_seed(plan.seed)
    if shape.path is not None and has_weights(Path(shape.path)):
        model = _with_weights(Path(shape.path)).to(device)
    else:
        with device:
            model = _with_new_weights(config_of(shape))
    # Named, since transformers warns of a default that it takes anyway.
    model.loss_type = "ForCausalLM"
    model.config.use_cache = False  # keys and values are kept for generating, and cost memory in training
    if plan.activation_checkpointing is Checkpointing.FULL:
        # The reentrant kind runs backward inside backward, which DDP's and ZeRO's hooks do not expect.
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    return model


def config_of(shape: ModelShape) -> PreTrainedConfig:
    """The transformers configuration of a shape. Raises ValueError for a family it cannot make up."""
    if shape.path is not None:
        return local_config(Path(shape.path))
    builders = {"llama": _llama_config, "gpt2": _gpt2_config}
    if shape.family not in builders:
        raise ValueError(
            f"model.family is {shape.family}; from a shape alone only {' and '.join(builders)} can be built: "
            "set model.path to a directory with its config.json"
        )
    return builders[shape.family](shape)


def local_config(directory: Path) -> PreTrainedConfig:
    """Read config.json. Raises ValueError or OSError, as transformers does."""
    if not (directory / "config.json").is_file():
        raise ValueError(f"no config.json in {directory}")
    config: PreTrainedConfig = AutoConfig.from_pretrained(directory, local_files_only=True)
    return config


def has_weights(directory: Path) -> bool:
    """Whether there is something to fine-tune."""
    return any(True for pattern in WEIGHT_FILES for _ in directory.glob(pattern))


def count_parameters(config: PreTrainedConfig) -> int:
    """All parameters, tied ones once; nothing is allocated."""
    with torch.device("meta"):
        return parameters_of(_with_new_weights(config))


def parameters_of(model: torch.nn.Module) -> int:
    """All parameters of a module, tied ones once."""
    return sum(parameter.numel() for parameter in model.parameters())


def _with_new_weights(config: PreTrainedConfig) -> Any:
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)


def _with_weights(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        directory, attn_implementation="sdpa", dtype=torch.float32, local_files_only=True
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
        bos_token_id=None,  # the defaults lie outside a small vocabulary
        eos_token_id=None,
    )


def _gpt2_config(shape: ModelShape) -> PreTrainedConfig:
    # Dropout off: its random numbers would differ between ranks and strategies, and so would the losses.
    return GPT2Config(
        vocab_size=shape.vocab,
        n_embd=shape.hidden,
        n_inner=shape.ffn,
        n_layer=shape.layers,
        n_head=shape.heads,
        n_positions=shape.positions,
        tie_word_embeddings=shape.tied_embeddings,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
    )
