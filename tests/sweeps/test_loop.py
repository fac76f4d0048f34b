"""The loop, with the true planner, sampler, ledger and files; only jobs and time are scripted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from sweeps.cluster.base import JobHandle
from sweeps.config.compose import Composer
from sweeps.config.grammar import read_request
from sweeps.ledger import Ledger
from sweeps.limits import Limits, StopReason
from sweeps.loop import StudyLoop
from sweeps.machine import Machine
from sweeps.planner import Planner
from sweeps.space import Point
from sweeps.study import Searcher
from tests.sweeps.fake_cluster import FakeClock, FakeCluster, Script, crash, failing, lost, measured, oom
from train_entry.contract import (
    AttemptKind,
    Failure,
    FailureKind,
    Measurement,
    ModelShape,
    Origin,
    State,
    StudyDir,
    StudyRecord,
    Trial,
)

NO_LIMIT = Limits(trials=None, hours=None, retries=1)
# Legal on two ranks of the tiny model: a global batch of 16.
FOUR_PLANS = ("strategy=ddp,zero1", "micro_batch=1,2")


class Crashed(BaseException):
    """The orchestrator's process is gone."""


def die() -> None:
    raise Crashed


@dataclass
class Heard:
    """An observer that remembers."""

    states: list[tuple[int, State]] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)

    def changed(self, trial: Trial) -> None:
        self.states.append((trial.number, trial.state))

    def tick(self, running: dict[int, JobHandle]) -> None: ...

    def message(self, text: str) -> None:
        self.messages.append(text)


@dataclass
class Bench:
    """One study directory, and as many starts of the study as a test wants."""

    composer: Composer
    model: ModelShape
    directory: StudyDir
    cluster: FakeCluster
    clock: FakeClock = field(default_factory=FakeClock)
    heard: Heard = field(default_factory=Heard)
    stop: bool = False

    def start(self, *arguments: str, point: Point | None = None, **changes: Any) -> StopReason:
        """What sweep.py does, from the command line to the end of the loop."""
        request = read_request(["search.startup_trials=2", *arguments], self.composer)
        config = request.composer.compose()
        self.cluster = self.cluster.restarted()
        ledger = self.ledger()
        loop = StudyLoop(
            study=self.record(),
            planner=Planner(request.composer, self.model, self.cluster.machine, "mine"),
            searcher=Searcher(request.space, config.search, told=len(ledger.trials)),
            cluster=self.cluster,
            ledger=ledger,
            observer=self.heard,
            interrupted=lambda: self.stop,
            clock=self.clock.clock(),
            **{"limits": NO_LIMIT, **changes},
        )
        return loop.run(point)

    def record(self) -> StudyRecord:
        return StudyRecord(
            name="mine",
            created_at=0.0,
            objective="tokens_per_s",
            asked={},
            dimensions={},
            limits={},
            versions={},
            model=self.model,
        )

    def ledger(self) -> Ledger:
        return Ledger(self.directory)

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
        """What was launched, as `strategy xmicro-batch`, in order."""
        plans = [spec.plan for spec in self.cluster.launched]
        return [f"{plan.strategy} x{plan.micro_batch}" for plan in plans]


@pytest.fixture
def bench(composer: Composer, shape: ModelShape, tmp_path: Path) -> Callable[..., Bench]:
    """A bench with scripts by plan; two cores, one trial at a time."""

    def make(scripts: dict[str, Sequence[Script]] | None = None, **cluster: Any) -> Bench:
        machine = Machine(device="cpu", nodes=1, ranks_per_node=2, cores=2)
        fake = FakeCluster(
            **{"machine": machine, "scripts": {"*": [measured(100.0)], **(scripts or {})}, **cluster}
        )
        model = dataclasses.replace(shape, positions=2048)
        return Bench(composer, model, StudyDir(tmp_path / "mine"), fake)

    return make


def kinds(trial: Trial) -> FailureKind | None:
    return trial.outcome.kind if isinstance(trial.outcome, Failure) else None


# ---------------------------------------------------------------- searching


