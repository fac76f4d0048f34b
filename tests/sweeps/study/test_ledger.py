"""The ledger: written first, read back, and refused where trials would not be comparable."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sweeps.errors import ConfigError, StudyBusyError
from sweeps.study.ledger import Ledger, exclusive, open_study
from tests.support.examples import (
    a_measured_trial,
    a_measurement,
    a_study_record,
    a_trial,
    a_trial_spec,
    an_attempt,
)
from train_entry.contract import (
    Goal,
    State,
    StudyDir,
    StudyRecord,
    Trial,
    TrialSpec,
    load,
    read_document,
)

HOLD = """
import sys, time
from pathlib import Path
from sweeps.study.ledger import exclusive
from train_entry.contract import StudyDir
with exclusive(StudyDir(Path(sys.argv[1]))):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def directory(tmp_path: Path) -> StudyDir:
    return StudyDir(tmp_path / "mine")


@pytest.fixture
def ledger(directory: StudyDir) -> Ledger:
    return Ledger(directory)


def asked(**changes: Any) -> StudyRecord:
    """Return what a command line asks, with changes."""
    record = a_study_record(
        name="mine",
        created_at=1000.0,
        goals=(Goal(name="tokens_per_s"),),
        asked={"global_batch": 32, "model.name": "tiny"},
        dimensions={"micro_batch": "1,2"},
        limits={"limits.trials": 4},
        versions={"torch": "2.9", "device": "CPU"},
    )
    return dataclasses.replace(record, **changes)


def problems(directory: StudyDir, asked: StudyRecord, accept_versions: bool = False) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        open_study(directory, asked, accept_versions)
    return caught.value.problems


# ---------------------------------------------------------------- trials


def test_a_trial_is_on_disk_as_soon_as_it_is_put(ledger: Ledger) -> None:
    trial = ledger.put(a_measured_trial())
    assert load(Trial, ledger.directory.trial(1).record.read_text()) == trial
    assert Ledger(ledger.directory).trials == [trial]


def test_a_change_is_on_disk_too(ledger: Ledger) -> None:
    trial = ledger.put(a_trial(attempts=(an_attempt(),)))
    ledger.put(trial.with_attempt(an_attempt(outcome=a_measurement(), gpu_s=8.0)))
    again = Ledger(ledger.directory)[1]
    assert (again.state, again.gpu_s) == (State.MEASURED, 8.0)


def test_numbers_count_from_one_and_go_on_after_the_last(ledger: Ledger) -> None:
    assert ledger.next_number() == 1
    ledger.put(a_measured_trial(number=7))
    assert Ledger(ledger.directory).next_number() == 8


def test_trials_are_in_the_order_of_their_numbers(ledger: Ledger) -> None:
    for number in (10, 2, 1):
        ledger.put(a_measured_trial(number=number))
    assert [trial.number for trial in ledger.trials] == [1, 2, 10]


def test_an_attempt_holds_what_its_job_is_told(ledger: Ledger) -> None:
    attempt = ledger.open_attempt(a_trial_spec(), '{"zero": 1}')
    assert read_document(attempt.spec, TrialSpec) == a_trial_spec()
    assert attempt.ds_config.read_text() == '{"zero": 1}'
    with pytest.raises(FileExistsError):
        ledger.open_attempt(a_trial_spec(), None)


@pytest.mark.parametrize(
    ("state", "found"),
    [
        (State.RUNNING, True),
        (State.MEASURED, True),
        (State.INFEASIBLE, True),
        (State.FAILED, False),
        (State.CANCELLED, False),
        (State.REUSED, False),
    ],
)
def test_a_twin_ran_or_runs_to_an_end_that_says_something(ledger: Ledger, state: State, found: bool) -> None:
    ledger.put(a_trial(state=state, fingerprint="f00d"))
    assert (ledger.twin("f00d") is not None) is found
    assert ledger.twin("beef") is None


