"""What a job is told: model, data, plan, how long to look."""

from __future__ import annotations

from dataclasses import dataclass

from train_entry.contract.words import AttemptKind, Checkpointing, Engine, Precision


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """A causal language model, precise enough to build it and to count it."""

    name: str
    family: str  # a transformers model_type: llama, gpt2, ...
    parameters: int  # all of them, embeddings included, tied ones once
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    positions: int  # longest sequence it was made for
    tied_embeddings: bool
    path: str | None = None  # a local directory with config.json, perhaps weights; None: built from the shape


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSpec:
    """Where tokens come from."""

    kind: str  # stdlib, text or synthetic
    path: str | None = None  # text: a file, or a directory searched for *.txt, *.md, *.jsonl, *.py
    tokenizer: str | None = None  # a local tokenizer directory; None: one token a byte
    max_bytes: int = 64 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class ZeroPlan:
    """DeepSpeed's zero_optimization section. Bucket sizes in elements, as DeepSpeed counts them."""

    stage: int
    reduce_bucket_size: int
    allgather_bucket_size: int
    overlap_comm: bool
    contiguous_gradients: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerPlan:
    name: str  # adamw or sgd
    lr: float  # the peak learning rate in effect, after the scaling rule
    weight_decay: float
    beta1: float = 0.0
    beta2: float = 0.0
    eps: float = 0.0
    momentum: float = 0.0
    fused: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Knobs resolved for a rank count: everything that changes what the ranks execute."""

    engine: Engine
    ranks: int
    tensor: int
    pipeline: int
    micro_batch: int  # sequences per rank and forward pass
    global_batch: int  # sequences per optimizer step, over all ranks
    seq_len: int
    precision: Precision
    activation_checkpointing: Checkpointing
    gradient_clipping: float  # 0: none
    optimizer: OptimizerPlan
    warmup_steps: int  # of the learning rate; 0: constant from the first step
    zero: ZeroPlan
    seed: int

    @property
    def data(self) -> int:
        """Ranks that see different samples."""
        return self.ranks // (self.tensor * self.pipeline)

    @property
    def grad_accum(self) -> int:
        return self.global_batch // (self.micro_batch * self.data)

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.seq_len

    @property
    def strategy(self) -> str:
        """The name tables use; derived from what runs, never from the preset that was asked."""
        return "ddp" if self.engine is Engine.DDP else f"zero{self.zero.stage}"


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasureSpec:
    """How long to look."""

    warmup_steps: int  # dropped from timing: allocator growth, lazily created optimizer state
    steps: int  # timed
    split_steps: int  # after the timed ones: forward, backward and step timed apart, each synchronized
    update_norms: bool = False  # also record the norm of each parameter update (costs a copy of the model)


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeLimits:
    """When a supervisor ends its rank."""

    attempt_s: float
    startup_silence_s: float  # longest time without a new heartbeat before the first step has ended
    step_silence_s: float  # and after it


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialSpec:
    """All that a job is told."""

    study: str
    trial: int
    attempt: int
    kind: AttemptKind
    device: str  # cuda or cpu
    plan: Plan
    model: ModelShape
    data: DataSpec
    measure: MeasureSpec
    limits: TimeLimits
