"""The loop's repeats: the best in rounds after the search, a baseline now and then for drift."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from sweeps.config.schema import ConfirmConfig
from sweeps.study.limits import StopReason
from tests.support.examples import a_repeat
from tests.support.fake_cluster import crash, lost, measured
from tests.support.studies import NO_LIMIT, Bench, Crashed, die
from train_entry.contract import (
    AttemptKind,
    Failure,
    Goal,
    Measurement,
    Purpose,
    Ranking,
    State,
    Trial,
    Winner,
    read_document,
)

CONFIRM = ConfirmConfig(best=2, rounds=2, drift_every=0)
# ddp seems to be the best, by chance; 4 repeats show that zero1 is.
DDP = [measured(100.0), measured(100.0), measured(100.1)]
ZERO1 = [measured(99.0), measured(103.0), measured(103.1)]
TWO = ("strategy=ddp,zero1", "micro_batch=2,2", "search=grid")
SEARCHED = 6  # sleeps that two trials take; each repeat takes three more
GOAL = Goal(name="tokens_per_s")


@pytest.fixture
def study(bench: Callable[..., Bench]) -> Bench:
    return bench({"ddp": DDP, "zero1": ZERO1})


def winner(study: Bench) -> Winner | None:
    return read_document(study.directory.winner, Winner)


def repeats(study: Bench) -> list[str]:
    """Return the strategies that were launched again, in order."""
    again = [spec for spec in study.cluster.launched if spec.kind is AttemptKind.REPEAT]
    return [spec.plan.strategy for spec in again]


def rounds(trial: Trial) -> list[tuple[int, bool]]:
    """Return the rounds of its repeats, and whether each was measured."""
    return [(repeat.round, isinstance(repeat.outcome, Measurement)) for repeat in trial.repeats]


# ---------------------------------------------------------------- confirmation


def test_after_the_search_the_best_are_measured_again_in_rounds_and_the_winner_is_on_record(
    study: Bench,
) -> None:
    assert study.start(*TWO, confirm=CONFIRM) is StopReason.EXHAUSTED
    assert [spec.kind for spec in study.cluster.launched[:2]] == [AttemptKind.FIRST] * 2
    assert repeats(study) == ["ddp", "zero1", "ddp", "zero1"]
    found = winner(study)
    assert found is not None
    assert (found.trial, found.goal, found.tied) == (2, "tokens_per_s", ())
    assert [(each.trial, each.repeats) for each in found.standings] == [(2, 2), (1, 2)]
    assert [each.value for each in found.standings] == pytest.approx([103.05, 100.05], abs=0.01)
    assert [trial.gpu_s for trial in study.trials] == [60.0, 60.0]
    assert [spec.measure.beat_step_s for spec in study.cluster.launched[2:]] == [None] * 4
    first = study.trials[0]
    assert (first.state, len(first.attempts), first.counted) == (State.MEASURED, 3, first.attempts[0])
    assert isinstance(first.outcome, Measurement)
    assert first.outcome.tokens_per_s == 100.0
    study.start(*TWO, confirm=CONFIRM)
    assert len(repeats(study)) == 4


def test_repeats_run_alone_though_there_is_room_for_two(bench: Callable[..., Bench]) -> None:
    study = bench({"ddp": DDP, "zero1": ZERO1}, parallel=2)
    study.start("ranks=1", *TWO)
    assert (study.cluster.most_at_once, winner(study)) == (2, None)
    study.cluster.most_at_once = 0
    study.start("ranks=1", *TWO, confirm=CONFIRM)
    assert (study.cluster.most_at_once, len(repeats(study))) == (1, 4)


@pytest.mark.parametrize("sleep", [SEARCHED + 1, *range(SEARCHED + 3, SEARCHED + 13, 2)])
def test_whenever_the_orchestrator_dies_no_repeat_is_doubled_or_lost(study: Bench, sleep: int) -> None:
    study.clock.at[sleep] = die
    with pytest.raises(Crashed):
        study.start(*TWO, confirm=CONFIRM)
    assert winner(study) is None
    study.start(*TWO, confirm=CONFIRM)
    assert repeats(study) == ["ddp", "zero1", "ddp", "zero1"]
    assert [rounds(trial) for trial in study.trials] == [[(1, True), (2, True)]] * 2
    found = winner(study)
    assert found is not None
    assert found.trial == 2


def test_a_repeat_recorded_but_never_launched_is_launched_by_the_next_start(study: Bench) -> None:
    study.start(*TWO)
    study.ledger().put(study.trials[0].with_attempt(a_repeat(number=2, round=1, started_at=1_000_000.0)))
    study.start(*TWO, confirm=CONFIRM)
    never = study.trials[0].attempts[1]
    assert (never.is_replaced, never.ended_at) == (True, 1_000_000.0)  # it took none of the study's time
    assert [repeat.number for repeat in study.trials[0].repeats] == [3, 4]
    assert [rounds(trial) for trial in study.trials] == [[(1, True), (2, True)]] * 2


def test_an_interrupt_during_a_confirmation_leaves_it_to_the_next_start(study: Bench) -> None:
    study.clock.at[SEARCHED + 4] = study.interrupt  # during the second repeat
    assert study.start(*TWO, confirm=CONFIRM) is StopReason.INTERRUPTED
    assert (study.states, study.cluster.jobs) == ([State.MEASURED] * 2, {})
    assert [rounds(trial) for trial in study.trials] == [[(1, True)], []]
    assert winner(study) is None
    study.stop = False
    assert study.start(*TWO, confirm=CONFIRM) is StopReason.EXHAUSTED
    assert repeats(study) == ["ddp", "zero1", "zero1", "ddp", "zero1"]
    assert [rounds(trial) for trial in study.trials] == [[(1, True), (2, True)]] * 2
    assert winner(study) is not None


def test_a_trial_of_which_a_repeat_fails_does_not_win(bench: Callable[..., Bench]) -> None:
    study = bench({"ddp": DDP, "zero1": [measured(110.0), crash]})
    confirm = dataclasses.replace(CONFIRM, within=0.2)
    study.start(*TWO, confirm=confirm)
    assert repeats(study) == ["zero1", "ddp", "ddp"]
    failed = study.trials[1]
    assert failed.state is State.MEASURED
    assert isinstance(failed.repeats[0].outcome, Failure)
    found = winner(study)
    assert found is not None
    assert ([each.trial for each in found.standings], found.trial) == ([1], 1)


def test_a_repeat_that_was_lost_is_tried_again(bench: Callable[..., Bench]) -> None:
    study = bench({"ddp": [measured(100.0), lost, measured(100.0)], "zero1": ZERO1})
    study.start(*TWO, confirm=CONFIRM)
    assert repeats(study) == ["ddp", "ddp", "zero1", "ddp", "zero1"]
    assert [(trial.used_retries, rounds(trial)) for trial in study.trials] == [
        (1, [(1, True), (2, True)]),
        (0, [(1, True), (2, True)]),
    ]


def test_gpu_hours_are_kept_for_the_confirmation(bench: Callable[..., Bench]) -> None:
    """At 20 GPU-seconds a job, little more than 100 is enough for 3 trials and 2 repeats of the best."""
    study = bench({"zero1 x2": [measured(150.0)]})
    limits = dataclasses.replace(NO_LIMIT, gpu_hours=100.1 / 3600)
    confirm = dataclasses.replace(CONFIRM, best=1)
    asked = ("micro_batch=1,2,4,8", "search=grid")
    assert study.start(*asked, limits=limits, confirm=confirm) is StopReason.GPU_HOURS
    assert study.launched_plans == ["zero1 x1", "zero1 x2", "zero1 x4", "zero1 x2", "zero1 x2"]
    assert sum(trial.gpu_s for trial in study.trials) == 100.0
    found = winner(study)
    assert found is not None
    assert found.trial == 2


# ---------------------------------------------------------------- drift


def test_a_machine_that_slows_down_is_seen_and_the_ranking_corrected(bench: Callable[..., Bench]) -> None:
    """ddp, the best baseline, is a tenth slower two trials later: zero2 ran on a slower machine."""
    scripts = {
        "ddp": [measured(100.0), measured(90.0)],
        "zero1": [measured(50.0)],
        "zero2": [measured(97.0)],
    }
    study = bench(scripts)
    study.settings = ("search.prior=0", "search.single_gpu=never")
    confirm = ConfirmConfig(best=0, drift_every=2)
    study.start("strategy=ddp,zero1,zero2", "micro_batch=2,2", confirm=confirm)
    assert [spec.plan.strategy for spec in study.cluster.launched] == ["ddp", "zero1", "zero2", "ddp"]
    reference, _, last = study.trials
    assert [(repeat.purpose, repeat.round) for repeat in reference.repeats] == [(Purpose.DRIFT, 0)]
    ranking = Ranking(study.trials, GOAL)
    drifts = [ranking.drift(trial) for trial in study.trials]
    assert drifts == pytest.approx([1.0, 0.967, 0.933], abs=0.001)
    assert [trial.number for _, trial in ranking.contenders] == [last.number, 1, 2]
    assert study.heard.messages == [
        "the machine is 10.0% slower than at first; the ranking is corrected for it"
    ]
    assert study.trials[0].state is State.MEASURED


def test_a_look_for_drift_outlives_the_orchestrator(bench: Callable[..., Bench]) -> None:
    study = bench({"ddp": [measured(100.0), measured(90.0)]})
    study.settings = ("search.prior=0", "search.single_gpu=never")
    confirm = ConfirmConfig(best=0, drift_every=2)
    asked = ("strategy=ddp,zero1,zero2", "micro_batch=2,2")
    study.clock.at[10] = die  # during the drift repeat
    with pytest.raises(Crashed):
        study.start(*asked, confirm=confirm)
    study.start(*asked, confirm=confirm)
    assert repeats(study) == ["ddp"]
    assert Ranking(study.trials, GOAL).drift(study.trials[2]) < 0.95
