from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from analysis.load import StudyUnreadable, load_study
from tests.support.estimates import an_estimate
from tests.support.examples import a_measurement, a_repeat
from train_entry.contract import Failure, FailureKind, Goal, Origin, Reason, State, StudyDir

if TYPE_CHECKING:
    from tests.analysis.conftest import StudyBuilder


def test_a_measured_trial_shows_each_number_under_its_own_name(built: StudyBuilder) -> None:
    built.measured(3, mfu=0.41)
    (row,) = load_study(built.directory).rows
    assert (row.number, row.state, row.origin, row.strategy) == (3, State.MEASURED, Origin.SAMPLER, "zero2")
    assert (row.tokens_per_s, row.tokens_per_s_per_gpu, row.objective) == (24_690.0, 12_345.0, 12_345.0)
    assert (row.step_s, row.step_s_iqr, row.peak_bytes) == (0.25, 0.005, 3 * 2**30)
    assert (row.mfu, row.gpu_s, row.loss, row.loss_tokens) == (0.41, 20.0, 5.5, 10_000)
    assert row.values == {"strategy": "zero2", "micro_batch": 4}
    assert row.overrides == ("strategy=zero2", "micro_batch=4")


def test_losses_are_compared_at_the_tokens_that_every_measured_trial_reached(built: StudyBuilder) -> None:
    built.measured(0)
    built.losses(0, [9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0])  # 1,000 tokens a step: 8,000
    built.measured(1)
    built.losses(1, [9.5, 8.5, 7.5, 6.5], tokens_per_step=1700)  # 6,800
    study = load_study(built.directory)
    assert study.loss_tokens == 6800
    assert study.rows[0].loss == pytest.approx((8 + 7 + 6 + 5 + 4) / 5)  # steps 2 to 6: 6,000 tokens
    assert study.rows[0].loss_tokens == 6000
    assert study.rows[1].loss == pytest.approx((9.5 + 8.5 + 7.5 + 6.5) / 4)
    assert study.rows[1].loss_tokens == 6800


def test_a_trial_that_was_not_measured_does_not_lower_the_tokens_of_the_others(built: StudyBuilder) -> None:
    built.measured(0)
    built.losses(0, [4.0] * 8)
    built.measured(1, state=State.STOPPED)
    built.losses(1, [3.0] * 2)
    built.measured(2, state=State.SUSPECT)
    built.losses(2, [2.0] * 3)
    study = load_study(built.directory)
    assert study.loss_tokens == 8000
    assert [row.loss for row in study.rows] == [4.0, None, None]


def test_the_latest_attempt_that_has_a_stream_gives_the_loss(built: StudyBuilder) -> None:
    built.of_first_edition(0, a_measurement(), attempts=3)  # which of them was measured it does not say
    (before,) = load_study(built.directory).rows
    built.losses(0, [9.0, 9.0], attempt=1)
    built.losses(0, [3.0, 5.0], attempt=2)  # the third attempt wrote nothing
    (after,) = load_study(built.directory).rows
    assert (before.loss, after.loss, after.loss_tokens) == (5.5, 4.0, 2000)


def test_a_later_attempt_that_was_not_the_one_measured_does_not_count(built: StudyBuilder) -> None:
    crash = Failure(kind=FailureKind.CRASHED, message="boom")
    built.measured(0, trial={"repeats": (a_repeat(outcome=crash),)})
    built.losses(0, [3.0, 5.0], attempt=1)
    built.losses(0, [9.0], attempt=2)  # a repeat that failed at once
    study = load_study(built.directory)
    assert (study.loss_tokens, study.rows[0].loss) == (2000, 4.0)


def test_without_a_stream_the_measured_loss_counts_only_at_the_same_tokens(built: StudyBuilder) -> None:
    built.measured(0)
    built.losses(0, [4.0] * 10)
    built.measured(1, tokens=10_000, loss=3.25)
    built.measured(2, tokens=12_000, loss=2.25)
    study = load_study(built.directory)
    assert study.loss_tokens == 10_000
    assert [row.loss for row in study.rows] == [4.0, 3.25, None]


def test_a_torn_line_of_a_stream_is_skipped(built: StudyBuilder) -> None:
    built.measured(0)
    built.losses(0, [4.0, 2.0])
    with built.directory.trial(0).attempt(1).metrics.open("a") as stream:
        stream.write('{"step": 3, "tok')
    (row,) = load_study(built.directory).rows
    assert (row.loss, row.loss_tokens) == (3.0, 2000)


def test_a_reused_trial_shows_the_numbers_of_its_source_and_its_own_cost(built: StudyBuilder) -> None:
    built.measured(0, tokens_per_s=111.0, peak_bytes=222, step_s=3.5)
    built.losses(0, [4.0, 2.0])
    built.reused(1, 0)
    built.reused(2, 1)
    for row in load_study(built.directory).rows[1:]:
        assert (row.state, row.tokens_per_s, row.peak_bytes, row.step_s) == (State.REUSED, 111.0, 222, 3.5)
        assert (row.loss, row.gpu_s) == (3.0, 0.0)