def test_a_finite_space_is_measured_whole_and_each_plan_once(bench: Callable[..., Bench]) -> None:
    study = bench()
    assert study.start(*FOUR_PLANS) is StopReason.EXHAUSTED
    assert study.states == [State.MEASURED] * 4
    assert sorted(study.launched_plans) == ["ddp x1", "ddp x2", "zero1 x1", "zero1 x2"]
    assert study.cluster.most_at_once == 1


def test_a_measured_trial_is_on_record_with_its_numbers(bench: Callable[..., Bench]) -> None:
    study = bench({"*": [measured(1024.0)]})
    study.start("micro_batch=2,4", "strategy=zero2")
    trial = study.trials[0]
    assert isinstance(trial.outcome, Measurement)
    assert (trial.outcome.tokens_per_s, trial.outcome.tokens_per_s_per_gpu) == (1024.0, 512.0)
    assert (trial.gpu_s, trial.attempts, trial.measured_attempt) == (20.0, 1, 1)
    assert trial.overrides[-1] == f"micro_batch={trial.values['micro_batch']}"
    assert "strategy=zero2" in trial.overrides


def test_every_change_is_heard_after_it_is_on_record(bench: Callable[..., Bench]) -> None:
    study = bench()
    study.start("micro_batch=2,2")
    assert study.heard.states == [(1, State.QUEUED), (1, State.RUNNING), (1, State.MEASURED)]


def test_the_limit_counts_trials_that_were_launched(bench: Callable[..., Bench]) -> None:
    study = bench()
    limits = dataclasses.replace(NO_LIMIT, trials=2)
    assert study.start("micro_batch=1,3,2,5,4,7,8", "search=grid", limits=limits) is StopReason.TRIALS
    assert study.launched_plans == ["zero1 x1", "zero1 x2"]
    assert study.states == [State.MEASURED, State.REJECTED, State.MEASURED]


def test_a_raised_limit_goes_on_where_the_study_ended(bench: Callable[..., Bench]) -> None:
    study = bench()
    study.start(*FOUR_PLANS, limits=dataclasses.replace(NO_LIMIT, trials=1))
    assert study.start(*FOUR_PLANS, limits=dataclasses.replace(NO_LIMIT, trials=3)) is StopReason.TRIALS
    assert len(set(study.launched_plans)) == len(study.launched_plans) == 3


def test_a_rejected_point_costs_no_launch_and_keeps_its_reasons(bench: Callable[..., Bench]) -> None:
    study = bench()
    assert study.start("micro_batch=3,5") is StopReason.EXHAUSTED
    assert study.states == [State.REJECTED] * 2
    assert study.cluster.launched == []
    assert "micro_batch may be 1, 2, 4 or 8" in study.trials[0].reasons[0]


def test_out_of_memory_closes_a_trial_as_infeasible_and_the_study_goes_on(
    bench: Callable[..., Bench],
) -> None:
    study = bench({"ddp": [oom]})
    assert study.start(*FOUR_PLANS) is StopReason.EXHAUSTED
    found = {(trial.values["strategy"], trial.state, kinds(trial)) for trial in study.trials}
    assert found == {
        ("ddp", State.INFEASIBLE, FailureKind.GPU_OOM),
        ("zero1", State.MEASURED, None),
    }
    assert len(study.launched_plans) == 4


def test_a_crash_closes_a_trial_as_failed_without_a_retry(bench: Callable[..., Bench]) -> None:
    study = bench({"*": [crash]})
    study.start("micro_batch=1,2")
    assert study.states == [State.FAILED] * 2
    assert [trial.attempts for trial in study.trials] == [1, 1]


def test_a_finished_study_launches_nothing_again(bench: Callable[..., Bench]) -> None:
    study = bench({"ddp x1": [oom], "ddp x2": [crash]})
    study.start(*FOUR_PLANS)
    assert study.start(*FOUR_PLANS) is StopReason.EXHAUSTED
    assert len(study.launched_plans) == len(study.trials) == 4


def test_the_hours_count_only_while_trials_are_open(bench: Callable[..., Bench]) -> None:
    study = bench(polls={"*": 900})  # of 0.2 s: 3 minutes a trial
    limits = dataclasses.replace(NO_LIMIT, hours=0.09)  # 5.4 minutes: no third trial is begun
    study.start(*FOUR_PLANS, limits=dataclasses.replace(limits, trials=1))
    study.clock.time_s += 24 * 3600
    assert study.start(*FOUR_PLANS, limits=limits) is StopReason.HOURS
    assert len(study.trials) == 2


