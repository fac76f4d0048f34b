"""Our search of a table: real loop, ledger, sampler, estimates and gate; jobs and time are scripted."""

from __future__ import annotations

import random
import statistics
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from sweeps.cluster.base import JobHandle
from sweeps.config.schema import (
    ClusterConfig,
    ConfirmConfig,
    GateConfig,
    LimitsConfig,
    MeasureConfig,
    SearchConfig,
    SweepConfig,
)
from sweeps.estimate.estimator import Estimator, hardware_for
from sweeps.estimate.fit import room_of
from sweeps.search.gate import Gate
from sweeps.search.proposer import make_proposer, rules_for
from sweeps.search.sampler import Sampler
from sweeps.study.ledger import Ledger
from sweeps.study.limits import Limits, StopReason
from sweeps.study.loop import StudyLoop
from tests.benchmarks.search_rivals import RIVALS, Course, search
from tests.benchmarks.simulator.replay import Ended, Noise, ReplayCluster, TablePlanner
from tests.benchmarks.simulator.tables import Table, TableRow
from train_entry.contract import (
    AttemptKind,
    Goal,
    State,
    StudyDir,
    StudyRecord,
    TimingEnd,
    Trial,
    Winner,
    read_document,
)

GOAL = Goal(name="tokens_per_s_per_gpu")
MEMORY = Path("/dev/shm")


@dataclass(frozen=True, kw_only=True, slots=True)
class Ours:
    """Settings of our search. The defaults are the product's, except for `improvement`.

    Without a required improvement the search would measure a whole table: its space is small.
    """

    sampler: str = "tpe"
    baselines: bool = True
    prior: int = 5
    dominance: bool = True
    gate: bool = True
    adaptive: bool = True  # False: always time 20 steps per trial
    precision: float = 0.005
    confirm_best: int = 3
    confirm_rounds: int = 3
    improvement: float = 0.005
    trials: int | None = None

    def config(self, table: Table, seed: int) -> SweepConfig:
        return SweepConfig(
            cluster=ClusterConfig(memory_limit_gib=table.memory_limit_gib, limit_counts_context=False),
            gate=GateConfig(enabled=self.gate),
            search=SearchConfig(
                sampler=self.sampler,
                baselines=self.baselines,
                prior=self.prior,
                dominance=self.dominance,
                single_gpu="never",  # all rows of a table have the same number of ranks
                seed=seed,
            ),
            measure=MeasureConfig(precision=self.precision)
            if self.adaptive
            else MeasureConfig(precision=0.0, futility=False),
            confirm=ConfirmConfig(best=self.confirm_best, rounds=self.confirm_rounds),
            limits=LimitsConfig(improvement=self.improvement, trials=self.trials),
        )


@dataclass
class Silent:
    """An observer that only keeps messages."""

    messages: list[str] = field(default_factory=list)

    def changed(self, trial: Trial) -> None: ...

    def tick(self, running: dict[int, JobHandle]) -> None: ...

    def message(self, text: str) -> None:
        self.messages.append(text)


@dataclass(kw_only=True)
class Searched:
    """The results of a study."""

    table: Table
    cluster: ReplayCluster
    trials: list[Trial]
    winner: Winner | None
    reason: StopReason
    messages: list[str]

    @property
    def announced(self) -> TableRow | None:
        """The winner, or the best measured trial if there was no confirmation."""
        if self.winner is not None:
            return self._row(self.winner.trial)
        measured = [trial for trial in self.trials if trial.state is State.MEASURED]
        return self._row(max(measured, key=_value).number) if measured else None

    def _row(self, number: int) -> TableRow:
        plan = next(trial.plan for trial in self.trials if trial.number == number)
        assert plan is not None
        return self.table.row_of(plan)

    def course(self, method: str, seed: int) -> Course:
        course = Course(table=self.table, method=method, seed=seed, announced=self.announced)
        first: dict[int, float] = {}
        again: dict[int, list[float]] = {}
        for job in self.cluster.ended:
            _note(job, first, again)
            held = first | {number: statistics.fmean(values) for number, values in again.items()}
            best = max(held, key=lambda number: held[number], default=None)
            course.spent_gpu_s.append(course.total_gpu_s + job.gpu_s)
            course.incumbents.append(None if best is None else self._row(best))
            course.timed_steps += len(job.run.timed_s)
            course.failures += job.run.row.failure is not None
            course.trials += job.spec.kind is not AttemptKind.REPEAT
        if course.incumbents:
            course.incumbents[-1] = self.announced
        return course


