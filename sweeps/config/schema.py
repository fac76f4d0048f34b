"""The schema: every key of a configuration, declared once with its type, limits, meaning and scope.

Hydra merges the YAML files of conf/ into these classes, and so refuses unknown keys and values of another
type while composing. The classes are mutable because OmegaConf requires that of a schema; nothing beyond
`sweeps.plan` sees them. `sweeps.config.keys` reads the declarations, and a test checks docs/knobs.md against
them.

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
        dict, "the range of each knob that varies, in the grammar of -m overrides", scope=Scope.IDENTITY
    )

    study: str | None = knob(None, "the study's name; null: derived from what is asked", scope=Scope.IDENTITY)
    studies_dir: str = knob("studies", "the directory of the studies", scope=Scope.IDENTITY)
    dry_run: bool = knob(
        False,
        "list each plan of the space with its estimate, or why it is illegal; launch nothing",
        scope=Scope.SEARCH,
    )
    dry_run_to: str | None = knob(
        None, "dry_run=true: also write the list to this file, *.csv or *.json", scope=Scope.SEARCH
    )
    objective: Any = knob(
        "auto",
        "the goal of the search, or a list of goals; auto: tokens_per_s_per_gpu, if ranks is fixed",
        scope=Scope.IDENTITY,
    )
    token_budget: float | None = knob(
        None,
        "objective=time_to_tokens or cost: number of tokens to train",
        unit="tokens",
        low=1,
        integral=True,
        scope=Scope.IDENTITY,
    )
    accept_versions: bool = knob(
        False,
        "resume a study that began with another torch, DeepSpeed, transformers or GPU",
        scope=Scope.SEARCH,
    )
    engine: str = knob(
        "deepspeed",
        "library that shards states and reduces gradients",
        choices=("ddp", "deepspeed"),
        marks=Mark.BY_HAND,
    )
    ranks: int | None = knob(
        None,
        "processes, one per GPU; null: all GPUs of one node, or 2 on a CPU",
        low=1,
        marks=Mark.COMPARABLE,
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
        "auto: bf16 on GPUs that have it, else fp16; fp32 on a CPU",
        choices=("auto", "fp32", "bf16", "fp16"),
    )
    grad_accum_dtype: str = knob(
        "auto",
        "number format in which ZeRO accumulates gradients; auto: that of precision",
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
        False, "let a tensor group span nodes: slow except on the fastest links", active_when=when.TENSOR
    )
    activation_checkpointing: str = knob(
        "none", "recompute activations in no block, in all (full), or in every k-th (a number k)"
    )
    gradient_clipping: float = knob(1.0, "largest gradient norm; 0: no clipping", low=0)
    seed: int = knob(0, "seed of the initial weights and of the data's order", low=0, marks=Mark.COMPARABLE)