def test_what_was_refused_without_a_launch_is_no_twin(ledger: Ledger) -> None:
    ledger.put(a_trial(state=State.INFEASIBLE, fingerprint="f00d", attempts=0))
    assert ledger.twin("f00d") is None


@pytest.mark.parametrize("text", ["", "{", '{"number": 1}', '{"state": "weird"}'])
def test_an_unreadable_trial_is_named(directory: StudyDir, text: str) -> None:
    record = directory.trial(3).record
    record.parent.mkdir(parents=True)
    record.write_text(text)
    with pytest.raises(ConfigError, match=f"{record}: .*; repair or remove this file"):
        Ledger(directory)


# ---------------------------------------------------------------- going on with a study


def test_a_new_study_is_recorded_as_asked(directory: StudyDir) -> None:
    assert open_study(directory, asked(), accept_versions=False) == asked()
    assert read_document(directory.record, StudyRecord) == asked()


def test_limits_may_be_raised_and_the_rest_stays_as_it_was_begun(directory: StudyDir) -> None:
    open_study(directory, asked(), accept_versions=False)
    later = asked(created_at=2000.0, limits={"limits.trials": 8}, overrides=("limits.trials=8",))
    expected = asked(limits={"limits.trials": 8})
    assert open_study(directory, later, accept_versions=False) == expected
    assert read_document(directory.record, StudyRecord) == expected


def test_each_difference_is_named(directory: StudyDir) -> None:
    open_study(directory, asked(), accept_versions=False)
    changed = asked(
        goals=(Goal(name="tokens_per_s_per_gpu"),),
        asked={"global_batch": 64, "seed": 1, "model.name": "tiny"},
        dimensions={"micro_batch": "1,2,4", "strategy": "ddp,zero1"},
    )
    way_out = "choose another study=NAME"
    assert problems(directory, changed) == (
        f"study mine: objective was tokens_per_s, now tokens_per_s_per_gpu; {way_out}",
        f"study mine: global_batch was 32, now 64; {way_out}",
        f"study mine: seed was 0, now 1; {way_out}",
        f"study mine: the range of micro_batch was 1,2, now 1,2,4; {way_out}",
        f"study mine: the range of strategy was None, now ddp,zero1; {way_out}",
    )


def test_other_versions_are_refused_unless_accepted(directory: StudyDir) -> None:
    open_study(directory, asked(), accept_versions=False)
    newer = asked(versions={"torch": "2.10", "device": "CPU"})
    way_out = "accept_versions=true continues nevertheless"
    assert problems(directory, newer) == (
        f"study mine: torch was 2.9, now 2.10, which changes timings; {way_out}",
    )
    assert open_study(directory, newer, accept_versions=True).versions["torch"] == "2.10"
    assert open_study(directory, newer, accept_versions=False).versions["torch"] == "2.10"


def test_accepting_versions_accepts_no_other_difference(directory: StudyDir) -> None:
    open_study(directory, asked(), accept_versions=False)
    assert len(problems(directory, asked(asked={}, versions={}), accept_versions=True)) == 1


def test_an_unreadable_study_is_named(directory: StudyDir) -> None:
    directory.path.mkdir()
    directory.record.write_text("{")
    assert problems(directory, asked())[0].startswith(f"{directory.record}: ")


# ---------------------------------------------------------------- one orchestrator at a time


def test_a_second_orchestrator_is_refused_and_told_who_holds_the_study(directory: StudyDir) -> None:
    command = [sys.executable, "-c", HOLD, str(directory.path)]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    assert holder.stdout.readline() == "held\n"
    with (
        pytest.raises(StudyBusyError, match=f"study mine is being run by pid {holder.pid} on "),
        exclusive(directory),
    ):
        pass
    holder.kill()
    holder.communicate()
    with exclusive(directory):
        assert "pid" in directory.lock.read_text()


def test_a_study_is_free_after_its_orchestrator_ended(directory: StudyDir) -> None:
    with exclusive(directory):
        pass
    with exclusive(directory):
        pass
