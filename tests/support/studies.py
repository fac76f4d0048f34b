"""A study directory and any number of starts of its study. Everything is real except jobs and time."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from optuna.trial import TrialState

from sweeps.cluster.base import JobHandle
from sweeps.config.compose import Composer
from sweeps.config.schema import ConfirmConfig
from sweeps.estimate.estimator import Estimator, hardware_for
from sweeps.estimate.fit import room_of
from sweeps.machine import Machine
from sweeps.plan.planner import Planner
from sweeps.search.gate import Gate
from sweeps.search.proposer import make_proposer, rules_for
from sweeps.search.pruning import Pruning
from sweeps.search.sampler import Sampler
from sweeps.space.dimensions import Point
from sweeps.space.grammar import read_request, without_inactive
from sweeps.study.ledger import Ledger
from sweeps.study.limits import Limits, StopReason
from sweeps.study.loop import StudyLoop
from tests.support.examples import a_study_record
from tests.support.fake_cluster import FakeClock, FakeCluster, Script, measured
from train_entry.contract import Goal, ModelShape, State, StudyDir, StudyRecord, Trial

NO_LIMIT = Limits(trials=None, hours=None, retries=1)
UNCONFIRMED = ConfirmConfig(best=0, drift_every=0)
# Only the sampler proposes trials: tests of the loop itself rely on that.
PLAIN = ("search.startup_trials=2", "search.baselines=false", "search.prior=0", "search.dominance=false")
# Legal on two ranks of the tiny model: a global batch of 16.
FOUR_PLANS = ("strategy=ddp,zero1", "micro_batch=1,2")


class Crashed(BaseException):
    """The orchestrator's process was killed."""


def die() -> None:
    raise Crashed


@dataclass
class Heard:
    """An observer that records what it is told."""

    states: list[tuple[int, State]] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)

    def changed(self, trial: Trial) -> None:
        self.states.append((trial.number, trial.state))

    def tick(self, running: dict[int, JobHandle]) -> None: ...

    def message(self, text: str) -> None:
        self.messages.append(text)


@dataclass
class Bench:
    """A study directory, and any number of starts of its study."""

    composer: Composer
    model: ModelShape
    directory: StudyDir
    cluster: FakeCluster
    clock: FakeClock = field(default_factory=FakeClock)
    heard: Heard = field(default_factory=Heard)
    stop: bool = False
    settings: tuple[str, ...] = PLAIN
    goals: tuple[Goal, ...] = (Goal(name="tokens_per_s"),)
    sampler: Sampler | None = None  # of the latest start

    def start(self, *arguments: str, point: Point | None = None, **changes: Any) -> StopReason:
        """Do what sweep.py does, from the command line to the end of the loop."""
        request = read_request([*self.settings, *arguments], self.composer)
        config = request.composer.compose()
        self.cluster = self.cluster.restarted()
        ledger = self.ledger()
        planner = Planner(request.composer, self.model, self.cluster.machine, "mine")
        request = without_inactive(request, planner.is_active)
        machine = self.cluster.machine
        room = room_of(config.cluster, config.gate, machine)
        estimator = Estimator(self.model, hardware_for(machine), room, config.gate)
        gate = Gate(estimator, config.gate.enabled, config.gate.borderline, config.search.dominance)
        sampler = Sampler(
            request.space, config.search, len(ledger.trials), planner.is_active, len(self.goals)
        )
        self.sampler = sampler
        rules = rules_for(config, self.goals, machine, request.space.size(planner.is_active))
        loop = StudyLoop(
            study=self.record(),
            gate=gate,
            planner=planner,
            proposer=make_proposer(rules, request.space, planner, sampler, gate),
            cluster=self.cluster,
            ledger=ledger,
            observer=self.heard,
            interrupted=lambda: self.stop,
            clock=self.clock.clock(),
            pruning=Pruning(sampler, self.record().goal) if config.search.pruner != "none" else None,
            **{"limits": NO_LIMIT, "confirm": UNCONFIRMED, **changes},
        )
        return loop.run(point)

    @property
    def told(self) -> list[list[float]]:
        """The values that the latest start's sampler was told."""
        assert self.sampler is not None
        trials = self.sampler._study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        return [trial.values for trial in trials]

    def record(self) -> StudyRecord:
        return a_study_record(name="mine", goals=self.goals, dimensions={}, model=self.model)

    def ledger(self) -> Ledger:
        return Ledger(self.directory)

    def amend(self, number: int, **changes: Any) -> Trial:
        """Change fields of a recorded trial."""
        ledger = self.ledger()
        return ledger.put(dataclasses.replace(ledger[number], **changes))

    def interrupt(self) -> None:
        self.stop = True

    @property
    def trials(self) -> list[Trial]:
        return self.ledger().trials

    @property
    def states(self) -> list[State]:
        return [trial.state for trial in self.trials]

    @property
    def launched_plans(self) -> list[str]:
        """The launched plans in order, each as `strategy xmicro-batch`."""
        plans = [spec.plan for spec in self.cluster.launched]
        return [f"{plan.strategy} x{plan.micro_batch}" for plan in plans]


def make_bench(
    composer: Composer,
    model: ModelShape,
    directory: Path,
    scripts: dict[str, Sequence[Script]] | None = None,
    **cluster: Any,
) -> Bench:
    """Make a bench with two cores and one trial at a time. Plans without a script measure 100 tokens/s."""
    machine = Machine(device="cpu", nodes=1, ranks_per_node=2, cores=2)
    fake = FakeCluster(
        **{"machine": machine, "scripts": {"*": [measured(100.0)], **(scripts or {})}, **cluster}
    )
    return Bench(composer, dataclasses.replace(model, positions=2048), StudyDir(directory), fake)