# ---------------------------------------------------------------- lost ones


def test_a_lost_node_is_retried(bench: Callable[..., Bench]) -> None:
    study = bench({"*": [lost, measured(100.0)]})
    study.start("micro_batch=2,2")
    assert study.states == [State.MEASURED]
    assert [(spec.attempt, spec.kind) for spec in study.cluster.launched] == [
        (1, AttemptKind.FIRST),
        (2, AttemptKind.RETRY),
    ]
    assert study.trials[0].measured_attempt == 2


def test_after_its_retries_a_lost_trial_has_failed(bench: Callable[..., Bench]) -> None:
    study = bench({"*": [lost]})
    study.start("micro_batch=1,2", limits=dataclasses.replace(NO_LIMIT, retries=2))
    assert study.states == [State.FAILED] * 2
    assert [trial.attempts for trial in study.trials] == [3, 3]
    assert kinds(study.trials[0]) is FailureKind.NODE_LOST


def test_the_cost_of_all_attempts_is_summed(bench: Callable[..., Bench]) -> None:
    study = bench({"*": [failing(FailureKind.COMMS), measured(100.0)]})
    study.start("micro_batch=2,2")
    assert study.trials[0].gpu_s == 2 * 20.0


# ---------------------------------------------------------------- the same job


def test_a_plan_that_would_run_the_same_job_shares_its_measurement(bench: Callable[..., Bench]) -> None:
    study = bench({"*": [measured(70.0)]})
    study.start("zero.allgather_bucket_size=1e6,1e7,1e8")
    assert study.states == [State.MEASURED, State.REUSED, State.REUSED]
    assert [trial.reused_from for trial in study.trials] == [None, 1, 1]
    outcome = study.ledger().outcome(study.trials[2])
    assert isinstance(outcome, Measurement)
    assert (len(study.cluster.launched), outcome.tokens_per_s) == (1, 70.0)


def test_a_twin_of_an_infeasible_trial_is_not_launched_either(bench: Callable[..., Bench]) -> None:
    study = bench({"*": [oom]})
    study.start("zero.allgather_bucket_size=1e6,1e7")
    assert study.states == [State.INFEASIBLE, State.REUSED]
    assert len(study.cluster.launched) == 1


def test_a_twin_of_a_running_trial_waits_for_it(bench: Callable[..., Bench]) -> None:
    study = bench(parallel=2)
    study.start("ranks=1", "zero.allgather_bucket_size=1e6,1e7")
    assert study.heard.states.index((2, State.QUEUED)) < study.heard.states.index((1, State.MEASURED))
    assert study.states == [State.MEASURED, State.REUSED]
    assert len(study.cluster.launched) == 1


def test_a_twin_of_a_trial_that_came_to_nothing_is_launched_itself(bench: Callable[..., Bench]) -> None:
    study = bench({"*": [crash]}, parallel=2)
    study.start("ranks=1", "zero.allgather_bucket_size=1e6,1e7")
    assert study.states == [State.FAILED, State.FAILED]
    assert [spec.trial for spec in study.cluster.launched] == [1, 2]
    assert study.trials[1].reused_from is None


# ---------------------------------------------------------------- side by side


def test_two_slots_run_two_trials_at_once_and_mark_them_shared(bench: Callable[..., Bench]) -> None:
    study = bench(parallel=2)
    study.start("ranks=1", *FOUR_PLANS)
    assert study.cluster.most_at_once == 2
    assert [trial.shared for trial in study.trials] == [True] * 4
    assert {trial.slots for trial in study.trials} == {("core-0",), ("core-1",)}


def test_a_trial_that_ran_alone_is_not_shared(bench: Callable[..., Bench]) -> None:
    study = bench()
    study.start(*FOUR_PLANS)
    assert [trial.shared for trial in study.trials] == [False] * 4


