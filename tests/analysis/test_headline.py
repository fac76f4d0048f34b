"""The headline of a study. Gains and efficiencies are worked out by hand."""

from __future__ import annotations

from analysis.headline import headline
from analysis.load import load_study
from tests.analysis.conftest import StudyBuilder, measured_again
from tests.support.examples import a_plan
from train_entry.contract import Goal, Standing, State

ONCE = " (each measured once, not confirmed)"

FASTER = "the best configuration, trial 0003 (zero2), is 1.25 times as fast as"


def said(built: StudyBuilder) -> list[str]:
    return headline(load_study(built.directory))


def test_a_study_without_baselines_and_confirmation_has_none(built: StudyBuilder) -> None:
    assert said(built) == []
    built.measured(1)
    assert said(built) == []


def test_what_was_measured_once_is_said_to_be_unconfirmed(built: StudyBuilder) -> None:
    built.baseline(1, "ddp", 300.0)
    built.baseline(2, "zero1", 400.0)
    built.measured(3, tokens_per_s_per_gpu=500.0)
    assert said(built) == [f"{FASTER} the best baseline, trial 0002 (zero2){ONCE}"]


def test_a_search_that_found_nothing_better_says_so(built: StudyBuilder) -> None:
    built.baseline(1, "ddp", 300.0)
    built.measured(3, tokens_per_s_per_gpu=200.0)
    assert said(built) == [f"no configuration beat the best baseline, trial 0001 (zero2){ONCE}"]


def test_a_shorter_time_is_a_gain(built: StudyBuilder) -> None:
    built.seeks(Goal(name="time_to_tokens", tokens=1e9))
    built.baseline(1, "ddp", 400.0)
    built.measured(3, tokens_per_s=1000.0)
    assert said(built) == [f"{FASTER} the best baseline, trial 0001 (zero2){ONCE}"]


def test_a_gain_is_free_of_the_machines_drift(built: StudyBuilder) -> None:
    built.baseline(1, "ddp", 400.0, **measured_again({50.0: 0.8}))
    built.measured(3, tokens_per_s_per_gpu=400.0, trial={"closed_at": 60.0})
    assert said(built)[0].startswith(f"{FASTER} the best baseline, trial 0001")


def test_a_confirmed_winner_has_intervals(built: StudyBuilder) -> None:
    built.baseline(3, "zero1", 33_000.0)
    built.measured(7, tokens_per_s_per_gpu=41_000.0)
    standing = Standing(trial=7, value=41_230.0, low=41_100.0, high=41_360.0, repeats=3)
    gains = {"baseline": 3, "gain": 1.234, "gain_low": 1.21, "gain_high": 1.25}
    built.confirmed((7, 41_230.0), standings=(standing,), noise=0.0031, **gains)
    assert said(built) == [
        "the best configuration, trial 0007 (zero2), is 1.23 times as fast as the best baseline, "
        "trial 0003 (zero2) (95% interval: 1.21 to 1.25)",
        "confirmed: trial 0007 reaches 41,230 tokens/s/GPU "
        "(mean of 3 repeats; 95% interval: 41,100 to 41,360)",
        "noise: repeats of one configuration vary by 0.31% (standard deviation)",
    ]


def test_intervals_of_times_are_in_hours_and_in_order(built: StudyBuilder) -> None:
    built.seeks(Goal(name="time_to_tokens", tokens=1e9))
    built.measured(7)
    standing = Standing(trial=7, value=7200.0, low=7300.0, high=7100.0, repeats=1)
    built.confirmed((7, 7200.0), standings=(standing,), goal="time_to_tokens")
    assert said(built) == ["confirmed: trial 0007 reaches 2.00 h (1 repeat; 95% interval: 1.97 h to 2.03 h)"]


def test_trials_that_cannot_be_told_apart_are_named(built: StudyBuilder) -> None:
    for number in (4, 7, 9):
        built.measured(number)
    built.confirmed((4, 510.0), (7, 500.0), (9, 490.0), trial=7, tied=(4,))
    line = "tied with trial 0004 within measurement error; the winner needs less memory"
    assert line in said(built)


def test_a_winner_that_leads_alone_is_tied_with_none(built: StudyBuilder) -> None:
    built.measured(4)
    built.measured(7)
    built.confirmed((7, 500.0), (4, 400.0))
    assert not any("tied with" in line for line in said(built))


def test_a_trial_that_is_ahead_and_was_never_repeated_is_named(built: StudyBuilder) -> None:
    built.measured(7, tokens_per_s_per_gpu=500.0)
    built.measured(8, tokens_per_s_per_gpu=600.0)
    built.confirmed((7, 500.0))
    assert said(built)[-1] == (
        "not confirmed: trial 0008 (zero2) beat trial 0007 when each was measured once, but was not repeated"
    )


def test_a_winner_that_cannot_win_any_more_or_of_another_goal_is_none(built: StudyBuilder) -> None:
    built.measured(7, state=State.SUSPECT)
    built.confirmed((7, 500.0))
    assert said(built) == []
    built.measured(7)
    built.confirmed((7, 500.0), goal="peak_bytes")
    assert said(built) == []


def test_a_winner_that_cannot_be_read_is_a_warning(built: StudyBuilder) -> None:
    built.measured(7)
    built.directory.winner.write_text("{")
    (warning,) = load_study(built.directory).warnings
    assert warning.startswith(f"{built.directory.winner}: ")


def test_scaling_is_against_the_single_gpu_baseline_of_fewest_ranks(built: StudyBuilder) -> None:
    for number, ranks, speed in ((1, 1, 1000.0), (2, 1, 900.0), (3, 2, 5000.0)):
        plan = a_plan(ranks=ranks)
        built.measured(number, plan=plan, tokens_per_s_per_gpu=speed, trial={"is_single_gpu": True})
    built.measured(4, plan=a_plan(ranks=8), tokens_per_s_per_gpu=870.0)
    assert said(built) == [
        "scaling efficiency: 87.0% (tokens/s/GPU of trial 0004 on 8 ranks / "
        "that of trial 0001 (zero2) on 1 rank)"
    ]
