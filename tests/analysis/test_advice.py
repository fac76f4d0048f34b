"""Advice on the next trial, below the table and below a single trial."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from analysis.load import load_study
from analysis.table import show
from analysis.trial import show_trial
from train_entry.contract import FailureKind, read_trial

if TYPE_CHECKING:
    from tests.analysis.conftest import StudyBuilder


def advised(built: StudyBuilder, *, everything: bool = False) -> list[str]:
    """Lines below the table that advise."""
    stream = io.StringIO()
    show(load_study(built.directory), stream, everything=everything)
    return [line for line in stream.getvalue().splitlines() if ", try " in line or "sweeps advise" in line]


def shown_alone(built: StudyBuilder, number: int) -> str:
    trial = read_trial(built.directory.trial(number))
    assert trial is not None
    stream = io.StringIO()
    show_trial(trial, load_study(built.directory).rows[-1], stream)
    return stream.getvalue()


def test_the_table_says_what_to_try_after_a_trial_that_ran_out_of_memory(built: StudyBuilder) -> None:
    built.out_of_memory(4, "micro_batch=8", then="activation_checkpointing=full")
    assert advised(built) == [
        "after trial 0004 (gpu_oom), try activation_checkpointing=full: 3 GiB less",
        f"what it costs and how to run it: python -m sweeps advise {built.directory.path} TRIAL",
    ]


def test_a_few_are_enough_unless_everything_is_asked_for(built: StudyBuilder) -> None:
    for number in range(5):
        built.out_of_memory(number, f"seed={number}", then="micro_batch=4")
    assert [line[6:16] for line in advised(built)[:-1]] == ["trial 0000", "trial 0001", "trial 0002"]
    assert advised(built)[-1].startswith("... and 2 more: python -m sweeps advise ")
    assert len(advised(built, everything=True)) == 5 + 1


def test_advice_that_a_trial_of_the_study_has_followed_is_not_given_again(built: StudyBuilder) -> None:
    built.out_of_memory(1, "seed=0", then="micro_batch=4")
    built.measured(2, trial={"overrides": ("micro_batch=4", "seed=0")})
    assert advised(built) == []


def test_two_trials_with_the_same_advice_give_it_once(built: StudyBuilder) -> None:
    built.out_of_memory(1, "seed=0", then="micro_batch=4")
    built.out_of_memory(2, "seed=0", then="micro_batch=4")
    assert [line[6:16] for line in advised(built)[:-1]] == ["trial 0001"]


def test_a_trial_without_advice_adds_no_line(built: StudyBuilder) -> None:
    built.out_of_memory(1, "seed=0")
    built.failed(2, FailureKind.CRASHED, "boom")
    assert advised(built) == []


def test_a_single_trial_ends_with_its_advice_ready_to_paste(built: StudyBuilder) -> None:
    built.out_of_memory(1, "seed=0", then="micro_batch=4")
    lines = shown_alone(built, 1).splitlines()
    assert "try next: micro_batch=4: 3 GiB less" in lines
    assert "command: python sweep.py seed=0 micro_batch=4" in lines


def test_a_single_rejected_trial_gives_its_reasons(built: StudyBuilder) -> None:
    built.rejected(1, "8 is not a multiple of 3")
    assert "rejected: 8 is not a multiple of 3" in shown_alone(built, 1).splitlines()
