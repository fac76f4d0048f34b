"""The specification of a job: model, data, plan, and how long to measure."""

from __future__ import annotations

from dataclasses import dataclass

from train_entry.contract.shared.words import AttemptKind, Attention, Engine, Offload, Precision, Schedule


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelShape:
    """A causal language model's dimensions: enough to build it and to count its parameters."""

    name: str
    family: str  # a transformers model_type: llama, gpt2, ...
    parameters: int  # all, embeddings included; tied ones count once
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    positions: int  # the longest sequence that the model supports, in tokens
    tied_embeddings: bool
    has_biases: bool = False  # of a llama's matrices, which rarely have them
    path: str | None = None  # local directory with config.json, maybe weights; None: built from the shape

    @property
    def largest_parameter(self) -> int:
        """Elements of the largest matrix, which is the embedding or a feed-forward matrix."""
        return self.hidden * max(self.vocab, self.ffn)


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSpec:
    """The source of the tokens."""

    kind: str  # stdlib, text or synthetic
    path: str | None = None  # text: a file, or a directory searched for *.txt, *.md, *.jsonl, *.py
    tokenizer: str | None = None  # a local tokenizer directory; None: one token per byte
    max_bytes: int = 64 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class ZeroPlan:
    """DeepSpeed's zero_optimization section. Sizes are in elements, as in DeepSpeed."""

    stage: int  # 0: nothing is sharded; always 0 with ddp
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
    hpz_partition_size: int = 1  # ZeRO++: ranks that together hold a second copy of the weights
    quantized_weights: bool = False
    quantized_gradients: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class AioPlan:
    """Parameters of libaio, which reads and writes the states offloaded to NVMe."""

    block_size_bytes: int = 1_048_576
    queue_depth: int = 8
    threads: int = 1  # DeepSpeed's intra_op_parallelism
    single_submit: bool = False
    overlap_events: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class OffloadPlan:
    """The states that ZeRO offloads, and the way they are moved."""

    optimizer: Offload = Offload.NONE
    param: Offload = Offload.NONE
    ratio: float = 1.0  # share of the optimizer states that is updated on the CPU
    pin_memory: bool = True
    max_in_cpu: int = 1_000_000_000  # param on NVMe: elements that a rank still keeps in host memory
    buffer_count: int = 5  # param on NVMe: number of buffers, of buffer_size elements each
    buffer_size: int = 100_000_000
    nvme_path: str | None = None
    aio: AioPlan = AioPlan()

    @property
    def devices(self) -> frozenset[Offload]:
        """The places, other than the device, that hold any states."""
        return frozenset((self.optimizer, self.param)) - {Offload.NONE}


@dataclass(frozen=True, kw_only=True, slots=True)
class DdpPlan:
    """Arguments of torch's DistributedDataParallel."""

    bucket_cap_mib: int = 25
    gradient_as_bucket_view: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class LossScalePlan:
    """Loss scaling in fp16, which keeps small gradients from vanishing."""

    static: float = 0.0  # the fixed scale; 0: dynamic, with the values below
    initial_power: int = 16  # the scale begins at 2 to this power
    window: int = 1000  # steps without overflow after which the scale doubles
    hysteresis: int = 2  # overflows before the scale halves
    minimum: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerPlan:
    name: str  # adamw or sgd
    lr: float  # the peak learning rate, after the scaling rule
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
    warmup_steps: int = 0  # 0: the first step already uses the peak rate
    warmup_from: float = 0.0  # the rate at which the warm-up begins
    total_steps: int = 0  # linear and cosine: the step at which the decay has ended
    end: float = 0.0  # cosine: the rate at which the decay ends


