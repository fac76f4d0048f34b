from __future__ import annotations

import dataclasses
import io
import math
from typing import Any

import pytest
from rich.console import Console

from sweeps.show.display import (
    Display,
    LiveDisplay,
    PlainDisplay,
    Reached,
    StudyProgress,
    eta_s,
    make_display,
)
from tests.support.estimates import a_refused_trial
from tests.support.examples import a_measurement, a_repeat, a_study_record, a_trial
from train_entry.contract import (
    Failure,
    FailureKind,
    Goal,
    Measurement,
    MemoryKind,
    Origin,
    Phase,
    Purpose,
    Ranking,
    Reason,
    State,
    StudyRecord,
    Trial,
)

STUDY = a_study_record()
SPEED = STUDY.goal
NOW_S = 1000.0  # the time of a plain display's clock
NONE_YET = StudyProgress(launched=0, elapsed_s=0.0)


def trial(number: int, state: State, **changes: Any) -> Trial:
    return a_trial(number=number, state=state, **changes)


def seen(speed: float, *, loss: float = 3.456, kind: MemoryKind = MemoryKind.DEVICE) -> Measurement:
    return a_measurement(
        tokens_per_s=2 * speed,
        tokens_per_s_per_gpu=speed,
        peak_bytes=1_320_702_444,  # 1.23 GiB
        memory_kind=kind,
        loss=loss,
    )


def measured(number: int, speed: float, **changes: Any) -> Trial:
    return trial(number, State.MEASURED, outcome=seen(speed), **changes)


def plain(study: StudyRecord = STUDY) -> tuple[PlainDisplay, io.StringIO]:
    """Return a started display and the stream of what it writes from now on."""
    stream = io.StringIO()
    display = PlainDisplay(stream, now_s=lambda: NOW_S)
    display.start(study)
    stream.truncate(0)
    stream.seek(0)
    return display, stream


def frame(trials: list[Trial], progress: StudyProgress, *, width: int = 120, height: int = 40) -> list[str]:
    """Return the lines of one frame of the live display."""
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=True, color_system=None)
    display = LiveDisplay(console)
    display.start(STUDY)
    display.stop()
    with console.capture() as captured:
        console.print(display.frame(trials, progress))
    return captured.get().splitlines()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_measured_trial_is_one_line_with_its_numbers() -> None:
    display, stream = plain()
    display.update([measured(3, 12_345.0)], StudyProgress(launched=1, elapsed_s=12.3))
    expected = "trial 0003 zero2 micro_batch=4: measured 12,345 tokens/s/GPU, 1.23 GiB, loss 3.456 (best)"
    assert stream.getvalue() == f"[ 12.3 s] {expected}\n"


def test_a_line_is_printed_when_a_state_changes_and_only_then() -> None:
    display, stream = plain()
    for state in (State.QUEUED, State.RUNNING, State.RUNNING, State.CANCELLED):
        display.update([trial(1, state, closed_at=NOW_S)], NONE_YET)
    assert stream.getvalue().splitlines() == [
        f"[  0.0 s] trial 0001 zero2 micro_batch=4: {state}" for state in ("queued", "running", "cancelled")
    ]


def test_a_slower_trial_is_not_called_best() -> None:
    display, stream = plain()
    display.update([measured(1, 500.0), measured(2, 400.0)], NONE_YET)
    assert [line.endswith("(best)") for line in stream.getvalue().splitlines()] == [True, False]


def test_a_study_of_times_calls_the_shortest_best_and_says_it() -> None:
    goal = Goal(name="time_to_tokens", tokens=1e9)
    display, stream = plain(a_study_record(goals=(goal,)))
    display.update([measured(1, 500.0), measured(2, 400.0)], NONE_YET)
    first, second = stream.getvalue().splitlines()
    assert first.endswith("1.23 GiB, loss 3.456, 11.6 days (best)")  # 1e9 tokens at 2 x 500 a second
    assert second.endswith("loss 3.456, 14.5 days")


