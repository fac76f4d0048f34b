"""What the tests of the orchestrator share: builders of records, and Hydra on the real conf/."""

from __future__ import annotations

import copy
import dataclasses
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from hydra import initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import DictConfig

from sweeps.config.compose import Composer, register_resolvers, register_schema
from sweeps.machine import Machine
from train_entry.contract import (
    AttemptKind,
    Checkpointing,
    DataSpec,
    Engine,
    Measurement,
    MeasureSpec,
    MemoryKind,
    MemoryPeak,
    ModelShape,
    OptimizerPlan,
    Origin,
    Plan,
    Precision,
    RankMeasurement,
    State,
    TimeLimits,
    Trial,
    TrialSpec,
    ZeroPlan,
)

ROOT = Path(__file__).resolve().parents[2]

SHAPE = ModelShape(
    name="tiny",
    family="llama",
    parameters=1000,
    layers=2,
    hidden=8,
    heads=2,
    kv_heads=2,
    ffn=32,
    vocab=256,
    positions=128,
    tied_embeddings=False,
)
ADAMW = OptimizerPlan(name="adamw", lr=3e-4, weight_decay=0.1, beta1=0.9, beta2=0.95, eps=1e-8)
ZERO = ZeroPlan(
    stage=2,
    reduce_bucket_size=500_000_000,
    allgather_bucket_size=500_000_000,
    overlap_comm=False,
    contiguous_gradients=True,
)
PLAN = Plan(
    engine=Engine.DEEPSPEED,
    ranks=2,
    tensor=1,
    pipeline=1,
    micro_batch=4,
    global_batch=32,
    seq_len=128,
    precision=Precision.BF16,
    activation_checkpointing=Checkpointing.NONE,
    gradient_clipping=1.0,
    optimizer=ADAMW,
    warmup_steps=0,
    zero=ZERO,
    seed=0,
)
PEAK = MemoryPeak(allocated_bytes=100, reserved_bytes=200)
RANK = RankMeasurement(
    rank=0,
    host="here",
    device_name="CPU",
    parameters=1000,
    memory_kind=MemoryKind.HOST_RSS,
    startup=PEAK,
    first_step=PEAK,
    steady=PEAK,
    device_in_use_bytes=None,
    device_total_bytes=None,
    peak_flops_per_s=None,
    step_s=(0.5, 0.5),
    split=None,
    startup_s=3.0,
)
MEASUREMENT = Measurement(
    tokens_per_s=2000.0,
    tokens_per_s_per_gpu=1000.0,
    samples_per_s=16.0,
    step_s=2.0,
    step_s_iqr=0.0,
    steps=12,
    peak_bytes=100,
    reserved_bytes=200,
    memory_kind=MemoryKind.HOST_RSS,
    mfu=None,
    loss=2.0,
    tokens=50_000,
    startup_s=3.0,
    ranks=(),
)


@pytest.fixture(scope="session")
def mlflow_uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One database for all tests, since creating one takes seconds; each test has its own experiment."""
    return f"sqlite:///{tmp_path_factory.mktemp('with space')}/mlflow.db"


@pytest.fixture
def shape() -> ModelShape:
    return SHAPE


@pytest.fixture
def machine() -> Machine:
    """Four cores, no GPU."""
    return Machine(device="cpu", nodes=1, ranks_per_node=4, cores=4)


@pytest.fixture
def make_plan() -> Callable[..., Plan]:
    """ZeRO-2 on two ranks; `zero` and `optimizer` change those parts, everything else the plan itself."""

    def make(
        zero: dict[str, Any] | None = None, optimizer: dict[str, Any] | None = None, **changes: Any
    ) -> Plan:
        return dataclasses.replace(
            PLAN,
            zero=dataclasses.replace(ZERO, **(zero or {})),
            optimizer=dataclasses.replace(ADAMW, **(optimizer or {})),
            **changes,
        )

    return make


@pytest.fixture
def make_rank() -> Callable[..., RankMeasurement]:
    return lambda **changes: dataclasses.replace(RANK, **changes)


@pytest.fixture
def make_measurement() -> Callable[..., Measurement]:
    return lambda **changes: dataclasses.replace(MEASUREMENT, **changes)


@pytest.fixture
def make_trial() -> Callable[..., Trial]:
    """Trial 1, measured at 1000 tokens/s per GPU."""

    def make(**changes: Any) -> Trial:
        trial = Trial(
            number=1,
            state=State.MEASURED,
            origin=Origin.SAMPLER,
            overrides=("strategy=zero2", "micro_batch=4"),
            values={"strategy": "zero2", "micro_batch": 4},
            created_at=1000.0,
            plan=PLAN,
            fingerprint="f00d",
            outcome=MEASUREMENT,
            attempts=1,
            measured_attempt=1,
            closed_at=1060.0,
        )
        return dataclasses.replace(trial, **changes)

    return make


@pytest.fixture
def make_spec() -> Callable[..., TrialSpec]:
    """The first attempt of trial 1; `plan` and all else may be changed."""

    def make(**changes: Any) -> TrialSpec:
        spec = TrialSpec(
            study="study",
            trial=1,
            attempt=1,
            kind=AttemptKind.FIRST,
            device="cpu",
            plan=PLAN,
            model=SHAPE,
            data=DataSpec(kind="synthetic"),
            measure=MeasureSpec(warmup_steps=3, steps=12, split_steps=0),
            limits=TimeLimits(attempt_s=600, startup_silence_s=60, step_silence_s=30),
        )
        return dataclasses.replace(spec, **changes)

    return make


class RememberingLoader:
    """Hydra's loader, which composes the same overrides once for all tests: each time takes 0.2 s."""

    def __init__(self, loader: ConfigLoader) -> None:
        self._loader = loader
        self._composed: dict[tuple[str, ...], DictConfig] = {}
        self._groups: list[str] = []

    def load_configuration(self, name: str, overrides: list[str], run_mode: RunMode) -> DictConfig:
        key = tuple(overrides)
        if key not in self._composed:
            self._composed[key] = self._loader.load_configuration(name, overrides, run_mode)
        return copy.deepcopy(self._composed[key])

    def list_groups(self, parent_name: str) -> list[str]:
        self._groups = self._groups or self._loader.list_groups(parent_name)
        return self._groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def composer_on(directory: Path) -> Composer:
    """Hydra on a directory of YAML files, as on a machine without GPUs."""
    plugins = str(ROOT / "sweeps" / "_hydra")
    if plugins not in sys.path:
        sys.path.append(plugins)
    register_schema()
    register_resolvers(lambda: False)
    with initialize_config_dir(str(directory), job_name="sweep", version_base="1.3"):
        return Composer(cast(ConfigLoader, RememberingLoader(GlobalHydra.instance().config_loader())))


@pytest.fixture(scope="session")
def composer() -> Composer:
    """On the real conf/, nothing overridden."""
    return composer_on(ROOT / "conf")


@pytest.fixture(scope="session")
def compose_in() -> Callable[[Path], Composer]:
    """Hydra on another directory of YAML files."""
    return composer_on


@pytest.fixture
def bench(composer: Composer, shape: ModelShape, tmp_path: Path) -> Callable[..., Any]:
    """Make a `loop_bench.Bench` from scripts by plan."""
    from tests.sweeps.loop_bench import make_bench  # optuna takes a second to import

    return functools.partial(make_bench, composer, shape, tmp_path / "mine")