@dataclass(frozen=True, kw_only=True, slots=True)
class Coordinates:
    """A rank's position along each of the three axes that divide the work."""

    stage: int  # index of the pipeline stage, counted from the embedding to the head
    data: int  # index of its share of the samples
    tensor: int  # index of its part of every split matrix


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Knobs resolved for a rank count: everything that changes what the ranks execute.

    A knob that has no effect on this plan has its default value.
    """

    engine: Engine
    ranks: int
    tensor: int
    pipeline: int
    micro_batch: int  # sequences per rank and forward pass; ranks of one model copy see the same ones
    global_batch: int  # sequences per optimizer step, over all ranks
    seq_len: int
    precision: Precision
    gradient_clipping: float  # 0: none
    optimizer: OptimizerPlan
    zero: ZeroPlan
    seed: int
    grad_accum_dtype: Precision | None = None  # None: the same as `precision`
    loss_scale: LossScalePlan = LossScalePlan()
    schedule: SchedulePlan = SchedulePlan()
    offload: OffloadPlan = OffloadPlan()
    ddp: DdpPlan = DdpPlan()
    checkpoint_every: int = 0  # k: every k-th transformer block is recomputed; 0: none, 1: all
    attention: Attention = Attention.SDPA
    compile: bool = False
    expandable_segments: bool = False  # torch's CUDA allocator grows segments instead of adding new ones

    @property
    def data(self) -> int:
        """The data degree: the number of model copies, each of which sees different samples."""
        return self.ranks // (self.tensor * self.pipeline)

    def coordinates(self, rank: int) -> Coordinates:
        """Return the position of a rank. Tensor ranks are adjacent, then data ranks, then stages.

        Ranks that exchange more data are thus closer together. DeepSpeed's PipeModelDataParallelTopology has
        the same order.
        """
        copy_and_stage, tensor = divmod(rank, self.tensor)
        stage, data = divmod(copy_and_stage, self.data)
        return Coordinates(stage=stage, data=data, tensor=tensor)

    def blocks(self, stage: int, layers: int) -> range:
        """Return the transformer blocks of a stage. All stages have the same number of the `layers`."""
        each = layers // self.pipeline
        return range(stage * each, (stage + 1) * each)

    @property
    def bubble(self) -> float:
        """Least share of a step in which a rank waits for other stages: (p - 1) / (m + p - 1).

        p is the number of stages, m that of micro-batches; the schedule is 1F1B. Narayanan et al. 2021, arXiv
        2104.04473, section 2.2, give the same time relative to the time without waiting.
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
        """The name that tables use. It is derived from what runs, never from the preset in the command."""
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
    """The number of steps to run and time, and when to stop early."""

    warmup_steps: int  # not timed: the allocator grows and optimizer states are created
    steps: int  # timed steps, at most
    split_steps: int  # after the timed ones: forward, backward and update timed separately, synchronized
    update_norms: bool = False  # also record the norm of each parameter update (costs a copy of the model)
    # Timing ends before `steps` once the interval of the mean step time has this relative half-width. The
    # confidence holds over all looks together. 0: timing never ends for this reason.
    precision: float = 0.0
    confidence: float = 0.95
    min_steps: int = 4  # timed steps before the first look
    look_every: int = 2  # timed steps from one look to the next
    beat_step_s: float | None = None  # timing also ends once steps are known to be slower: it cannot win


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeLimits:
    """The time limits after which a supervisor ends its rank."""

    attempt_s: float  # from the end of start-up, which has a limit of its own
    startup_silence_s: float  # longest time without a new heartbeat until the first step has ended
    step_silence_s: float  # longest time without a new heartbeat afterwards
    startup_s: float = 1800.0  # from the start of a rank to the end of its first step, compiling included


@dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """The estimated needs that a scheduler wants to know before the launch."""

    steps_s: float  # all steps together, without start-up
    host_bytes: int  # resident memory of all ranks of the fullest node


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialSpec:
    """The complete input of a job."""

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
    memory_limit_bytes: int | None = None  # what torch may reserve on each GPU; None: the whole GPU
    expected: Expected | None = None  # None: there is no estimate