def test_a_trial_of_the_baselines_or_of_a_remedy_says_so() -> None:
    display, stream = plain()
    baseline = trial(1, State.RUNNING, origin=Origin.BASELINE, baseline="zero2 x4")
    remedy = trial(2, State.RUNNING, origin=Origin.REMEDY, parent=1)
    alone = trial(3, State.RUNNING, origin=Origin.BASELINE, baseline="one GPU", is_single_gpu=True)
    display.update([baseline, remedy, alone], NONE_YET)
    said = [line.partition("zero2 micro_batch=4 ")[2] for line in stream.getvalue().splitlines()]
    assert said == [
        "(baseline): running",
        "(remedy of 0001): running",
        "(single-GPU baseline): running",
    ]
    assert "zero2 micro_batch=4 (baseline)" in frame([baseline], NONE_YET)[1]


def test_a_trial_that_is_stopped_says_what_that_spared() -> None:
    display, stream = plain()
    outcome = dataclasses.replace(seen(400.0), spared_steps=14)
    display.update([measured(0, 500.0), trial(1, State.STOPPED, outcome=outcome)], NONE_YET)
    line = stream.getvalue().splitlines()[1]
    assert line.endswith(
        "stopped 400 tokens/s/GPU, 1.23 GiB, loss 3.456: slower than the best, 14 steps skipped"
    )


def test_speeds_of_a_machine_that_has_become_slower_are_made_comparable() -> None:
    look = a_repeat(Purpose.DRIFT, outcome=a_measurement(step_s=0.25 / 0.97), ended_at=120.0)
    first = measured(1, 500.0, baseline="zero2 x4", closed_at=60.0, repeats=(look,))
    slower = measured(2, 490.0, closed_at=180.0)  # 505 at the machine's earlier speed
    lines = frame([first, slower], NONE_YET)
    assert lines[-1].endswith("best 0002: 505 tokens/s/GPU")


def test_a_trial_that_is_measured_again_shows_how_far_it_has_come() -> None:
    again = measured(1, 500.0, repeats=(a_repeat(round=1),))
    running = {1: Reached(Phase.STEPS, 12, 30)}
    assert (
        "repeat steps 12/30" in frame([again], StudyProgress(launched=1, elapsed_s=0.0, running=running))[1]
    )


def test_a_trial_whose_job_has_not_begun_says_so() -> None:
    queued = StudyProgress(launched=1, elapsed_s=0.0, waiting=frozenset({1}))
    assert "waiting to start" in frame([trial(1, State.RUNNING)], queued)[1]


def test_a_log_tells_when_a_long_wait_is_over_and_of_a_short_one_nothing() -> None:
    now_s = 0.0
    stream = io.StringIO()
    display = PlainDisplay(stream, lambda: now_s)
    long, short, cancelled = trial(1, State.RUNNING), trial(2, State.RUNNING), trial(3, State.RUNNING)
    for now_s, waiting in ((0.0, {1, 3}), (95.0, {1, 2, 3}), (100.0, set())):
        display.update(
            [long, short, cancelled], StudyProgress(launched=3, elapsed_s=now_s, waiting=frozenset(waiting))
        )
        cancelled = trial(3, State.CANCELLED) if now_s > 90 else cancelled
    waits = [line for line in stream.getvalue().splitlines() if "wait" in line]
    assert waits == ["[100.0 s] trial 0001 started after waiting 2 min"]


def test_failures_and_rejections_say_why_without_control_characters() -> None:
    display, stream = plain()
    failure = Failure(kind=FailureKind.GPU_OOM, message="rank 1:\n\x1b[31mfull\r")
    rejected = trial(
        2,
        State.REJECTED,
        created_at=NOW_S,
        reasons=(Reason(rule="a", text="a is odd"), Reason(rule="b", text="b is even")),
    )
    reused = trial(3, State.REUSED, reused_from=0, outcome=seen(500.0), closed_at=NOW_S)
    display.update([trial(1, State.INFEASIBLE, outcome=failure), rejected, reused], NONE_YET)
    assert stream.getvalue().splitlines() == [
        "[  0.0 s] trial 0001 zero2 micro_batch=4: infeasible gpu_oom: rank 1: [31mfull",
        "[  0.0 s] trial 0002 zero2 micro_batch=4: rejected: a is odd; b is even",
        "[  0.0 s] trial 0003 zero2 micro_batch=4: reused 0000 500 tokens/s/GPU, 1.23 GiB, loss 3.456",
    ]


