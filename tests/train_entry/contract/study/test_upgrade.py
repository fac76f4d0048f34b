"""Studies that the first edition recorded keep their content when they are read now."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.examples import a_measurement, a_plan, a_study_record
from tests.support.screens import NAMES, extract_studies
from train_entry.contract import (
    AttemptKind,
    Failure,
    FailureKind,
    Goal,
    RankExit,
    Ranking,
    State,
    StudyDir,
    StudyRecord,
    Trial,
    Winner,
    dump,
    load,
    read_document,
    read_trial,
)
from train_entry.contract.study.drift import looks_of

Pair = tuple[Trial, Mapping[str, Any]]  # a trial as it is read, and the JSON that was recorded


@pytest.fixture(scope="module")
def studies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return extract_studies(tmp_path_factory.mktemp("recorded"))


@pytest.fixture(params=NAMES)
def study(request: pytest.FixtureRequest, studies: Path) -> StudyDir:
    return StudyDir(studies / request.param)


@pytest.fixture
def pairs(study: StudyDir) -> list[Pair]:
    found: list[Pair] = []
    for folder in study.trials():
        trial = read_trial(folder)
        assert trial is not None
        found.append((trial, raw_of(folder.record)))
    assert found
    return found


def raw_of(record: Path) -> dict[str, Any]:
    raw: dict[str, Any] = json.loads(record.read_text(encoding="utf-8"))
    return raw


def as_json(record: Any) -> Any:
    return json.loads(dump(record)) if record is not None else None


# ---------------------------------------------------------------- every recorded trial


def test_a_trial_stands_where_it_stood(pairs: list[Pair]) -> None:
    for trial, raw in pairs:
        assert (trial.number, trial.state, trial.closed_at) == (
            raw["number"],
            State(raw["state"]),
            raw["closed_at"],
        )
        assert as_json(trial.outcome) == raw["outcome"]


def test_a_trial_is_the_same_configuration_of_the_same_origin(pairs: list[Pair]) -> None:
    for trial, raw in pairs:
        assert trial.origin == {"ladder": "baseline"}.get(raw["origin"], raw["origin"])
        assert (trial.baseline, trial.is_single_gpu) == (raw["rung"], raw["is_yardstick"])
        assert (trial.overrides, trial.values) == (tuple(raw["overrides"]), raw["values"])
        assert (trial.fingerprint, trial.parent) == (raw["fingerprint"], raw["parent"])
        assert (trial.reused_from, trial.created_at) == (raw["reused_from"], raw["created_at"])
        assert (trial.plan is None, trial.is_shared) == (raw["plan"] is None, raw["shared"])


def test_a_trial_has_as_many_attempts_and_has_used_up_as_many_retries(pairs: list[Pair]) -> None:
    for trial, raw in pairs:
        assert [attempt.number for attempt in trial.attempts] == list(range(1, raw["attempts"] + 1))
        assert trial.used_retries == raw["lost"]


def test_a_trial_has_cost_as_much(pairs: list[Pair]) -> None:
    for trial, raw in pairs:
        assert trial.gpu_s == pytest.approx(raw["gpu_s"])


def test_the_attempt_that_was_measured_counts(pairs: list[Pair]) -> None:
    for trial, raw in pairs:
        if raw["measured_attempt"] is not None:
            assert trial.counted is not None
            assert trial.counted.number == raw["measured_attempt"]
            assert trial.counted.outcome == trial.outcome


def test_repeats_are_attempts_of_the_same_purpose_and_round(pairs: list[Pair]) -> None:
    for trial, raw in pairs:
        found = [
            {
                "attempt": repeat.number,
                "purpose": repeat.purpose,
                "turn": repeat.round,
                "outcome": as_json(repeat.outcome),
                "started_at": repeat.started_at,
                "ended_at": repeat.ended_at,
            }
            for repeat in trial.repeats
        ]
        assert found == raw["repeats"]


def test_the_check_is_the_attempt_that_it_was(pairs: list[Pair]) -> None:
    for trial, raw in pairs:
        found = (trial.check.number, as_json(trial.check.outcome)) if trial.check else (None, None)
        assert found == (raw["check_attempt"], raw["check"])


def test_the_latest_attempt_ran_where_it_ran_and_its_time_went_where_it_went(pairs: list[Pair]) -> None:
    for trial, raw in pairs:
        if trial.latest is not None:
            assert trial.latest.slots == tuple(raw["slots"])
            assert as_json(trial.latest.elapsed) == raw["elapsed"]


def test_the_machine_had_drifted_as_much_when_a_trial_was_measured(
    study: StudyDir, pairs: list[Pair]
) -> None:
    """The first edition corrected trials up to the latest look; later ones waited for the next look."""
    record = read_document(study.record, StudyRecord)
    assert record is not None
    ranking = Ranking((trial for trial, _ in pairs), record.goal)
    latest_look = max(
        (look.ended_at or 0.0 for trial, _ in pairs for look in looks_of(trial)), default=math.inf
    )
    for trial, raw in pairs:
        if (trial.closed_at or 0.0) <= latest_look:
            assert ranking.drift(trial) == raw["drift"]


def test_a_trial_that_is_written_is_read_again_alike(pairs: list[Pair]) -> None:
    for trial, _ in pairs:
        assert load(Trial, dump(trial)) == trial


def test_an_attempt_costs_what_its_supervisors_wrote_down(study: StudyDir, pairs: list[Pair]) -> None:
    for trial, _ in pairs:
        ranks = trial.plan.ranks if trial.plan else 0
        for attempt in trial.attempts if len(trial.attempts) > 1 else ():
            folder = study.trial(trial.number).attempt(attempt.number)
            ends = [read_document(folder.exit(rank), RankExit) for rank in range(ranks)]
            seconds = [ended.seconds for ended in ends if ended is not None]
            assert not seconds or attempt.gpu_s == pytest.approx(ranks * max(seconds))


# ---------------------------------------------------------------- study.json, winner.json


def test_a_study_seeks_what_it_sought(study: StudyDir) -> None:
    record, raw = read_document(study.record, StudyRecord), raw_of(study.record)
    assert record is not None
    goals = tuple(Goal(**goal) for goal in raw["goals"]) or (Goal(name=raw["objective"]),)
    assert (record.goals, record.goal) == (goals, goals[0])
    assert (record.name, record.asked, record.overrides) == (
        raw["name"],
        raw["asked"],
        tuple(raw["overrides"]),
    )
    assert load(StudyRecord, dump(record)) == record


def test_a_winner_stays_the_winner(study: StudyDir) -> None:
    winner = read_document(study.winner, Winner)
    assert (winner is not None) is study.winner.exists()
    if winner is not None:
        raw = raw_of(study.winner)
        assert as_json(winner) == {"baseline": raw.pop("rung"), **raw}
        assert load(Winner, dump(winner)) == winner


# ---------------------------------------------------------------- cases that no recorded study has


def first_edition(**changes: Any) -> Trial:
    """Return trial 1 in the first edition's format, measured by its first attempt."""
    known = {
        "number": 1,
        "state": "measured",
        "origin": "sampler",
        "overrides": [],
        "values": {},
        "created_at": 1.0,
        "closed_at": 9.0,
        "plan": json.loads(dump(a_plan())),
        "outcome": as_json(a_measurement()),
        "attempts": 1,
        "measured_attempt": 1,
        "gpu_s": 8.0,
    }
    return load(Trial, json.dumps({**known, **changes}))