def test_a_freed_slot_is_filled_while_a_slow_trial_runs_on(bench: Callable[..., Bench]) -> None:
    study = bench(parallel=2, polls={"ddp x1": 30})
    study.start("ranks=1", "search=grid", *FOUR_PLANS)
    closed = [number for number, state in study.heard.states if state is State.MEASURED]
    assert list(dict.fromkeys(closed))[-1] == 1
    assert study.states == [State.MEASURED] * 4


# ---------------------------------------------------------------- interrupted


def test_an_interrupt_cancels_and_the_next_start_measures_nothing_twice(bench: Callable[..., Bench]) -> None:
    study = bench()
    study.clock.at[5] = study.interrupt  # in the second trial
    assert study.start(*FOUR_PLANS) is StopReason.INTERRUPTED
    assert study.states == [State.MEASURED, State.CANCELLED]
    assert study.cluster.jobs == {}
    study.stop = False
    assert study.start(*FOUR_PLANS) is StopReason.EXHAUSTED
    assert study.states == [State.MEASURED] * 4
    assert [trial.attempts for trial in study.trials] == [1, 2, 1, 1]
    assert len(set(study.launched_plans)) == 4


def test_an_interrupt_may_leave_the_job_which_the_next_start_collects(bench: Callable[..., Bench]) -> None:
    study = bench()
    study.clock.at[1] = study.interrupt
    assert study.start("micro_batch=2,2", cancel_on_interrupt=False) is StopReason.INTERRUPTED
    assert study.states == [State.RUNNING]
    study.stop = False
    study.start("micro_batch=2,2")
    assert study.states == [State.MEASURED]
    assert len(study.cluster.launched) == 1


def test_after_a_crash_the_next_start_attaches_and_collects(bench: Callable[..., Bench]) -> None:
    study = bench()
    study.clock.at[1] = die
    with pytest.raises(Crashed):
        study.start(*FOUR_PLANS)
    assert study.states == [State.RUNNING]
    study.start(*FOUR_PLANS)
    assert study.states == [State.MEASURED] * 4
    assert len(study.cluster.launched) == len(set(study.launched_plans)) == 4


def test_a_job_that_ended_while_nobody_watched_is_collected(bench: Callable[..., Bench]) -> None:
    study = bench()
    study.clock.at[1] = die
    with pytest.raises(Crashed):
        study.start("micro_batch=2,2")
    for attempt in list(study.cluster.jobs):
        study.cluster.finish(attempt)
    study.start("micro_batch=2,2")
    assert study.states == [State.MEASURED]
    assert len(study.cluster.launched) == 1


@pytest.mark.parametrize("sleep", range(1, 10))
def test_whenever_the_orchestrator_dies_no_plan_runs_twice(bench: Callable[..., Bench], sleep: int) -> None:
    study = bench({"ddp x1": [oom], "zero1 x2": [lost, measured(100.0)]}, parallel=2)
    study.clock.at[sleep] = die
    with pytest.raises(Crashed):
        study.start("ranks=1", *FOUR_PLANS)
    study.start("ranks=1", *FOUR_PLANS)
    assert sorted(study.states) == [State.INFEASIBLE, *[State.MEASURED] * 3]
    assert sorted(study.launched_plans) == ["ddp x1", "ddp x2", "zero1 x1", "zero1 x2", "zero1 x2"]


def test_a_trial_recorded_but_never_launched_is_launched_by_the_next_start(
    bench: Callable[..., Bench],
) -> None:
    study = bench()
    study.start("micro_batch=1,2", limits=dataclasses.replace(NO_LIMIT, trials=1))
    ledger = study.ledger()
    other = 3 - int(str(ledger[1].values["micro_batch"]))
    plan = dataclasses.replace(ledger[1], number=2, state=State.RUNNING, values={"micro_batch": other})
    assert plan.plan is not None
    ledger.put(
        dataclasses.replace(
            plan, outcome=None, fingerprint="other", plan=dataclasses.replace(plan.plan, micro_batch=other)
        )
    )
    assert study.start("micro_batch=1,2") is StopReason.EXHAUSTED
    assert study.states == [State.MEASURED] * 2
    assert [(spec.trial, spec.attempt) for spec in study.cluster.launched] == [(1, 1), (2, 2)]