def test_a_plan_that_is_not_launched_says_what_it_lacks_by_estimate() -> None:
    display, stream = plain()
    display.update([a_refused_trial(1), a_refused_trial(2)], NONE_YET)
    why = "needs 50.00 GiB (first_step) of 40.00 GiB, H100"
    assert stream.getvalue().splitlines() == [
        f"[  0.0 s] trial {number} zero2 micro_batch=4: not launched, estimated not to fit: {why}"
        for number in ("0001", "0002")
    ]


def test_many_plans_that_are_not_launched_at_once_are_one_line() -> None:
    display, stream = plain()
    display.update([measured(0, 5.0), *map(a_refused_trial, range(1, 13))], NONE_YET)
    line, _ = stream.getvalue().splitlines()
    example = "trial 0001 zero2 micro_batch=4: needs 50.00 GiB (first_step) of 40.00 GiB, H100"
    assert line == f"[  0.0 s] not launched: 12 plans estimated not to fit, for example {example}"


def test_the_live_table_marks_an_estimate_and_counts_what_was_not_launched() -> None:
    lines = frame([measured(0, 500.0), a_refused_trial(1), a_refused_trial(2)], NONE_YET)
    assert lines[2].split() == ["0001", "infeasible", "estimated", "zero2", "micro_batch=4", "~45.00", "GiB"]
    assert "0 trials  |  2 not launched: cannot fit  |  0 s" in lines[-1]


def test_plans_that_are_not_launched_push_no_other_out_of_the_live_table() -> None:
    trials = [measured(0, 900.0), measured(1, 5.0), *map(a_refused_trial, range(2, 40))]
    lines = frame(trials, StudyProgress(launched=2, elapsed_s=0.0))
    assert [line[2:8].strip() for line in lines[1:4]] == ["0000", "0001", "0027"]


def test_host_memory_is_told_apart() -> None:
    display, stream = plain()
    display.update([trial(0, State.MEASURED, outcome=seen(7.5, kind=MemoryKind.HOST_RSS))], NONE_YET)
    assert "measured 7.5 tokens/s/GPU, 1.23 GiB RSS, loss" in stream.getvalue()


def test_trials_that_ended_before_a_resume_are_one_line() -> None:
    display, stream = plain()
    old = [measured(0, 400.0, closed_at=10.0), measured(1, 500.0, closed_at=20.0)]
    display.update([*old, measured(2, 300.0, closed_at=NOW_S + 1)], NONE_YET)
    first, second = stream.getvalue().splitlines()
    assert first == "[  0.0 s] resumed: 2 trials had already ended; best 0001: 500 tokens/s/GPU"
    assert second.startswith("[  0.0 s] trial 0002 zero2 micro_batch=4: measured 300 tokens/s/GPU")


def test_a_message_is_one_plain_line() -> None:
    display, stream = plain()
    display.message("MLflow is away:\n[retry] later")
    assert stream.getvalue() == "[  0.0 s] MLflow is away: [retry] later\n"


def test_the_first_line_says_what_is_searched() -> None:
    stream = io.StringIO()
    PlainDisplay(stream).start(STUDY)
    expected = "study demo: tiny, by tokens_per_s_per_gpu; knobs: strategy, micro_batch"
    assert stream.getvalue() == f"[  0.0 s] {expected}\n"


def test_the_live_table_shows_each_number_in_its_column() -> None:
    lines = frame([measured(3, 12_345.0)], NONE_YET)
    assert lines[0].split() == ["trial", "state", "knobs", "tokens/s/GPU", "memory", "loss"]
    cells = ["*", "0003", "measured", "zero2", "micro_batch=4", "12,345", "1.23", "GiB", "3.456"]
    assert lines[1].split() == cells


def test_the_live_table_names_knobs_by_their_last_word() -> None:
    values = {"zero.reduce_bucket_size": 500_000_000, "zero.overlap_comm": True, "lr": None, "seed": 123_456}
    line = frame([trial(0, State.RUNNING, values=values)], NONE_YET)[1]
    assert "zero2 reduce_bucket_size=5e8 overlap_comm=true lr=null seed=123456" in line


def test_a_running_trial_shows_how_far_it_has_come() -> None:
    running = {1: Reached(Phase.STEPS, 12, 30), 2: Reached(Phase.RENDEZVOUS, 0, 30)}
    trials = [trial(number, State.RUNNING) for number in (1, 2, 3)]
    lines = frame(trials, StudyProgress(launched=3, elapsed_s=0.0, running=running))
    assert "running steps 12/30" in lines[1]
    assert "running rendezvous  " in lines[2]
    assert "running  " in lines[3]


