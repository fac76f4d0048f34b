"""What a job is told: model, data, plan, how long to look."""

from __future__ import annotations

from dataclasses import dataclass

from train_entry.contract.shared.words import AttemptKind, Attention, Engine, Offload, Precision, Schedule


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
    has_biases: bool = False  # in a llama's matrices, of which most have none
    path: str | None = None  # a local directory with config.json, perhaps weights; None: built from the shape

    @property
    def largest_parameter(self) -> int:
        """Elements of the largest matrix: an embedding, or a feed-forward layer."""
        return self.hidden * max(self.vocab, self.ffn)


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSpec:
    """Where tokens come from."""

    kind: str  # stdlib, text or synthetic
    path: str | None = None  # text: a file, or a directory searched for *.txt, *.md, *.jsonl, *.py
    tokenizer: str | None = None  # a local tokenizer directory; None: one token a byte
    max_bytes: int = 64 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class ZeroPlan:
    """DeepSpeed's zero_optimization section. Sizes in elements, as DeepSpeed counts them."""

    stage: int  # 0: nothing is sharded, as always with ddp
    reduce_bucket_size: int = 500_000_000
    allgather_bucket_size: int = 500_000_000
    overlap_comm: bool = False
    contiguous_gradients: bool = True
    reduce_scatter: bool = True
    # Stages 1 and 2.
    use_multi_rank_bucket_allreduce: bool = True
    round_robin_gradients: bool = False
    # Stage 3.
    prefetch_bucket_size: int = 50_000_000
    param_persistence_threshold: int = 100_000
    max_live_parameters: int = 1_000_000_000
    max_reuse_distance: int = 1_000_000_000
    sub_group_size: int = 1_000_000_000
    hpz_partition_size: int = 1  # ZeRO++: ranks that keep a second copy of the weights among themselves
    quantized_weights: bool = False
    quantized_gradients: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class AioPlan:
    """How libaio reads and writes what is offloaded to NVMe."""

    block_size_bytes: int = 1_048_576
    queue_depth: int = 8
    threads: int = 1  # DeepSpeed's intra_op_parallelism
    single_submit: bool = False
    overlap_events: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadPlan:
    """What ZeRO keeps off the device, and how it gets there and back."""

    optimizer: Offload = Offload.NONE
    param: Offload = Offload.NONE
    ratio: float = 1.0  # share of the optimizer's states that is updated on the CPU
    pin_memory: bool = True
    max_in_cpu: int = 1_000_000_000  # param on NVMe: elements a rank keeps in host memory all the same
    buffer_count: int = 5  # param on NVMe: buffers, of buffer_size elements each
    buffer_size: int = 100_000_000
    nvme_path: str | None = None
    aio: AioPlan = AioPlan()

    @property
    def devices(self) -> frozenset[Offload]:
        """Where anything is kept, the device itself aside."""
        return frozenset((self.optimizer, self.param)) - {Offload.NONE}


@dataclass(frozen=True, kw_only=True, slots=True)
class DdpPlan:
    """Arguments of torch's DistributedDataParallel."""

    bucket_cap_mib: int = 25
    gradient_as_bucket_view: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class LossScalePlan:
    """How fp16 keeps small gradients from vanishing."""

    static: float = 0.0  # 0: dynamic, by the numbers below
    initial_power: int = 16  # it begins at 2 to this power
    window: int = 1000  # steps without overflow after which it doubles
    hysteresis: int = 2  # overflows before it halves
    minimum: int = 1


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
class SchedulePlan:
    """The learning rate over the steps; its peak is the optimizer's `lr`."""

    kind: Schedule = Schedule.CONSTANT
    warmup_steps: int = 0  # 0: from the first step at the peak
    warmup_from: float = 0.0  # the rate at which the warm-up begins
    total_steps: int = 0  # linear and cosine: the step at which the decay has ended
    end: float = 0.0  # cosine: the rate it ends at


