"""Every key a configuration may have. Each is declared once, with its type, limits, meaning and scope.

Hydra merges the YAML files of conf/ into these classes, so that a key that is not here, or a value of
another type, is refused while composing. They are mutable because OmegaConf requires that of a schema;
nothing beyond `sweeps.plan` sees them. `sweeps.config.keys` reads what is declared, and docs/knobs.md is
checked against it.

Whole numbers that people write as `5e7` are floats here, marked `integral`: Hydra parses `5e7` as a float.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sweeps.config import conditions as when
from sweeps.config.cluster import ClusterConfig as ClusterConfig
from sweeps.config.knob import Mark, Scope, knob, section
from sweeps.config.search import CheckConfig as CheckConfig
from sweeps.config.search import ConfirmConfig as ConfirmConfig
from sweeps.config.search import GateConfig as GateConfig
from sweeps.config.search import LimitsConfig as LimitsConfig
from sweeps.config.search import MeasureConfig as MeasureConfig
from sweeps.config.search import SearchConfig as SearchConfig
from sweeps.config.search import TrackingConfig as TrackingConfig
from sweeps.config.training import AllocatorConfig as AllocatorConfig
from sweeps.config.training import DataConfig as DataConfig
from sweeps.config.training import Fp16Config as Fp16Config
from sweeps.config.training import LrConfig as LrConfig
from sweeps.config.training import ModelConfig as ModelConfig
from sweeps.config.training import OptimizerConfig as OptimizerConfig
from sweeps.config.zero import AioConfig as AioConfig
from sweeps.config.zero import DdpConfig as DdpConfig
from sweeps.config.zero import OffloadConfig as OffloadConfig
from sweeps.config.zero import ZeroConfig as ZeroConfig


@dataclass
class SweepConfig:
    model: ModelConfig = section(ModelConfig, scope=Scope.STUDY, marks=Mark.COMPARABLE)
    data: DataConfig = section(DataConfig, scope=Scope.STUDY, marks=Mark.COMPARABLE)
    zero: ZeroConfig = section(ZeroConfig)
    offload: OffloadConfig = section(OffloadConfig)
    aio: AioConfig = section(AioConfig)
    ddp: DdpConfig = section(DdpConfig)
    fp16: Fp16Config = section(Fp16Config)
    allocator: AllocatorConfig = section(AllocatorConfig)
    optimizer: OptimizerConfig = section(OptimizerConfig)
    lr: LrConfig = section(LrConfig)
    cluster: ClusterConfig = section(ClusterConfig, scope=Scope.STUDY)
    search: SearchConfig = section(SearchConfig, scope=Scope.SEARCH)
    measure: MeasureConfig = section(MeasureConfig, scope=Scope.STUDY)
    check: CheckConfig = section(CheckConfig, scope=Scope.SEARCH)
    confirm: ConfirmConfig = section(ConfirmConfig, scope=Scope.SEARCH)
    tracking: TrackingConfig = section(TrackingConfig, scope=Scope.SEARCH, marks=Mark.SECRET)
    gate: GateConfig = section(GateConfig, scope=Scope.SEARCH, marks=Mark.FIT_ONLY)
    limits: LimitsConfig = section(LimitsConfig, scope=Scope.SEARCH)
    space: dict[str, Any] = knob(
        dict, "knob to its range, in the grammar of -m overrides", scope=Scope.IDENTITY
    )

    study: str | None = knob(None, "the study's name; null: derived from what is asked", scope=Scope.IDENTITY)
    studies_dir: str = knob("studies", "where studies live", scope=Scope.IDENTITY)
    dry_run: bool = knob(
        False,
        "list the plans of the space, their estimates, or why they are illegal; launch nothing",
        scope=Scope.SEARCH,
    )
    dry_run_to: str | None = knob(
        None, "dry_run=true: write the list to this file too, *.csv or *.json", scope=Scope.SEARCH
    )
    objective: Any = knob(
        "auto",
        "what is sought: a goal, or a list of several; auto: tokens_per_s_per_gpu, while ranks is fixed",
        scope=Scope.IDENTITY,
    )
    token_budget: float | None = knob(
        None,
        "objective=time_to_tokens or cost: tokens to be trained",
        unit="tokens",
        low=1,
        integral=True,
        scope=Scope.IDENTITY,
    )
    accept_versions: bool = knob(
        False,
        "go on with a study begun with another torch, DeepSpeed, transformers or GPU",
        scope=Scope.SEARCH,
    )
    engine: str = knob(
        "deepspeed", "who shards and reduces", choices=("ddp", "deepspeed"), marks=Mark.BY_HAND
    )
    ranks: int | None = knob(
        None, "processes, one a GPU; null: all GPUs of one node, or 2 on CPU", low=1, marks=Mark.COMPARABLE
    )
    micro_batch: int = knob(
        1, "sequences per rank and forward pass", unit="sequences", low=1, grid="pow2", marks=Mark.BY_HAND
    )
    global_batch: int = knob(
        32, "sequences per optimizer step, over all ranks", unit="sequences", low=1, marks=Mark.COMPARABLE
    )
    seq_len: int = knob(1024, "tokens per sequence", unit="tokens", low=2, marks=Mark.COMPARABLE)
    precision: str = knob(
        "auto",
        "auto: bf16 on GPUs that have it, else fp16; fp32 on CPU",
        choices=("auto", "fp32", "bf16", "fp16"),
    )
    grad_accum_dtype: str = knob(
        "auto",
        "number format in which ZeRO adds gradients up; auto: that of precision",
        choices=("auto", "fp32", "bf16", "fp16"),
        active_when=when.ZERO,
    )
    attention: str = knob(
        "sdpa", "implementation of attention", choices=("sdpa", "eager", "flash_attention_2")
    )
    compile: bool = knob(False, "torch.compile the model")
    tensor: int = knob(
        1,
        "tensor-parallel degree: neighbouring ranks that share every matrix",
        low=1,
        marks=Mark.BY_HAND,
        active_when=when.DEEPSPEED,
    )
    pipeline: int = knob(
        1,
        "pipeline-parallel degree: stages that share the transformer blocks",
        low=1,
        marks=Mark.BY_HAND,
        active_when=when.DEEPSPEED,
    )
    tensor_across_nodes: bool = knob(
        False, "let a tensor group span nodes: slow but for the fastest links", active_when=when.TENSOR
    )
    activation_checkpointing: str = knob(
        "none", "recompute activations: none, full, or a number k: in every k-th block"
    )
    gradient_clipping: float = knob(1.0, "largest gradient norm; 0: not clipped", low=0)
    seed: int = knob(0, "of the weights and of the order of the data", low=0, marks=Mark.COMPARABLE)