def test_the_live_table_keeps_the_best_what_runs_and_the_latest() -> None:
    trials = [measured(0, 900.0), trial(1, State.RUNNING), *(measured(n, 1.0) for n in range(2, 40))]
    lines = frame(trials, StudyProgress(launched=40, elapsed_s=0.0))
    numbers = [line.split()[0 if line[0] == " " else 1] for line in lines[1:16]]
    assert numbers == ["0000", "0001", *(f"{number:04d}" for number in range(27, 40))]
    assert len(lines) == 1 + 15 + 2


@pytest.mark.parametrize("height", [8, 12, 24])
def test_the_live_display_fits_a_small_terminal(height: int) -> None:
    trials = [measured(number, 1.0, values={"k": "v" * 200}) for number in range(40)]
    lines = frame(trials, StudyProgress(launched=40, elapsed_s=0.0), width=70, height=height)
    assert len(lines) < height
    assert max(len(line) for line in lines) <= 70


def test_the_status_line_tells_what_is_done_what_is_left_and_what_is_best() -> None:
    trials = [measured(0, 500.0, closed_at=60.0), trial(1, State.RUNNING)]
    progress = StudyProgress(launched=2, elapsed_s=120.0, limit_trials=9, limit_s=7200.0, parallel=2)
    status = frame(trials, progress)[-1]
    assert status == "1/9 trials  |  2 min of 2.0 h  |  ETA 4 min  |  best 0000: 500 tokens/s/GPU"


def test_the_time_left_is_the_mean_of_ended_trials_for_each_that_remains() -> None:
    ended = [measured(0, 1.0, closed_at=10.0), measured(1, 1.0, closed_at=30.0)]
    free = [trial(2, State.REUSED, closed_at=500.0), trial(3, State.REJECTED, closed_at=500.0)]
    running = [trial(4, State.RUNNING)]
    progress = StudyProgress(launched=3, elapsed_s=40.0, limit_trials=10, parallel=4)
    assert eta_s([*ended, *free, *running], progress) == 20.0 * 8 / 4


def test_the_time_left_never_exceeds_the_limit_on_time() -> None:
    ended = [measured(0, 1.0, closed_at=100.0)]
    assert eta_s(ended, StudyProgress(launched=1, elapsed_s=40.0, limit_trials=10, limit_s=60.0)) == 20.0
    assert eta_s([], StudyProgress(launched=0, elapsed_s=40.0, limit_s=30.0)) == 0.0
    assert eta_s([], StudyProgress(launched=0, elapsed_s=40.0, limit_trials=10)) is None


def test_only_a_finite_measured_trial_can_be_best() -> None:
    broken = trial(2, State.MEASURED, outcome=seen(900.0, loss=math.nan))
    suspect = trial(3, State.SUSPECT, outcome=seen(900.0))
    alone = measured(5, 900.0, is_single_gpu=True)
    trials = [measured(0, 5.0), measured(1, math.nan), broken, suspect, measured(4, 5.0), alone]
    assert Ranking(trials, SPEED).best is trials[0]
    assert Ranking(trials[1:4], SPEED).best is None


def test_messages_stay_above_the_live_table_which_is_gone_at_the_end() -> None:
    stream = Terminal()
    display = LiveDisplay(Console(file=stream, width=100, height=30, force_terminal=True))
    display.start(STUDY)
    display.update([measured(0, 500.0)], NONE_YET)
    display.message("a [note]")
    display.stop()
    display.stop()
    assert "a [note]" in stream.getvalue()
    assert stream.getvalue().endswith("\x1b[1A\x1b[2K")


@pytest.mark.parametrize(
    ("stream", "term", "kind"),
    [
        (Terminal(), "xterm", LiveDisplay),
        (Terminal(), "dumb", PlainDisplay),
        (io.StringIO(), "xterm", PlainDisplay),
    ],
)
def test_a_live_table_needs_a_terminal(
    monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, term: str, kind: type[Display]
) -> None:
    monkeypatch.setenv("TERM", term)
    assert type(make_display(stream)) is kind
