"""Attempts small enough for two cores, and a way to run their ranks as real processes."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from sweeps.plan.ds_config import deepspeed_config
from tests.support.examples import a_model, a_plan, a_trial_spec
from tests.support.paths import ROOT
from train_entry.contract import (
    AttemptDir,
    DataSpec,
    Engine,
    MeasureSpec,
    Plan,
    Precision,
    RankMeasurement,
    RankOutcome,
    StepMetrics,
    TimeLimits,
    TrialSpec,
    dump,
    load,
    read_lines,
)

RANKS_MAY_TAKE_S = 150  # ten times what a quiet machine needs
MATRIX_MAY_TAKE_S = 1500


def tiny_plan(**changes: Any) -> Plan:
    plan = a_plan(
        engine=Engine.DDP,
        micro_batch=2,
        global_batch=8,
        seq_len=32,
        precision=Precision.FP32,
        gradient_clipping=0.5,
        optimizer={"lr": 1e-3},
        warmup_steps=6,
        # All parameters are smaller than what stage 3 leaves whole by default: it would shard nothing.
        zero={
            "stage": 0,
            "reduce_bucket_size": 50_000,
            "allgather_bucket_size": 50_000,
            "param_persistence_threshold": 0,
        },
        seed=7,
    )
    return dataclasses.replace(plan, **changes)


def tiny_spec(plan: Plan, **changes: Any) -> TrialSpec:
    spec = a_trial_spec(
        plan=plan,
        model=a_model(parameters=0, hidden=32, heads=4, ffn=64, positions=64, tied_embeddings=True),
        data=DataSpec(kind="stdlib", max_bytes=2**18),
        measure=MeasureSpec(warmup_steps=1, steps=3, split_steps=2),
        limits=TimeLimits(attempt_s=300, startup_silence_s=120, step_silence_s=60),
    )
    return dataclasses.replace(spec, **changes)


def zero_plan(stage: int, **changes: Any) -> Plan:
    plan = tiny_plan()
    return dataclasses.replace(
        plan, engine=Engine.DEEPSPEED, zero=dataclasses.replace(plan.zero, stage=stage), **changes
    )


@dataclass
class Job:
    """The ranks of one attempt, as plain processes."""

    attempt: AttemptDir
    ranks: list[subprocess.Popen[str]] = field(default_factory=list)

    def wait(self, limit_s: float = RANKS_MAY_TAKE_S) -> list[int]:
        return [rank.wait(limit_s) for rank in self.ranks]

    def end(self) -> None:
        for rank in self.ranks:
            rank.kill()
            rank.wait()

    def outcome(self, rank: int) -> RankOutcome:
        return read_outcome(self.attempt, rank)

    @property
    def steps(self) -> list[StepMetrics]:
        return list(read_lines(self.attempt.metrics, StepMetrics))


def read_outcome(attempt: AttemptDir, rank: int) -> RankOutcome:
    outcome: RankOutcome = load(RankOutcome, attempt.outcome(rank).read_text())  # type: ignore[arg-type]
    return outcome


def write_attempt(directory: Path, spec: TrialSpec) -> AttemptDir:
    attempt = AttemptDir(directory)
    directory.mkdir(parents=True, exist_ok=True)
    attempt.spec.write_text(dump(spec))
    attempt.ds_config.write_text(json.dumps(deepspeed_config(spec.plan)))
    return attempt


def rank_environment(rank: int, ranks: int, attempt: AttemptDir) -> dict[str, str]:
    return {
        **plain_environment(),
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "SHARDSWEEP_RENDEZVOUS": attempt.rendezvous.absolute().as_uri(),
    }


def plain_environment() -> dict[str, str]:
    """Without a launcher's variables, whoever started pytest."""
    foreign = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in foreign}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


@dataclass
class Trained:
    """What became of many plans."""

    job: Job
    attempts: Mapping[str, AttemptDir]

    def steps(self, name: str) -> list[StepMetrics]:
        outcome = self.outcome(name, rank=0)
        assert isinstance(outcome, RankMeasurement), outcome.evidence
        return list(read_lines(self.attempts[name].metrics, StepMetrics))

    def outcome(self, name: str, rank: int) -> RankOutcome:
        return read_outcome(self.attempts[name], rank)

    @property
    def logs(self) -> str:
        ends = [self.job.attempt.log(rank).read_text()[-2000:] for rank in range(len(self.job.ranks))]
        return "\n\n".join(ends)