def _value(trial: Trial) -> float:
    return float(getattr(trial.outcome, GOAL.name))


def _note(job: Ended, first: dict[int, float], again: dict[int, list[float]]) -> None:
    """Record a job's value. Where a trial has repeats, only they count."""
    value = job.run.value
    if value is None or job.run.ended is TimingEnd.FUTILE:
        return
    if job.spec.kind is AttemptKind.REPEAT:
        again.setdefault(job.spec.trial, []).append(value)
    else:
        first[job.spec.trial] = value


def searched(
    table: Table, seed: int, ours: Ours | None = None, noise: Noise | None = None, **cluster: int | bool
) -> Searched:
    """Run one study of the table in a temporary directory."""
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as parent:
        return study_in(Path(parent), table, seed, ours or Ours(), noise or Noise(), **cluster)


def study_in(
    parent: Path, table: Table, seed: int, ours: Ours, noise: Noise, **changes: int | bool
) -> Searched:
    """Do what sweep.py does after it has read the command line."""
    config = ours.config(table, seed)
    cluster = ReplayCluster(table, seed=seed, noise=noise)
    for name, value in changes.items():
        setattr(cluster, name, value)
    directory = StudyDir(parent / "study")
    ledger, observer = Ledger(directory), Silent()
    planner = TablePlanner(table, config.measure)
    room = room_of(config.cluster, config.gate, table.machine)
    estimator = Estimator(table.model, hardware_for(table.machine), room, config.gate)
    gate = Gate(estimator, config.gate.enabled, config.gate.borderline, config.search.dominance)
    sampler = Sampler(table.space, config.search, 0, planner.is_active)
    rules = rules_for(config, (GOAL,), table.machine, table.space.size(planner.is_active))
    loop = StudyLoop(
        study=record_of(table),
        planner=planner,
        proposer=make_proposer(rules, table.space, planner, sampler, gate),
        cluster=cluster,
        ledger=ledger,
        gate=gate,
        limits=Limits(trials=config.limits.trials, hours=None, retries=1),
        observer=observer,
        confirm=config.confirm,
        futility=config.measure.futility,
        clock=cluster.clock,
    )
    reason = loop.run()
    return Searched(
        table=table,
        cluster=cluster,
        trials=ledger.trials,
        winner=read_document(directory.winner, Winner),
        reason=reason,
        messages=observer.messages,
    )


def record_of(table: Table) -> StudyRecord:
    return StudyRecord(
        name=table.name,
        created_at=0.0,
        asked={},
        dimensions={dimension.key: dimension.text for dimension in table.space.dimensions},
        limits={},
        versions={},
        model=table.model,
        goals=(GOAL,),
    )


# No baselines, no prior, no end before 30 trials: the sampler makes all proposals, and the gate screens them.
BEFORE = Ours(
    baselines=False,
    prior=0,
    dominance=False,
    adaptive=False,
    confirm_best=0,
    improvement=0.0,
    trials=30,
)
VARIANTS: dict[str, Ours] = {
    "shardsweep": Ours(),
    "  with the GP": Ours(sampler="gp"),
    "  without the baselines": Ours(baselines=False),
    "  without the prior": Ours(prior=0),
    "  always 20 steps": Ours(adaptive=False),
    "  measure.precision=1%": Ours(precision=0.01),
    "  unconfirmed": Ours(confirm_best=0),
    "  sampler and gate alone": BEFORE,
}


def course_of(method: str, table: Table, seed: int) -> Course:
    """Run a search by any method, ours or another. The same seed gives the same course."""
    random.seed(f"{method} {table.name} {seed}")  # for code that uses the global generator
    if method in VARIANTS:
        return searched(table, seed, VARIANTS[method]).course(method, seed)
    assert method in RIVALS, method
    return search(method, table, seed)
