"""Model shapes and their parameter counts, without importing torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from sweeps.config.schema import ModelConfig
from sweeps.errors import ConfigError
from sweeps.paths import ROOT
from train_entry.contract import ContractError, ModelShape, load

COUNT_TIMEOUT_S = 300


def model_shape(model: ModelConfig) -> ModelShape:
    """Return the configured model's shape; for `model=hf` read from its directory. Raises ConfigError."""
    if model.family == "hf":
        return _local_shape(Path(str(model.path)).resolve())
    if model.hidden % model.heads or model.heads % model.kv_heads:
        raise ConfigError(
            f"model: hidden={model.hidden} must be a multiple of heads={model.heads}, "
            f"and heads a multiple of kv_heads={model.kv_heads}"
        )
    count = {"llama": llama_parameters, "gpt2": gpt2_parameters}[model.family]
    return ModelShape(
        name=model.name,
        family=model.family,
        parameters=count(model),
        layers=model.layers,
        hidden=model.hidden,
        heads=model.heads,
        kv_heads=model.kv_heads,
        ffn=model.ffn,
        vocab=model.vocab,
        positions=model.positions,
        tied_embeddings=model.tied_embeddings,
    )


def llama_parameters(model: ModelConfig) -> int:
    """Count q, k, v, o; gate, up, down; two norms per block; embeddings, head and last norm. No biases."""
    kv_width = model.hidden // model.heads * model.kv_heads
    attention = 2 * model.hidden * model.hidden + 2 * model.hidden * kv_width
    block = attention + 3 * model.hidden * model.ffn + 2 * model.hidden
    embeddings = model.vocab * model.hidden * (1 if model.tied_embeddings else 2)
    return embeddings + model.layers * block + model.hidden


def gpt2_parameters(model: ModelConfig) -> int:
    """Count fused qkv, o; two feed-forward layers; two norms per block; all biases; learned positions."""
    attention = 4 * model.hidden * model.hidden + 4 * model.hidden
    feed_forward = 2 * model.hidden * model.ffn + model.ffn + model.hidden
    block = attention + feed_forward + 4 * model.hidden
    embeddings = model.vocab * model.hidden * (1 if model.tied_embeddings else 2)
    return embeddings + model.positions * model.hidden + model.layers * block + 2 * model.hidden


def _local_shape(path: Path) -> ModelShape:
    """Let transformers count, in a process of its own: importing transformers here would import torch."""
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"model.path={path}: no config.json there; give the directory of a transformers model"
        )
    command = [sys.executable, "-P", "-m", "train_entry.model.shape", str(path)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=COUNT_TIMEOUT_S, env=_environment(ROOT)
    )
    try:
        return load(ModelShape, done.stdout)
    except ContractError as error:
        lines = done.stderr.strip().splitlines() or ["it printed nothing"]
        raise ConfigError(
            f"model.path={path}: cannot be read as a causal language model: {lines[-1]}"
        ) from error


def _environment(root: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(root), "HF_HUB_OFFLINE": "1"}