def test_attempts_that_used_up_no_retry_were_cancelled() -> None:
    trial = first_edition(attempts=3, measured_attempt=3, lost=1)
    kinds = [one.outcome.kind for one in trial.attempts if isinstance(one.outcome, Failure)]
    assert kinds == [FailureKind.NODE_LOST, FailureKind.CANCELLED]
    assert (trial.state, trial.used_retries, trial.counted) == (State.MEASURED, 1, trial.attempts[2])
    assert [one.kind for one in trial.attempts] == [
        AttemptKind.FIRST,
        AttemptKind.RETRY,
        AttemptKind.RETRY,
    ]


def test_a_check_that_ran_still_runs() -> None:
    trial = first_edition(attempts=2, check_attempt=2, check=None, slots=["core-0"])
    assert (trial.state, trial.running, trial.check) == (State.MEASURED, trial.attempts[1], trial.running)
    assert trial.attempts[1].slots == ("core-0",)


def test_a_trial_that_waited_for_its_retry_still_waits() -> None:
    trial = first_edition(
        state="queued", outcome=None, measured_attempt=None, closed_at=None, lost=1, gpu_s=3.0
    )
    assert (trial.state, trial.outcome, trial.closed_at) == (State.QUEUED, None, None)
    assert (trial.used_retries, trial.gpu_s, len(trial.attempts)) == (1, 3.0, 1)


def test_a_trial_cancelled_in_the_queue_stays_cancelled() -> None:
    trial = first_edition(state="cancelled", outcome=None, attempts=0, measured_attempt=None, gpu_s=0.0)
    assert (trial.state, trial.closed_at, trial.attempts) == (State.CANCELLED, 9.0, ())


def test_a_key_that_was_renamed_is_found_under_its_new_name() -> None:
    old = {
        **json.loads(dump(a_study_record())),
        "objective": "tokens_per_s",
        "goals": [],
        "overrides": ["search.ladder=false", "++search.ladder=true", "strategy=ddp"],
    }
    record = load(StudyRecord, json.dumps(old))
    assert record.overrides == ("search.baselines=false", "++search.baselines=true", "strategy=ddp")
    assert record.goal == Goal(name="tokens_per_s")


@pytest.mark.parametrize("lost", [1, 0], ids=["its node was lost", "it was cancelled"])
def test_a_repeat_that_was_lost_leaves_the_measurement_that_counts(lost: int) -> None:
    """The first edition dropped such a repeat from its list and did not use the attempt's number again."""
    again = {
        "attempt": 3,
        "purpose": "confirm",
        "turn": 1,
        "outcome": as_json(a_measurement()),
        "started_at": 20.0,
        "ended_at": 30.0,
    }
    trial = first_edition(attempts=3, measured_attempt=1, lost=lost, repeats=[again])
    assert (trial.state, trial.closed_at, trial.counted) == (State.MEASURED, 9.0, trial.attempts[0])
    assert ([repeat.number for repeat in trial.repeats], trial.used_retries) == ([3], lost)
