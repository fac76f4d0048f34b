"""Trials in allocations: a true HeldCluster, with a scheduler and holders that the tests play."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import pytest

from sweeps.cluster.base import JobHandle, JobState
from sweeps.cluster.slurm import allocations, held, held_steps, states, submit
from sweeps.cluster.slurm.held import HeldCluster
from sweeps.cluster.slurm.holder import Hold, HoldDir, Holder, StepEnd
from sweeps.cluster.slurm.queries import JobWatch, SlurmError
from sweeps.cluster.slurm.request import Site
from sweeps.config.schema import ClusterConfig
from sweeps.errors import SweepError
from sweeps.machine import Machine
from sweeps.study.collect import collect
from tests.support.examples import a_plan, a_trial_spec, an_attempt
from tests.sweeps.cluster.conftest import Commands
from train_entry.contract import AttemptDir, Failure, FailureKind, StudyDir, dump, read_document, write_atomic

FOUR_NODES = Machine(device="cpu", nodes=4, ranks_per_node=2, cores=8)
SPEC = a_trial_spec(plan=a_plan(ranks=4))
ROW = "{}|{}|{}|1:00|8:00:00|x/hold-0|\n"
SILENT: None = None


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch, commands: Commands) -> None:
    """Wait for nothing, and reach Slurm's scripted commands only: this machine may have none, or its own."""
    monkeypatch.setattr(held, "LOOK_S", 0.0)
    monkeypatch.setattr(submit, "RESEND_S", 0.0)


@pytest.fixture
def study(tmp_path: Path) -> StudyDir:
    return StudyDir(tmp_path / "x")


class Played:
    """A scripted squeue, and a study's cluster that asks it."""

    def __init__(self, study: StudyDir, **keys: Any) -> None:
        self.squeue: str | None = ""
        self.told: list[str] = []
        config = ClusterConfig(kind="slurm", nodes=4, hold=True, **keys)
        watch = JobWatch(ask=self._ask, squeue_every_s=0.0)
        self.on = HeldCluster(Site(cluster=config, machine=FOUR_NODES), 4, study, watch, self.told.append)

    def _ask(self, *command: str) -> str:
        if self.squeue is None:
            raise SlurmError("Unable to contact slurm controller")
        return self.squeue if command[0] == "squeue" else ""


def a_hold(study: StudyDir, hosts: int | None = 4, index: int = 0, job_id: str = "7") -> HoldDir:
    """An allocation that an earlier start requested. `hosts` None: it still waits for its nodes."""
    directory = HoldDir(study.path / "holds" / f"{index + 1:04d}")
    write_atomic(directory.record, dump(Hold(job_id=job_id, index=index, asked_at=0.0)))
    if hosts is not None:
        names = tuple(f"n{number}" for number in range(hosts))
        write_atomic(directory.holder, dump(Holder(job_id=job_id, host="n0", hosts=names, started_at=0.0)))
    return directory


def submitted(on: HeldCluster, study: StudyDir, number: int = 1) -> JobHandle:
    attempt = study.trial(number).attempt(1)
    write_atomic(attempt.spec, dump(SPEC))
    slots = on.reserve(4)
    assert slots is not None
    return on.submit(attempt, SPEC, slots)


# ---------------------------------------------------------------- slots


def test_a_trial_lies_within_one_allocation(study: StudyDir) -> None:
    on = Played(study, holds=2).on
    assert on.free_ranks() == 4
    assert on.reserve(8) is None
    a_hold(study)
    submitted(on, study)
    assert on.reserve(4) == ("hold-1.node-0/0", "hold-1.node-0/1", "hold-1.node-1/0", "hold-1.node-1/1")


def test_beside_an_allocation_of_part_of_a_node_others_may_run(study: StudyDir) -> None:
    assert not Played(study, exclusive=False).on.has_neighbours(("hold-0.node-0/0",))
    on = Played(study, exclusive=False).on
    on.site = dataclasses.replace(on.site, gpus_on_node=4)
    assert on.has_neighbours(("hold-0.node-0/0",))


def test_an_allocation_that_is_too_small_after_a_change_of_holds_is_given_back(study: StudyDir) -> None:
    small = a_hold(study, hosts=2)
    played = Played(study, holds=1)
    played.squeue = ROW.format(7, "RUNNING", "None")
    on = played.on
    slots = tuple(f"hold-0.node-{node}/{slot}" for node in (2, 3) for slot in (0, 1))
    attempt = study.trial(1).attempt(1)
    write_atomic(attempt.spec, dump(SPEC))
    assert on.poll(on.submit(attempt, SPEC, slots)) is JobState.QUEUED
    assert small.release.exists()
    assert not small.order("0001.attempt-1").exists()


# ---------------------------------------------------------------- a controller that refuses or is silent


