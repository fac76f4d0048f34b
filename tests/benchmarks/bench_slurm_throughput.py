"""Print the throughput of trials through a real Slurm, and the query rate: `make bench`. Jobs copy files."""

from __future__ import annotations

import shlex
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from sweeps.cluster.base import JobHandle
from sweeps.cluster.slurm.jobs import SlurmCluster
from sweeps.cluster.slurm.request import Site
from sweeps.cluster.slurm.submit import Executor
from sweeps.config.schema import ClusterConfig
from sweeps.machine import Machine
from sweeps.study.journal import Clock
from sweeps.study.limits import Limits
from tests.slurm.conftest import Slurm
from tests.support.examples import a_plan, a_trial_spec
from tests.support.fake_cluster import measured
from tests.support.studies import Bench
from train_entry.contract import AttemptDir, State, TrialSpec

pytestmark = pytest.mark.slurm

TRIALS = 500
AT_ONCE = 64
QUERIES_A_SECOND = 1.0
SPACE = (
    "strategy=zero1,zero2,zero3",
    "micro_batch=1,2,4",
    "zero.reduce_bucket_size=tag(log,interval(5e7,1e9))",
    "ranks=1",
    "search.sampler=random",
    "gate.enabled=false",
)
MACHINE = Machine(device="cpu", nodes=4, ranks_per_node=16, cores=8)
SITE = Site(
    cluster=ClusterConfig(kind="slurm", exclusive=False, memory_gib=0.1, cpus_per_rank=1, time_min=5),
    machine=MACHINE,
)


@dataclass
class TimedCluster(SlurmCluster):
    """The real cluster, with timed submissions."""

    submit_s: list[float] = field(default_factory=list)
    launched: list[TrialSpec] = field(default_factory=list)

    def restarted(self) -> TimedCluster:
        return self

    def submit(self, attempt: AttemptDir, spec: TrialSpec, slots: tuple[str, ...]) -> JobHandle:
        began = time.perf_counter()
        handle = super().submit(attempt, spec, slots)
        self.submit_s.append(time.perf_counter() - began)
        return handle


@dataclass
class RealTime:
    def clock(self) -> Clock:
        return Clock()


def copying(template: Path) -> Callable[[Path], Executor]:
    """Return an executor whose jobs copy the files of a measured rank."""

    class Copying(Executor):
        @property
        def _submitit_command_str(self) -> str:
            return shlex.join(["cp", "-r", f"{template}/.", str(Path(self.folder).parent)])

    return Copying


def test_trials_go_through_slurm(
    slurm: Slurm, bench: Callable[..., Bench], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_CONF", slurm.environment["SLURM_CONF"])
    template = AttemptDir(tmp_path / "template")
    template.path.mkdir()
    measured(100.0)(template, a_trial_spec(plan=a_plan(ranks=1)))
    cluster: Any = TimedCluster(SITE, AT_ONCE, executor=copying(template.path))
    study = bench()
    study.cluster, study.clock = cluster, RealTime()  # type: ignore[assignment]
    began = time.perf_counter()
    study.start(*SPACE, limits=Limits(trials=TRIALS, hours=None, retries=1))
    took_s = time.perf_counter() - began
    assert study.states.count(State.MEASURED) == TRIALS
    print(
        f"\n{TRIALS} trials, {AT_ONCE} at once, in {took_s:.1f} s: {TRIALS / took_s:.1f} per second; "
        f"sbatch took {1e3 * statistics.median(cluster.submit_s):.0f} ms each (median); "
        f"{cluster.watch.queries} queries, {cluster.watch.queries / took_s:.2f} per second"
    )
    assert cluster.watch.queries / took_s < QUERIES_A_SECOND
