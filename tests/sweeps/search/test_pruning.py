"""Pruning: in a study that seeks the lowest loss, trials that fall behind are asked to end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from sweeps.cluster.base import JobHandle
from sweeps.config.schema import SearchConfig
from sweeps.search.pruning import Pruning
from sweeps.search.sampler import Proposal, Sampler
from sweeps.search.verdicts import HOLDS, Lesson
from sweeps.space.dimensions import Choices, Dimension, SearchSpace
from sweeps.study.limits import StopReason
from tests.support.fake_cluster import measured
from tests.support.studies import Bench
from train_entry.contract import AttemptDir, Goal, State, StepMetrics, append_line

LOSS = Goal(name="loss")
SPACE = SearchSpace(dimensions=(Dimension(key="k", text="", range=Choices(values=(1, 2, 3, 4))),))


def train(attempt: AttemptDir, *losses: float, after: int = 0) -> None:
    """Write the step metrics that rank 0 writes."""
    for step, loss in enumerate(losses, start=after + 1):
        append_line(
            attempt.metrics, StepMetrics(step=step, tokens=step, loss=loss, step_s=1.0, lr=1e-3, timed=True)
        )


@pytest.fixture
def sampler() -> Sampler:
    return Sampler(SPACE, SearchConfig(startup_trials=1, pruner="median"))


def running(directory: Path, sampler: Sampler) -> tuple[JobHandle, Proposal]:
    directory.mkdir()
    proposal = sampler.ask()
    assert proposal is not None
    return JobHandle(attempt=AttemptDir(directory), ranks=1, slots=(), submitted_at=0.0), proposal


def test_a_loss_worse_than_that_of_others_at_the_same_step_ends_a_trial(
    tmp_path: Path, sampler: Sampler
) -> None:
    pruning = Pruning(sampler, LOSS)
    first, proposal = running(tmp_path / "1", sampler)
    train(first.attempt, 5.0, 4.0, 3.0)
    assert pruning.look({1: first}, {1: proposal}) == []
    score = Lesson(point=proposal.point, scores=(-3.0,), legal=HOLDS, memory=HOLDS, trained=HOLDS)
    sampler.tell(proposal, score)
    second, other = running(tmp_path / "2", sampler)
    train(second.attempt, 4.9, 3.9)
    assert pruning.look({2: second}, {2: other}) == []
    train(second.attempt, 3.5, after=2)
    assert pruning.look({2: second}, {2: other}) == [2]
    assert second.attempt.stop.exists()
    assert pruning.look({2: second}, {2: other}) == []  # it is asked only once


def test_jobs_that_no_sampler_proposed_run_to_their_end(tmp_path: Path, sampler: Sampler) -> None:
    handle, _ = running(tmp_path / "1", sampler)
    train(handle.attempt, float("nan"))
    assert Pruning(sampler, LOSS).look({1: handle}, {}) == []
    assert not handle.attempt.stop.exists()


def test_in_the_loop_such_a_trial_closes_as_stopped(bench: Callable[..., Bench]) -> None:
    study = bench({"*": [measured(100.0, watched=True)]})
    study.goals = (LOSS,)

    def write(*losses: float) -> None:
        (attempt,) = study.cluster.jobs
        train(attempt, *losses)

    study.clock.at = {1: lambda: write(3.0, 2.0), 4: lambda: write(9.0, 9.0), 7: lambda: write(2.0, 1.0)}
    asked = ("micro_batch=1,2,4", "objective=loss", "search.pruner=median", "search.startup_trials=1")
    assert study.start(*asked) is StopReason.EXHAUSTED
    assert study.states == [State.MEASURED, State.STOPPED, State.MEASURED]
    assert study.heard.messages == ["trial 0002 is pruned: its loss is behind"]
    assert [study.ledger().attempt(number, 1).stop.exists() for number in (1, 2, 3)] == [False, True, False]
    assert len(study.told) == 2  # a pruned trial is known by the loss of its steps
    study.start(*asked)
    assert len(study.cluster.launched) == 3