def start_ranks(attempt: AttemptDir, ranks: int, *module: str) -> Job:
    """Of a module and its arguments, else of the attempt."""
    job = Job(attempt)
    for rank in range(ranks):
        with attempt.log(rank).open("w") as log:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", *(module or ("train_entry", str(attempt.path)))],
                env=rank_environment(rank, ranks, attempt),
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
            )
        job.ranks.append(process)
    return job


@pytest.fixture(scope="session")
def cpu_ops() -> None:
    """Load DeepSpeed's operators once before any rank does.

    Loading compiles them anew where another version of ninja built them, though they are there: minutes, in
    which a rank would reach its time limit. One killed meanwhile leaves a lock that all later ones wait for,
    so this process is waited for and never killed.
    """
    command = [sys.executable, "-P", "-m", "train_entry.install.operators"]
    assert subprocess.Popen(command, env=plain_environment()).wait() == 0


@pytest.fixture(scope="session")
def relaunch(cpu_ops: None) -> Iterator[Callable[[AttemptDir], Job]]:
    """Start the ranks of an attempt directory; none outlives the session."""
    jobs: list[Job] = []

    def start(attempt: AttemptDir) -> Job:
        jobs.append(start_ranks(attempt, load(TrialSpec, attempt.spec.read_text()).plan.ranks))
        return jobs[-1]

    yield start
    for job in jobs:
        job.end()


@pytest.fixture(scope="session")
def launch(
    attempt: Callable[[TrialSpec], AttemptDir], relaunch: Callable[[AttemptDir], Job]
) -> Callable[[TrialSpec], Job]:
    """Start the ranks of a spec in a new attempt directory."""
    return lambda spec: relaunch(attempt(spec))


@pytest.fixture(scope="session")
def attempt(tmp_path_factory: pytest.TempPathFactory) -> Callable[[TrialSpec], AttemptDir]:
    """Write what the orchestrator writes, in a new directory."""
    return lambda spec: write_attempt(tmp_path_factory.mktemp("attempt"), spec)


@pytest.fixture(scope="session")
def run_module(cpu_ops: None) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`python -m` these arguments, to its end, without a launcher's environment."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-P", "-m", *arguments],
            env=plain_environment(),
            capture_output=True,
            text=True,
            timeout=RANKS_MAY_TAKE_S,
        )

    return run


@pytest.fixture(scope="session")
def train_all(cpu_ops: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Trained]]:
    """Every spec, one after another in one process a rank: see matrix.py."""
    jobs: list[Job] = []

    def train(specs: Mapping[str, TrialSpec]) -> Trained:
        root = tmp_path_factory.mktemp("matrix")
        attempts = {name: write_attempt(root / name, spec) for name, spec in specs.items()}
        ranks = next(iter(specs.values())).plan.ranks
        paths = [str(attempt.path) for attempt in attempts.values()]
        jobs.append(start_ranks(AttemptDir(root), ranks, "tests.support.matrix", *paths))
        trained = Trained(job=jobs[-1], attempts=attempts)
        assert jobs[-1].wait(MATRIX_MAY_TAKE_S) == [0] * ranks, trained.logs
        return trained

    yield train
    for job in jobs:
        job.end()


@pytest.fixture
def spec() -> TrialSpec:
    """Two ranks of ddp, a model of 27 thousand parameters."""
    return tiny_spec(tiny_plan())


@pytest.fixture(scope="session")
def tiny() -> Callable[..., TrialSpec]:
    """Make a spec: `zero` is a ZeRO stage or None for ddp, `plan` changes the plan, all else the spec."""

    def make(zero: int | None = None, plan: dict[str, Any] | None = None, **changes: Any) -> TrialSpec:
        changed = tiny_plan(**(plan or {})) if zero is None else zero_plan(zero, **(plan or {}))
        return tiny_spec(changed, **changes)

    return make


@pytest.fixture(scope="session")
def deepspeed_config_error() -> type[Exception]:
    return import_deepspeed("deepspeed.runtime.config").DeepSpeedConfigError  # type: ignore[no-any-return]


@pytest.fixture(scope="session")
def deepspeed_schedulers() -> Callable[[str], Any]:
    """A scheduler's class by the name it has in DeepSpeed's configuration."""
    schedules = import_deepspeed("deepspeed.runtime.lr_schedules")
    return lambda name: getattr(schedules, name)


@pytest.fixture(scope="session")
def deepspeed_builder() -> Any:
    """Of the operator that needs libaio."""
    return import_deepspeed("deepspeed.ops.op_builder.cpu").AsyncIOBuilder


def import_deepspeed(module: str) -> Any:
    """Torch and DeepSpeed warn of their own deprecations while they are imported; that is not ours to fix."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        return importlib.import_module(module)