def test_trials_that_reuse_each_other_or_nothing_are_read_without_numbers(built: StudyBuilder) -> None:
    full = Failure(kind=FailureKind.GPU_OOM, message="full")
    for number, twin in ((1, 2), (2, 1), (3, 99)):
        built.reused(number, twin, full)
    assert [row.tokens_per_s for row in load_study(built.directory).rows] == [None, None, None]


@pytest.mark.parametrize(
    "text", ['{"number": 1, "sta', "", "[]", "null", '{"number": "one"}', '{"number": 1}']
)
def test_an_unreadable_trial_is_named_and_hides_no_other(built: StudyBuilder, text: str) -> None:
    built.measured(0)
    built.measured(2)
    torn = built.directory.trial(1).record
    torn.parent.mkdir()
    torn.write_text(text)
    study = load_study(built.directory)
    assert [row.number for row in study.rows] == [0, 2]
    (warning,) = study.warnings
    assert warning.startswith(f"{torn}: ")
    assert "\n" not in warning


def test_bytes_that_are_no_text_are_a_warning_too(built: StudyBuilder) -> None:
    torn = built.directory.trial(1).record
    torn.parent.mkdir(parents=True)
    torn.write_bytes(b"\xff\xfe\x00")
    assert str(torn) in load_study(built.directory).warnings[0]


def test_a_copied_trial_directory_is_not_counted_twice(built: StudyBuilder) -> None:
    built.measured(7)
    copy = built.directory.path / "trials" / "0007.bak" / "trial.json"
    copy.parent.mkdir()
    copy.write_text(built.directory.trial(7).record.read_text())
    study = load_study(built.directory)
    assert [row.number for row in study.rows] == [7]
    assert study.warnings == (f"{copy}: it says that it is trial 7",)


def test_trials_are_in_the_order_of_their_numbers_beyond_four_digits(built: StudyBuilder) -> None:
    built.trial(10_000, State.QUEUED)
    built.trial(9_999, State.QUEUED)
    assert [row.number for row in load_study(built.directory).rows] == [9_999, 10_000]


def test_a_rejected_trial_keeps_its_reasons_and_the_strategy_that_was_asked(built: StudyBuilder) -> None:
    built.rejected(0, "8 is not a multiple of 3")
    built.failed(1, FailureKind.CRASHED, "boom")
    rejected, failed = load_study(built.directory).rows
    a_reason = Reason(rule="a_rule", text="8 is not a multiple of 3")
    assert (rejected.strategy, rejected.reasons) == ("zero2", (a_reason,))
    assert failed.failure is not None
    assert (failed.failure.kind, failed.failure.message) == (FailureKind.CRASHED, "boom")


def test_what_is_not_finite_has_no_objective(built: StudyBuilder) -> None:
    built.measured(0, tokens_per_s_per_gpu=math.nan)
    built.measured(1, tokens_per_s_per_gpu=math.inf)
    built.measured(2, loss=math.nan)
    assert [row.objective for row in load_study(built.directory).rows] == [None, None, None]


def test_an_objective_that_no_measurement_has_is_a_warning(built: StudyBuilder) -> None:
    built.seeks(Goal(name="speed"))
    built.measured(0)
    study = load_study(built.directory)
    assert study.rows[0].objective is None
    assert "'speed'" in study.warnings[0]


def test_knobs_are_those_asked_then_those_that_only_trials_know(built: StudyBuilder) -> None:
    built.trial(0, State.QUEUED, values={"zero.stage": 1, "micro_batch": 2})
    assert load_study(built.directory).knobs == ("strategy", "micro_batch", "zero.stage")


def test_a_missing_directory_is_said_to_be_missing(tmp_path: Path) -> None:
    with pytest.raises(StudyUnreadable, match=r"no such directory: .*/nowhere"):
        load_study(StudyDir(tmp_path / "nowhere"))


def test_the_directory_of_all_studies_names_those_it_holds(built: StudyBuilder) -> None:
    with pytest.raises(StudyUnreadable, match=r"no study\.json in .*; it holds the studies demo"):
        load_study(StudyDir(built.directory.path.parent))


def test_a_torn_study_record_is_said_in_one_line(built: StudyBuilder) -> None:
    built.directory.record.write_text('{"name":\n "de')
    with pytest.raises(StudyUnreadable, match=r"^cannot read .*study\.json: [^\n]*$"):
        load_study(built.directory)


def test_a_trial_keeps_its_own_estimate_and_is_at_hand_as_it_is_on_record(built: StudyBuilder) -> None:
    built.estimated(2, an_estimate())
    built.refused(5)
    study = load_study(built.directory)
    assert [trial.number for trial in study.trials] == [row.number for row in study.rows] == [2, 5]
    assert [row.is_refused for row in study.rows] == [False, True]
    assert study.rows[0].estimate == study.trials[0].estimate == an_estimate()


def test_a_trial_that_ran_out_of_memory_was_not_refused(built: StudyBuilder) -> None:
    built.out_of_memory(0)
    built.reused(1, 0, Failure(kind=FailureKind.GPU_OOM, message="full"))
    assert [row.is_refused for row in load_study(built.directory).rows] == [False, False]
