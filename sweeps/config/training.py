"""The keys of `model`, `data`, `fp16`, `allocator`, `optimizer` and `lr`. Part of the schema."""

from __future__ import annotations

from dataclasses import dataclass

from sweeps.config import conditions as when
from sweeps.config.knob import DeepSpeedKey, knob


def _fp16(name: str, field: str) -> DeepSpeedKey:
    return DeepSpeedKey(path=f"fp16.{name}", plan=f"loss_scale.{field}")


@dataclass
class ModelConfig:
    name: str = knob("", "the model's name in tables")
    family: str = knob("llama", "architecture", choices=("llama", "gpt2", "hf"))
    path: str | None = knob(None, "hf: a local directory with config.json; weights in it are fine-tuned")
    layers: int = knob(1, "transformer blocks", low=1)
    hidden: int = knob(64, "width of the residual stream", low=1)
    heads: int = knob(1, "attention heads", low=1)
    kv_heads: int = knob(1, "key and value heads; fewer than heads: grouped-query attention", low=1)
    ffn: int = knob(256, "width of the feed-forward layer", low=1)
    vocab: int = knob(256, "vocabulary size", low=2)
    positions: int = knob(2048, "longest sequence", low=1, unit="tokens")
    tied_embeddings: bool = knob(False, "input and output embeddings are one matrix")


@dataclass
class DataConfig:
    kind: str = knob("stdlib", "source of the tokens", choices=("stdlib", "text", "synthetic"))
    path: str | None = knob(None, "text: a file or a directory of text files")
    tokenizer: str | None = knob(None, "directory of a local tokenizer; null: one token per byte")
    max_bytes: float = knob(64 * 2**20, "read at most this much text", unit="bytes", low=1024, integral=True)


@dataclass
class Fp16Config:
    loss_scale: float = knob(
        0.0,
        "a fixed loss scale; 0: a dynamic one, set by the keys below",
        low=0,
        active_when=when.FP16,
        deepspeed=_fp16("loss_scale", "static"),
    )
    initial_scale_power: int = knob(
        16,
        "the dynamic scale begins at 2 to this power",
        low=0,
        high=32,
        active_when=when.DYNAMIC_SCALE,
        deepspeed=_fp16("initial_scale_power", "initial_power"),
    )
    loss_scale_window: int = knob(
        1000,
        "steps without overflow after which the dynamic scale doubles",
        unit="steps",
        low=1,
        active_when=when.DYNAMIC_SCALE,
        deepspeed=_fp16("loss_scale_window", "window"),
    )
    hysteresis: int = knob(
        2,
        "overflows after which the dynamic scale halves",
        low=1,
        active_when=when.DEEPSPEED_DYNAMIC_SCALE,
        deepspeed=_fp16("hysteresis", "hysteresis"),
    )
    min_loss_scale: float = knob(
        1.0,
        "smallest value of the dynamic scale",
        low=1,
        integral=True,
        active_when=when.DEEPSPEED_DYNAMIC_SCALE,
        deepspeed=_fp16("min_loss_scale", "minimum"),
    )


@dataclass
class AllocatorConfig:
    expandable_segments: bool = knob(
        False, "let torch's CUDA allocator grow its segments", active_when=when.GPU
    )


@dataclass
class OptimizerConfig:
    name: str = knob("adamw", "update rule", choices=("adamw", "sgd"))
    betas: list[float] = knob([0.9, 0.95], "adamw: decay rates of the two moments", active_when=when.ADAMW)
    eps: float = knob(1e-8, "adamw: added to the denominator", above=0, active_when=when.ADAMW)
    weight_decay: float = knob(0.1, "decoupled for adamw, L2 for sgd", low=0)
    momentum: float = knob(0.9, "sgd: momentum", low=0, high=1, active_when=when.SGD)
    implementation: str = knob(
        "torch",
        "torch's foreach implementation, or its single fused kernel",
        choices=("torch", "torch_fused"),
        active_when=when.TORCH_OPTIMIZER,
    )


@dataclass
class LrConfig:
    rule: str = knob("sqrt", "how the rate scales with the global batch", choices=("sqrt", "linear", "none"))
    base: float = knob(3e-4, "learning rate at base_batch", above=0)
    base_batch: int = knob(32, "the global batch at which base was found", unit="sequences", low=1)
    base_warmup: int = knob(
        0, "warm-up steps at base_batch; 0: none", unit="steps", low=0, active_when=when.SCALED_WARMUP
    )
    warmup: str = knob(
        "steps", "when the batch grows, keep the warm-up's `steps` or its `samples`; or a number of steps"
    )
    warmup_from: float = knob(
        0.0, "rate, at base_batch, from which the warm-up begins", low=0, active_when=when.WARMUP
    )
    schedule: str = knob("constant", "the rate after the warm-up", choices=("constant", "linear", "cosine"))
    total_steps: int | None = knob(
        None,
        "linear, cosine: the step at which the decay ends",
        unit="steps",
        low=1,
        active_when=when.DECAY,
    )
    end: float = knob(
        0.0, "cosine: rate, at base_batch, at which the decay ends", low=0, active_when=when.COSINE
    )