class Reluctant:
    """An executor to which sbatch gives these answers, one after another."""

    answers: list[SweepError | str]

    def __init__(self, folder: Path) -> None: ...

    def update_parameters(self, **parameters: object) -> None: ...

    def send(self, *_: object) -> str:
        if isinstance(answer := self.answers.pop(0), SweepError):
            raise answer
        return answer


def test_an_allocation_that_sbatch_refuses_for_a_while_is_asked_for_again(
    study: StudyDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        Reluctant, "answers", [SweepError("sbatch refused x/hold-0: busy"), "7"], raising=False
    )
    monkeypatch.setattr(allocations, "Executor", Reluctant)
    played = Played(study)
    handle = submitted(played.on, study)
    assert played.told == ["sbatch refused x/hold-0: busy; trying again for 10 minutes"]
    for _ in range(3):
        assert played.on.poll(handle) is JobState.QUEUED
    record = read_document(HoldDir(study.path / "holds" / "0001").record, Hold)
    assert record is not None
    assert record.job_id == "7"


def test_giving_back_names_what_it_could_not_and_raises_nothing(study: StudyDir, commands: Commands) -> None:
    commands.answer("scancel", err="scancel: error: Unable to contact slurm controller\n", status=1)
    waiting = a_hold(study, hosts=None)
    played = Played(study)
    played.squeue = SILENT
    (problem,) = played.on.give_back()
    assert problem.startswith("job 7, which holds nodes, may not end: Unable to contact")
    assert waiting.release.exists(), "it ends itself once it is there"
    commands.answer("scancel")
    assert played.on.give_back() == []


# ---------------------------------------------------------------- steps


def test_a_step_that_does_not_start_is_ended_and_its_trial_is_lost(
    study: StudyDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = a_hold(study)
    played = Played(study)
    played.squeue = ROW.format(7, "RUNNING", "None")
    handle = submitted(played.on, study)
    directory.begun("0001.attempt-1").touch()
    assert played.on.poll(handle) is JobState.STARTING
    late = time.monotonic() + SPEC.limits.startup_s + 1
    monkeypatch.setattr(time, "monotonic", lambda: late)
    assert played.on.poll(handle) is JobState.STARTING
    assert directory.cancel("0001.attempt-1").exists()
    write_atomic(directory.ended("0001.attempt-1"), dump(StepEnd(returncode=1)))
    assert played.on.poll(handle) is JobState.LOST
    outcome = collect(AttemptDir(handle.attempt.path), SPEC, an_attempt()).outcome
    assert isinstance(outcome, Failure)
    assert outcome.kind is FailureKind.NODE_LOST
    assert "started none of its ranks" in outcome.message


def test_all_steps_are_told_to_end_before_any_is_waited_for(
    study: StudyDir, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If their holder is silent, the allocation is ended, once."""
    monkeypatch.setattr(held_steps, "CANCEL_S", 0.1)
    monkeypatch.setattr(submit, "CANCEL_S", 0.1)
    directory = a_hold(study)
    played = Played(study)
    played.squeue = ROW.format(7, "RUNNING", "None")
    first, second = submitted(played.on, study, 1), submitted(played.on, study, 2)
    (problem,) = played.on.cancel(first, second)
    assert problem.startswith("job 7 may still run")
    assert directory.cancel("0001.attempt-1").exists()
    assert directory.cancel("0002.attempt-1").exists()
    assert commands.calls("scancel") == ["7"]


def test_an_allocation_that_waits_for_long_says_why(study: StudyDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "TOLD_S", 0.0)
    a_hold(study, hosts=None)
    played = Played(study)
    played.squeue = ROW.format(7, "PENDING", "QOSMaxWallDurationPerJobLimit")
    handle = submitted(played.on, study)
    played.on.poll(handle)
    (text,) = played.told
    assert text.startswith("the allocation (job 7) waits: QOSMaxWallDurationPerJobLimit; lower")


def test_a_neighbours_step_out_of_memory_is_not_this_trials(
    study: StudyDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The allocation failed after another step of it had run out of memory."""
    monkeypatch.setattr(held, "FILES_S", -1.0)
    directory = a_hold(study)
    sacct = "7|FAILED|1:0|00:01:00|08:00:00\n7.0|OUT_OF_MEMORY|0:125|00:01:00|\n"
    played = Played(study)
    rows = {"squeue": ROW.format(7, "RUNNING", "None"), "sacct": sacct}
    played.on.watch.ask = lambda *command: rows[command[0]]
    handle = submitted(played.on, study)
    directory.begun("0001.attempt-1").touch()
    rows["squeue"] = ROW.format(7, "FAILED", "None")
    assert played.on.poll(handle) is JobState.LOST
    outcome = collect(handle.attempt, SPEC, an_attempt()).outcome
    assert isinstance(outcome, Failure)
    assert outcome.kind is FailureKind.NODE_LOST