# ---------------------------------------------------------------- one point, checks


def test_one_point_is_measured_anew_though_it_is_known(bench: Callable[..., Bench]) -> None:
    study = bench()
    study.start("micro_batch=2,2")
    point: Point = {"micro_batch": 2}
    assert study.start("space=none", "micro_batch=2", point=point) is StopReason.EXHAUSTED
    assert study.states == [State.MEASURED] * 2
    assert [trial.origin for trial in study.trials] == [Origin.SAMPLER, Origin.USER]


def test_a_trial_of_the_users_own_may_lie_outside_the_space(bench: Callable[..., Bench]) -> None:
    study = bench()
    study.start("space=none", "strategy=ddp", point={"strategy": "ddp"})
    assert study.start("micro_batch=1,2") is StopReason.EXHAUSTED
    assert study.states == [State.MEASURED] * 3


def test_the_best_trials_are_trained_longer_one_after_another(bench: Callable[..., Bench]) -> None:
    study = bench({"ddp": [measured(50.0)], "zero1": [measured(90.0)], "zero2": [measured(70.0)]})
    study.start("strategy=ddp,zero1,zero2", "check.tokens=32768", check_best=2)
    checks = [spec for spec in study.cluster.launched if spec.kind is AttemptKind.CHECK]
    assert [spec.plan.strategy for spec in checks] == ["zero1", "zero2"]
    # 32768 tokens in steps of 16 x 128: 16 steps, of which 3 are warm-up.
    assert {(spec.measure.warmup_steps, spec.measure.steps) for spec in checks} == {(3, 13)}
    checked = [trial for trial in study.trials if isinstance(trial.check, Measurement)]
    assert [(trial.attempts, trial.measured_attempt, trial.check_attempt) for trial in checked] == [
        (2, 1, 2)
    ] * 2


def test_a_check_that_is_interrupted_is_done_by_the_next_start(bench: Callable[..., Bench]) -> None:
    study = bench()
    study.clock.at[4] = study.interrupt  # the measurement takes three sleeps
    assert study.start("micro_batch=2,2", check_best=1) is StopReason.INTERRUPTED
    assert (study.states, study.trials[0].check) == ([State.MEASURED], None)
    study.stop = False
    study.start("micro_batch=2,2", check_best=1)
    assert isinstance(study.trials[0].check, Measurement)
    assert isinstance(study.trials[0].outcome, Measurement)


def test_a_check_survives_a_crash_of_the_orchestrator(bench: Callable[..., Bench]) -> None:
    study = bench()
    study.clock.at[4] = die
    with pytest.raises(Crashed):
        study.start("micro_batch=2,2", check_best=1)
    study.start("micro_batch=2,2", check_best=1)
    assert isinstance(study.trials[0].check, Measurement)
    assert [spec.kind for spec in study.cluster.launched] == [AttemptKind.FIRST, AttemptKind.CHECK]


def test_a_check_recorded_but_never_launched_is_launched_by_the_next_start(
    bench: Callable[..., Bench],
) -> None:
    study = bench()
    study.start("micro_batch=2,2")
    study.ledger().change(1, attempts=2, check_attempt=2)
    study.start("micro_batch=2,2", check_best=1)
    assert isinstance(study.trials[0].check, Measurement)
    assert study.trials[0].check_attempt == 3


def test_a_failed_check_is_recorded_and_leaves_the_measurement(bench: Callable[..., Bench]) -> None:
    study = bench({"check zero1": [crash]})
    study.start("micro_batch=2,2", check_best=1)
    assert study.states == [State.MEASURED]
    assert isinstance(study.trials[0].check, Failure)
    assert isinstance(study.trials[0].outcome, Measurement)


# ---------------------------------------------------------------- others on the machine


def test_while_another_study_holds_the_slots_it_waits_and_says_so_once(bench: Callable[..., Bench]) -> None:
    study = bench(taken={"core-0"})
    study.clock.at[20] = study.cluster.taken.clear
    assert study.start("micro_batch=2,2") is StopReason.EXHAUSTED
    assert study.heard.messages == ["waiting for 2 free slots; another study holds them"]
    assert study.states == [State.MEASURED]
