"""Attempts small enough for two cores, and fixtures that run their ranks as real processes."""

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
from tests.support.warm import Warm, WarmProcess
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
        # By default stage 3 leaves parameters of this size whole and would shard nothing.
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
    """The ranks of one attempt, each a process of its own."""

    attempt: AttemptDir
    ranks: list[WarmProcess] = field(default_factory=list)

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

    @property
    def logs(self) -> str:
        return "\n\n".join(self.attempt.log(rank).read_text()[-2000:] for rank in range(len(self.ranks)))


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
        "SHARDSWEEP_RENDEZVOUS": f"file://{attempt.rendezvous.absolute()}",
    }


def plain_environment() -> dict[str, str]:
    """Return the environment without a launcher's variables, in case a launcher started pytest."""
    foreign = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in foreign}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


@dataclass
class Trained:
    """The outcomes of many plans that one job trained one after another."""

    job: Job
    attempts: Mapping[str, AttemptDir]

    def steps(self, name: str) -> list[StepMetrics]:
        outcome = self.outcome(name, rank=0)
        assert isinstance(outcome, RankMeasurement), outcome.evidence
        return list(read_lines(self.attempts[name].metrics, StepMetrics))

    def outcome(self, name: str, rank: int) -> RankOutcome:
        return read_outcome(self.attempts[name], rank)


StartRanks = Callable[..., Job]


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    """The process from which all ranks are forked. It has compiled DeepSpeed's operators if necessary."""
    found = Warm(plain_environment(), tmp_path_factory.mktemp("warm") / "log")
    yield found
    found.close()


@pytest.fixture(scope="session")
def start_ranks(warm: Warm) -> Iterator[StartRanks]:
    """Start the ranks of an attempt directory. All are ended with the session."""
    jobs: list[Job] = []

    def start(attempt: AttemptDir, ranks: int, *module: str) -> Job:
        job = Job(attempt)
        jobs.append(job)
        for rank in range(ranks):
            environment = rank_environment(rank, ranks, attempt)
            job.ranks.append(warm.start(module, environment, attempt.log(rank)))
        return job

    yield start
    for job in jobs:
        job.end()


@pytest.fixture(scope="session")
def relaunch(start_ranks: StartRanks) -> Callable[[AttemptDir], Job]:
    """Start the ranks of an existing attempt directory."""

    def start(attempt: AttemptDir) -> Job:
        ranks = load(TrialSpec, attempt.spec.read_text()).plan.ranks
        return start_ranks(attempt, ranks, "train_entry", str(attempt.path))

    return start


@pytest.fixture(scope="session")
def launch(
    attempt: Callable[[TrialSpec], AttemptDir], relaunch: Callable[[AttemptDir], Job]
) -> Callable[[TrialSpec], Job]:
    """Start the ranks of a spec in a new attempt directory."""
    return lambda spec: relaunch(attempt(spec))


@pytest.fixture(scope="session")
def attempt(tmp_path_factory: pytest.TempPathFactory) -> Callable[[TrialSpec], AttemptDir]:
    """Write the files that the orchestrator writes, in a new attempt directory."""
    return lambda spec: write_attempt(tmp_path_factory.mktemp("attempt"), spec)


@pytest.fixture(scope="session")
def run_module(warm: Warm) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run `python -m` with these arguments to its end, as a fresh process that imports everything itself."""

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
def train_all(
    start_ranks: StartRanks, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Mapping[str, TrialSpec]], Trained]:
    """Train all specs one after another, in one process per rank: see tests/support/matrix.py."""

    def train(specs: Mapping[str, TrialSpec]) -> Trained:
        root = AttemptDir(tmp_path_factory.mktemp("matrix"))
        attempts = {name: write_attempt(root.path / name, spec) for name, spec in specs.items()}
        ranks = next(iter(specs.values())).plan.ranks
        paths = [str(attempt.path) for attempt in attempts.values()]
        job = start_ranks(root, ranks, "tests.support.matrix", *paths)
        assert job.wait(MATRIX_MAY_TAKE_S) == [0] * ranks, job.logs
        return Trained(job=job, attempts=attempts)

    return train


@pytest.fixture
def spec() -> TrialSpec:
    """A spec of two ddp ranks and a model of 27 thousand parameters."""
    return tiny_spec(tiny_plan())


@pytest.fixture(scope="session")
def tiny() -> Callable[..., TrialSpec]:
    """Make a spec. `zero` is a ZeRO stage (None: ddp), `plan` changes the plan, other keywords the spec."""

    def make(zero: int | None = None, plan: dict[str, Any] | None = None, **changes: Any) -> TrialSpec:
        changed = tiny_plan(**(plan or {})) if zero is None else zero_plan(zero, **(plan or {}))
        return tiny_spec(changed, **changes)

    return make


@pytest.fixture(scope="session")
def deepspeed_config_error() -> type[Exception]:
    return import_deepspeed("deepspeed.runtime.config").DeepSpeedConfigError  # type: ignore[no-any-return]


@pytest.fixture(scope="session")
def deepspeed_schedulers() -> Callable[[str], Any]:
    """Return a scheduler's class by its name in DeepSpeed's configuration."""
    schedules = import_deepspeed("deepspeed.runtime.lr_schedules")
    return lambda name: getattr(schedules, name)


@pytest.fixture(scope="session")
def deepspeed_builder() -> Any:
    """DeepSpeed's builder of the operator that needs libaio."""
    return import_deepspeed("deepspeed.ops.op_builder.cpu").AsyncIOBuilder


def import_deepspeed(module: str) -> Any:
    """Import a module without the deprecation warnings of torch and DeepSpeed about their own code."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        return importlib.import_module(module)
