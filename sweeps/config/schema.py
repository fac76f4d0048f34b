"""Every key a configuration may have, its type, its limits and what it means.

Hydra merges the YAML files of conf/ into these classes, so that a key that is not here, or a value of
another type, is refused while composing. They are mutable because OmegaConf requires that of a schema;
nothing beyond `sweeps.plan.resolve` sees them. The keys' help and bounds are data:
`sweeps.config.validate` reads them, and docs/knobs.md is checked against them.

Whole numbers that people write as `5e7` are floats here, marked `integral`: Hydra parses `5e7` as a float.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sweeps.config.cluster import ClusterConfig as ClusterConfig
from sweeps.config.knob import knob as knob
from sweeps.config.search import CheckConfig as CheckConfig
from sweeps.config.search import ConfirmConfig as ConfirmConfig
from sweeps.config.search import LimitsConfig as LimitsConfig
from sweeps.config.search import MeasureConfig as MeasureConfig
from sweeps.config.search import SearchConfig as SearchConfig

STUDY_KEYS = (
    "study",
    "model",
    "studies_dir",
    "dry_run",
    "dry_run_to",
    "gate",
    "objective",
    "accept_versions",
    "data",
    "cluster",
    "search",
    "measure",
    "check",
    "confirm",
    "tracking",
    "limits",
    "token_budget",
    "space",
    "experiment",
)  # fixed within a study: what makes its trials comparable, and how it is run. Never a dimension.


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
    kind: str = knob("stdlib", "where tokens come from", choices=("stdlib", "text", "synthetic"))
    path: str | None = knob(None, "text: a file or a directory of text files")
    tokenizer: str | None = knob(None, "a local tokenizer directory; null: one token a byte")
    max_bytes: float = knob(64 * 2**20, "read at most this much text", unit="bytes", low=1024, integral=True)


@dataclass
class ZeroConfig:
    stage: int = knob(
        0, "what ZeRO shards: 0 nothing, 1 optimizer, 2 + gradients, 3 + weights", low=0, high=3
    )
    offload_optimizer: str = knob(
        "none", "keep the optimizer's states, and update, off the device", choices=("none", "cpu", "nvme")
    )
    offload_param: str = knob(
        "none", "stage 3: keep the weights off the device", choices=("none", "cpu", "nvme")
    )
    reduce_bucket_size: float = knob(
        5e8, "gradients reduced at once", unit="elements", low=1, integral=True, grid="digits"
    )
    allgather_bucket_size: float = knob(
        5e8,
        "weights gathered at once; without effect on current torch",
        unit="elements",
        low=1,
        integral=True,
    )
    overlap_comm: bool = knob(False, "reduce gradients while the backward pass goes on (one more bucket)")
    contiguous_gradients: bool = knob(True, "copy gradients into one buffer as they appear")
    reduce_scatter: bool = knob(True, "each rank receives its own share of the gradients only")
    use_multi_rank_bucket_allreduce: bool = knob(
        True, "stages 1 and 2: one reduction for the shares of all ranks in a bucket"
    )
    round_robin_gradients: bool = knob(
        False, "stages 1 and 2: spread gradients over the ranks in turn, not in stretches"
    )
    prefetch_bucket_size: float = knob(
        5e7,
        "stage 3: weights gathered ahead of their use",
        unit="elements",
        low=0,
        integral=True,
        grid="digits",
    )
    param_persistence_threshold: float = knob(
        1e5,
        "stage 3: smaller parameters are never sharded",
        unit="elements",
        low=0,
        integral=True,
        grid="digits",
    )
    max_live_parameters: float = knob(
        1e9, "stage 3: weights kept gathered at most", unit="elements", low=0, integral=True, grid="digits"
    )
    max_reuse_distance: float = knob(
        1e9,
        "stage 3: weights needed again within this many elements stay gathered",
        unit="elements",
        low=0,
        integral=True,
        grid="digits",
    )
    sub_group_size: float = knob(
        1e9, "stage 3: parameters updated at once", unit="elements", low=1, integral=True, grid="digits"
    )
    hpz_partition_size: int = knob(
        1,
        "ZeRO++: ranks that keep a second copy of the weights among themselves; 1: none",
        unit="ranks",
        low=1,
    )
    quantized_weights: bool = knob(False, "ZeRO++: gather weights as 8-bit numbers")
    quantized_gradients: bool = knob(False, "ZeRO++: reduce gradients as 4-bit numbers")


@dataclass
class OffloadConfig:
    ratio: float = knob(
        1.0, "stage 3: share of the optimizer's states that lives on the CPU", above=0, high=1, grid="digits"
    )
    pin_memory: bool = knob(True, "page-locked host buffers")
    max_in_cpu: float = knob(
        1e9,
        "weights on NVMe: so many of a rank's stay in host memory all the same",
        unit="elements",
        low=0,
        integral=True,
        grid="digits",
    )
    buffer_count: int = knob(5, "weights on NVMe: buffers in host memory", low=1)
    buffer_size: float = knob(
        1e8,
        "weights on NVMe: size of a buffer; a rank's share of the largest parameter must fit",
        unit="elements",
        low=1,
        integral=True,
    )


@dataclass
class AioConfig:
    block_size: float = knob(1048576, "one read or write", unit="bytes", low=512, integral=True, grid="pow2")
    queue_depth: int = knob(8, "reads and writes under way", low=1, grid="pow2")
    threads: int = knob(1, "threads that share a transfer", low=1, grid="pow2")
    single_submit: bool = knob(False, "hand requests over one by one")
    overlap_events: bool = knob(True, "hand over the next requests while others are under way")


@dataclass
class DdpConfig:
    bucket_cap_mb: int = knob(25, "gradients reduced at once", unit="MiB", low=1, grid="pow2")
    gradient_as_bucket_view: bool = knob(False, "gradients live in the buckets: no copy, no second buffer")


@dataclass
class Fp16Config:
    loss_scale: float = knob(0.0, "a fixed loss scale; 0: dynamic, by the numbers below", low=0)
    initial_scale_power: int = knob(16, "the dynamic scale begins at 2 to this power", low=0, high=32)
    loss_scale_window: int = knob(1000, "steps without overflow until it doubles", unit="steps", low=1)
    hysteresis: int = knob(2, "overflows until it halves", low=1)
    min_loss_scale: float = knob(1.0, "it never falls below", low=1, integral=True)


@dataclass
class AllocatorConfig:
    expandable_segments: bool = knob(False, "torch's CUDA allocator grows its segments")


@dataclass
class OptimizerConfig:
    name: str = knob("adamw", "update rule", choices=("adamw", "sgd"))
    betas: list[float] = knob([0.9, 0.95], "adamw: decay of the two moments")
    eps: float = knob(1e-8, "adamw: added to the denominator", above=0)
    weight_decay: float = knob(0.1, "decoupled for adamw, L2 for sgd", low=0)
    momentum: float = knob(0.9, "sgd: momentum", low=0, high=1)
    implementation: str = knob(
        "torch", "torch (foreach) or one fused kernel", choices=("torch", "torch_fused")
    )


@dataclass
class LrConfig:
    rule: str = knob("sqrt", "how the LR follows the global batch", choices=("sqrt", "linear", "none"))
    base: float = knob(3e-4, "learning rate at base_batch", above=0)
    base_batch: int = knob(32, "the global batch at which base was found", unit="sequences", low=1)
    base_warmup: int = knob(0, "warm-up steps at base_batch; 0: none", unit="steps", low=0)
    warmup: str = knob(
        "steps", "when the batch grows keep the warm-up's `steps` or `samples`; or a step count"
    )
    warmup_from: float = knob(0.0, "the rate at base_batch that the warm-up begins with", low=0)
    schedule: str = knob(
        "constant", "what the rate does after the warm-up", choices=("constant", "linear", "cosine")
    )
    total_steps: int | None = knob(
        None, "linear, cosine: the step at which the decay has ended", unit="steps", low=1
    )
    end: float = knob(0.0, "cosine: the rate at base_batch that it ends with", low=0)


@dataclass
class GateConfig:
    enabled: bool = knob(True, "launch no plan that cannot fit, by the estimate of its memory")
    quantile: float = knob(
        0.9, "a plan fits if the estimate is too low no more often than 1 - this", low=0.5, high=0.999
    )
    headroom_gib: float = knob(0.0, "memory of each GPU that a plan must leave free", unit="GiB", low=0)
    borderline: int = knob(
        2, "plans that may just fit and are launched all the same, to learn", unit="trials", low=0
    )
    earlier_studies: bool = knob(True, "learn also from other studies of the same model on the same machine")


@dataclass
class TrackingConfig:
    kind: str = knob("mlflow", "where results are shown", choices=("mlflow", "none"))
    uri: str | None = knob(None, "tracking URI; null: SQLite beside the studies")


@dataclass
class SweepConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    zero: ZeroConfig = field(default_factory=ZeroConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    aio: AioConfig = field(default_factory=AioConfig)
    ddp: DdpConfig = field(default_factory=DdpConfig)
    fp16: Fp16Config = field(default_factory=Fp16Config)
    allocator: AllocatorConfig = field(default_factory=AllocatorConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lr: LrConfig = field(default_factory=LrConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    search: SearchConfig = field(default_factory=SearchConfig)
    measure: MeasureConfig = field(default_factory=MeasureConfig)
    check: CheckConfig = field(default_factory=CheckConfig)
    confirm: ConfirmConfig = field(default_factory=ConfirmConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    gate: GateConfig = field(default_factory=GateConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    space: dict[str, Any] = knob(dict, "knob to its range, in the grammar of -m overrides")

    study: str | None = knob(None, "the study's name; null: derived from what is asked")
    studies_dir: str = knob("studies", "where studies live")
    dry_run: bool = knob(
        False, "list the plans of the space, their estimates, or why they are illegal; launch nothing"
    )
    dry_run_to: str | None = knob(None, "dry_run=true: write the list to this file too, *.csv or *.json")
    objective: Any = knob(
        "auto",
        "what is sought: a goal, or a list of several; auto: tokens_per_s_per_gpu, while ranks is fixed",
    )
    token_budget: float | None = knob(
        None, "objective=time_to_tokens or cost: tokens to be trained", unit="tokens", low=1, integral=True
    )
    accept_versions: bool = knob(
        False, "go on with a study begun with another torch, DeepSpeed, transformers or GPU"
    )
    engine: str = knob("deepspeed", "who shards and reduces", choices=("ddp", "deepspeed"))
    ranks: int | None = knob(None, "processes, one a GPU; null: all GPUs of one node, or 2 on CPU", low=1)
    micro_batch: int = knob(1, "sequences per rank and forward pass", unit="sequences", low=1, grid="pow2")
    global_batch: int = knob(32, "sequences per optimizer step, over all ranks", unit="sequences", low=1)
    seq_len: int = knob(1024, "tokens per sequence", unit="tokens", low=2)
    precision: str = knob(
        "auto",
        "auto: bf16 on GPUs that have it, else fp16; fp32 on CPU",
        choices=("auto", "fp32", "bf16", "fp16"),
    )
    grad_accum_dtype: str = knob(
        "auto",
        "number format in which ZeRO adds gradients up; auto: that of precision",
        choices=("auto", "fp32", "bf16", "fp16"),
    )
    attention: str = knob(
        "sdpa", "implementation of attention", choices=("sdpa", "eager", "flash_attention_2")
    )
    compile: bool = knob(False, "torch.compile the model")
    tensor: int = knob(1, "tensor-parallel degree: neighbouring ranks that share every matrix", low=1)
    pipeline: int = knob(1, "pipeline-parallel degree: stages that share the transformer blocks", low=1)
    tensor_across_nodes: bool = knob(False, "let a tensor group span nodes: slow but for the fastest links")
    activation_checkpointing: str = knob(
        "none", "recompute activations: none, full, or a number k: in every k-th block"
    )
    gradient_clipping: float = knob(1.0, "largest gradient norm; 0: not clipped", low=0)
    seed: int = knob(0, "of the weights and of the order of the data", low=0)