@dataclass(frozen=True, kw_only=True, slots=True)
class Coordinates:
    """Where a rank stands in each of the three ways in which work is divided."""

    stage: int  # of the pipeline, from the embedding to the head
    data: int  # which share of the samples
    tensor: int  # which share of every split matrix


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Knobs resolved for a rank count: everything that changes what the ranks execute.

    A knob that has no effect on this plan stands at its default.
    """

    engine: Engine
    ranks: int
    tensor: int
    pipeline: int
    micro_batch: int  # sequences per rank and forward pass
    global_batch: int  # sequences per optimizer step, over all ranks
    seq_len: int
    precision: Precision
    gradient_clipping: float  # 0: none
    optimizer: OptimizerPlan
    zero: ZeroPlan
    seed: int
    grad_accum_dtype: Precision | None = None  # None: that of the forward and backward pass
    loss_scale: LossScalePlan = LossScalePlan()
    schedule: SchedulePlan = SchedulePlan()
    offload: OffloadPlan = OffloadPlan()
    ddp: DdpPlan = DdpPlan()
    checkpoint_every: int = 0  # every k-th transformer block keeps its input only; 0: none, 1: all
    attention: Attention = Attention.SDPA
    compile: bool = False
    expandable_segments: bool = False  # torch's CUDA allocator grows segments instead of adding others

    @property
    def data(self) -> int:
        """Copies of the model, which see different samples."""
        return self.ranks // (self.tensor * self.pipeline)

    def coordinates(self, rank: int) -> Coordinates:
        """Neighbours share matrices, the farthest apart are stages: the more is sent, the closer.

        The order of DeepSpeed's PipeModelDataParallelTopology.
        """
        copy_and_stage, tensor = divmod(rank, self.tensor)
        stage, data = divmod(copy_and_stage, self.data)
        return Coordinates(stage=stage, data=data, tensor=tensor)

    def blocks(self, stage: int, layers: int) -> range:
        """The transformer blocks of a stage, out of all `layers`: equally many each."""
        each = layers // self.pipeline
        return range(stage * each, (stage + 1) * each)

    @property
    def bubble(self) -> float:
        """Share of a step in which a rank waits for other stages, at best: (p - 1) / (m + p - 1).

        For p stages, m micro-batches and 1F1B; Narayanan et al. 2021, arXiv 2104.04473, section 2.2, give it
        relative to the time without waiting.
        """
        return (self.pipeline - 1) / (self.grad_accum + self.pipeline - 1)

    @property
    def grad_accum(self) -> int:
        return self.global_batch // (self.micro_batch * self.data)

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.seq_len

    @property
    def strategy(self) -> str:
        """The name tables use; derived from what runs, never from the preset that was asked."""
        if self.engine is Engine.DDP:
            return "ddp"
        devices = self.offload.devices
        suffix = "_nvme" if Offload.NVME in devices else "_offload" if devices else ""
        degrees = [f"{name}{degree}" for name, degree in self._degrees if degree > 1]
        zero = [f"zero{self.zero.stage}{suffix}"] if self.zero.stage or not degrees else []
        return "_".join((*degrees, *zero))

    @property
    def _degrees(self) -> tuple[tuple[str, int], ...]:
        return ("tp", self.tensor), ("pp", self.pipeline)


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasureSpec:
    """How long to look."""

    warmup_steps: int  # dropped from timing: allocator growth, lazily created optimizer state
    steps: int  # timed, at most
    split_steps: int  # after the timed ones: forward, backward and step timed apart, each synchronized
    update_norms: bool = False  # also record the norm of each parameter update (costs a copy of the model)
    # Timing ends before `steps` once the mean step time is known to this relative half-width, at this
    # confidence however often one looks; 0: never.
    precision: float = 0.0
    confidence: float = 0.95
    min_steps: int = 4  # timed before the first look
    look_every: int = 2  # timed steps from one look to the next
    beat_step_s: float | None = None  # ends also once it is known to be slower than this: it cannot win


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeLimits:
    """When a supervisor ends its rank."""

    attempt_s: float  # from the end of start-up, which has a limit of its own
    startup_silence_s: float  # longest time without a new heartbeat before the first step has ended
    step_silence_s: float  # and after it
    startup_s: float = 1800.0  # from the start of a rank to the end of its first step, compiling included


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """What the estimate says that a scheduler wants to know before the launch."""

    steps_s: float  # all steps together, without start-up
    host_bytes: int  # resident memory of all ranks of the fullest node


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
    memory_limit_bytes: int | None = None  # that torch may reserve on each GPU; None: all there is
    expected: Expected | None = None  # None: there was no estimate
