from __future__ import annotations

import csv
import io
import math
import os
import pty
import re
import select
from typing import TYPE_CHECKING

import pytest

from analysis.__main__ import main
from analysis.columns import UnknownColumn
from analysis.load import load_study
from analysis.table import MAX_ROWS, render, show, write_csv
from tests.support.examples import a_plan
from train_entry.contract import FailureKind, MemoryKind, State

if TYPE_CHECKING:
    from tests.analysis.conftest import StudyBuilder

CSV_HEADER = (
    "number,state,failure,origin,strategy,tokens_per_s,tokens_per_s_per_gpu,step_s,peak_bytes,loss,gpu_s,"
    "rung,parent,yardstick,steps,ended,spared_steps,relative_error,drift,throttled,clock_mhz,temperature_c,"
    "repeats,confirmed,time_to_tokens_s,cost,pareto,micro_batch,overrides"
)


def shown(built: StudyBuilder, *, sort: str | None = None, everything: bool = False) -> str:
    stream = io.StringIO()
    show(load_study(built.directory), stream, sort=sort, everything=everything)
    return stream.getvalue()


def cells(built: StudyBuilder) -> list[dict[str, str]]:
    """Rows of the rendered table, by the names in its header."""
    table = render(load_study(built.directory))
    names = [str(column.header).replace("\n", " ") for column in table.columns]
    return [
        dict(zip(names, (str(cell) for cell in row), strict=True))
        for row in zip(*(column.cells for column in table.columns), strict=True)
    ]


def csv_rows(built: StudyBuilder) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(write_csv(load_study(built.directory)).read_text())))


def test_each_number_stands_under_its_own_header(built: StudyBuilder) -> None:
    built.measured(3, mfu=0.412)
    built.trial(4, State.RUNNING, values={"strategy": "zero2", "micro_batch": 2})
    assert cells(built)[0] == {
        "#": "1",
        "trial": "0003",
        "state": "measured",
        "strategy": "zero2",
        "micro_ batch": "4",
        "tokens/s /GPU": "12,345",
        "±": "2.0%",
        "tokens/s": "24,690",
        "step ms": "250",
        "peak GiB": "3.00",
        "loss": "5.500",
        "MFU": "41.2%",
        "GPU-s": "20.0",
    }


def test_a_knob_that_has_one_value_and_an_mfu_nobody_knows_have_no_column(built: StudyBuilder) -> None:
    built.measured(0)
    built.measured(1)
    assert not {"micro_ batch", "MFU"} & set(cells(built)[0])


def test_the_best_row_stands_out_and_only_trials_that_can_win_have_a_rank(built: StudyBuilder) -> None:
    built.measured(0, tokens_per_s_per_gpu=10.0)
    built.measured(1, tokens_per_s_per_gpu=math.nan)
    built.measured(2, tokens_per_s_per_gpu=30.0)
    built.measured(3, state=State.SUSPECT, tokens_per_s_per_gpu=99.0)
    table = render(load_study(built.directory))
    assert [(row["#"], row["trial"]) for row in cells(built)] == [
        ("1", "0002"),
        ("2", "0000"),
        ("", "0001"),
        ("", "0003"),
    ]
    assert [row.style for row in table.rows] == ["bold green", "", "", ""]


def test_the_state_tells_why_a_trial_failed_and_whose_numbers_it_shows(built: StudyBuilder) -> None:
    built.measured(0)
    built.reused(1, 0)
    built.failed(2, FailureKind.GPU_OOM, "rank 1 needs 9 GiB more", State.INFEASIBLE)
    built.refused(3)
    built.failed(4, FailureKind.HUNG, "silent for 60 s")
    states = [row["state"] for row in cells(built)]
    assert states == ["measured", "reused 0000", "infeasible gpu_oom", "infeasible estimated", "failed hung"]
    assert cells(built)[1]["tokens/s"] == "24,690"


def test_memory_of_a_trial_that_was_not_launched_is_marked_as_estimated(built: StudyBuilder) -> None:
    built.measured(0)
    assert "~ is estimated" not in shown(built)
    built.refused(1)
    assert [(row["state"], row["peak GiB"], row["step ms"]) for row in cells(built)] == [
        ("measured", "3.00", "250"),
        ("infeasible estimated", "~45.0", ""),
    ]
    assert "~: estimated; the trial was not launched, because it cannot fit" in shown(built)
    assert [row["peak_bytes"] for row in csv_rows(built)] == [str(3 * 2**30), ""]


def test_host_memory_is_not_called_peak_memory_of_a_gpu(built: StudyBuilder) -> None:
    built.measured(0, memory_kind=MemoryKind.HOST_RSS)
    assert cells(built)[0]["RSS GiB"] == "3.00"
    assert "RSS: resident memory" in shown(built)


def test_gpu_time_is_in_hours_once_a_trial_took_one(built: StudyBuilder) -> None:
    built.measured(0, gpu_s=1800.0)
    built.measured(1, gpu_s=5400.0)
    assert [row["GPU-h"] for row in cells(built)] == ["0.50", "1.50"]
    assert "GPU-hours: 2 spent" in shown(built)


def test_a_timing_taken_beside_another_trial_is_marked(built: StudyBuilder) -> None:
    built.measured(0, trial={"is_shared": True})
    assert cells(built)[0]["state"] == "measured*"
    assert "*: another trial ran on the same node at the same time" in shown(built)


def test_the_caption_says_what_the_loss_is_compared_at_and_counts_states(built: StudyBuilder) -> None:
    built.measured(0)
    built.losses(0, [4.0] * 8)
    built.rejected(1, "no")
    built.measured(2, tokens=9000)
    text = shown(built)
    assert "loss: mean of the last 5 steps up to 8,000 tokens" in text
    assert "trials: 2 measured, 1 rejected" in text
    assert "GPU-hours: 0.011 spent" in text
    assert "±: interquartile range" in text


def test_rejections_are_grouped_and_failures_told_one_by_one(built: StudyBuilder) -> None:
    built.rejected(0, "[8] is not divided by 3", "no such stage")
    built.rejected(1, "[8] is not divided by 3")
    built.failed(2, FailureKind.CRASHED, "first line\nsecond \x1b[31mline")
    lines = shown(built).splitlines()
    assert "rejected (2): [8] is not divided by 3" in lines
    assert "rejected (1): no such stage" in lines
    assert "failed trial 0002: crashed: first line second [31mline" in lines


def test_rejected_trials_are_in_the_table_only_when_everything_is_asked_for(built: StudyBuilder) -> None:
    built.rejected(5, "no")
    assert "0005" not in shown(built)
    assert "not shown: 1 of 1 trials" in shown(built)
    assert "0005" in shown(built, everything=True)
    assert "--all" not in shown(built, everything=True)


def test_a_long_study_is_cut_to_its_best_and_says_so(built: StudyBuilder) -> None:
    for number in range(MAX_ROWS + 3):
        built.measured(number, tokens_per_s_per_gpu=float(number))
    assert len(cells(built)) == MAX_ROWS
    assert cells(built)[0]["trial"] == f"{MAX_ROWS + 2:04d}"
    assert f"not shown: 3 of {MAX_ROWS + 3} trials" in shown(built)


def test_the_command_of_the_best_trial_can_be_pasted(built: StudyBuilder) -> None:
    built.trial(0, State.QUEUED)
    assert "python sweep.py" not in shown(built)
    built.measured(1)
    command = "python sweep.py strategy=zero2 micro_batch=4"
    assert f"best configuration, trial 0001: {command}" in shown(built).splitlines()


def test_an_unreadable_trial_is_a_warning_below_the_table(built: StudyBuilder) -> None:
    built.measured(0)
    torn = built.directory.trial(1).record
    torn.parent.mkdir()
    torn.write_text("{")
    text = shown(built)
    assert f"warning: {torn}: " in text
    assert "24,690" in text


def test_a_study_without_trials_has_an_empty_table(built: StudyBuilder) -> None:
    assert "trials: none yet" in shown(built)
    assert "GPU-hours: 0 spent" in shown(built)
    assert csv_rows(built) == []


def test_a_knob_is_written_as_one_would_type_it_and_below_a_stacked_name(built: StudyBuilder) -> None:
    knob = "zero.reduce_bucket_size"
    built.trial(0, State.QUEUED, values={knob: 500_000_000, "zero.overlap_comm": True, "lr": 0.0003})
    built.trial(1, State.QUEUED, values={knob: 123_456, "zero.overlap_comm": False, "lr": None})
    stacked = "zero. reduce_ bucket_ size"
    assert [row[stacked] for row in cells(built)] == ["5e8", "123456"]
    assert [row["zero. overlap_ comm"] for row in cells(built)] == ["true", "false"]
    assert [row["lr"] for row in cells(built)] == ["0.0003", ""]


def test_csv_has_exactly_the_columns_that_other_programs_rely_on(built: StudyBuilder) -> None:
    built.measured(3)
    path = write_csv(load_study(built.directory))
    assert path == built.directory.path / "table.csv"
    assert path.read_text().splitlines() == [
        CSV_HEADER,
        "3,measured,,sampler,zero2,24690.0,12345.0,0.25,3221225472,5.5,20.0,"
        ",,,10,cap,0,,1.0,,,,,,,,,4,strategy=zero2 micro_batch=4",
    ]


def test_csv_is_in_the_order_of_the_table(built: StudyBuilder) -> None:
    built.trial(0, State.RUNNING)
    built.measured(1, tokens_per_s_per_gpu=5.0)
    built.measured(2, tokens_per_s_per_gpu=50.0)
    assert [row["number"] for row in csv_rows(built)] == ["2", "1", "0"]


def test_csv_leaves_blank_what_is_not_known(built: StudyBuilder) -> None:
    built.failed(0, FailureKind.HUNG, "silent for 60 s")
    (row,) = csv_rows(built)
    assert (row["state"], row["failure"]) == ("failed", "hung")
    assert [row[name] for name in ("tokens_per_s", "tokens_per_s_per_gpu", "step_s", "loss")] == [""] * 4


def test_csv_quotes_overrides_for_a_shell(built: StudyBuilder) -> None:
    built.trial(0, State.QUEUED, overrides=("data.path=/my data", "note='a,b'"))
    (row,) = csv_rows(built)
    assert row["overrides"] == """'data.path=/my data' 'note='"'"'a,b'"'"''"""


def test_csv_leaves_no_other_file_behind_and_replaces_the_old_one(built: StudyBuilder) -> None:
    built.measured(0)
    write_csv(load_study(built.directory))
    built.measured(1)
    assert len(csv_rows(built)) == 2
    assert {path.name for path in built.directory.path.iterdir()} == {"study.json", "trials", "table.csv"}


@pytest.mark.parametrize(
    ("column", "order"),
    [("tokens_per_s", ["0001", "0000", "0002"]), ("peak_bytes", ["0000", "0001", "0002"])],
)
def test_throughput_sorts_largest_first_and_memory_smallest_first(
    built: StudyBuilder, column: str, order: list[str]
) -> None:
    built.measured(0, tokens_per_s=10.0, peak_bytes=10)
    built.measured(1, tokens_per_s=20.0, peak_bytes=20)
    built.trial(2, State.RUNNING)  # not known: last
    found = re.findall(r"^ *\d* +(\d{4}) ", shown(built, sort=column), re.M)
    assert found == order


def test_an_unknown_column_is_refused_with_those_there_are(built: StudyBuilder) -> None:
    with pytest.raises(UnknownColumn, match=r"no column 'speed'; sort by one of: number, .*micro_batch"):
        render(load_study(built.directory), sort="speed")


def test_a_file_gets_lines_of_full_width_and_no_control_characters(built: StudyBuilder) -> None:
    values = {f"knob_{number}": "x" * 30 + str(number) for number in range(10)}
    built.trial(0, State.QUEUED, values=values)
    text = shown(built)
    assert all(value in text for value in values.values())
    assert "\x1b" not in text


def on_terminal(built: StudyBuilder) -> str:
    main_end, other_end = pty.openpty()
    chunks: list[bytes] = []
    with os.fdopen(other_end, "w") as stream:
        show(load_study(built.directory), stream)
        stream.flush()
        while select.select([main_end], [], [], 0.2)[0]:  # a terminal hands over what it has, bit by bit
            chunks.append(os.read(main_end, 65536))
    os.close(main_end)
    return b"".join(chunks).decode()


@pytest.mark.parametrize("columns", ["30", "60", "80"])
def test_a_narrow_terminal_cuts_off_no_number_and_says_what_it_leaves_out(
    built: StudyBuilder, monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setenv("TERM", "xterm")
    built.measured(0)
    built.trial(1, State.RUNNING, values={"micro_batch": 2, "zero.overlap_comm": True, "lr": 0.0003})
    text = on_terminal(built)
    assert all(number in text for number in ("12,345", "2.0%", "3.00", "5.500", "0.0003"))
    assert "24,690" not in text
    assert "in table.csv" in " ".join(text.split())


def test_a_terminal_has_the_best_row_in_colour(built: StudyBuilder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    built.measured(0)
    text = on_terminal(built)
    assert "\x1b[1;32mmeasured" in text
    assert "24,690" in text


def test_the_command_prints_the_table_and_writes_the_csv(
    built: StudyBuilder, capsys: pytest.CaptureFixture[str]
) -> None:
    built.measured(0)
    assert main(["table", str(built.directory.path), "--sort", "loss", "--all"]) == 0
    assert "12,345" in capsys.readouterr().out
    assert built.directory.table.read_text().startswith(CSV_HEADER)


def test_the_command_says_in_one_line_what_it_cannot_find(
    built: StudyBuilder, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(built.directory.path)
    for arguments, message in (
        (["table", f"{path}/nowhere"], f"no such directory: {path}/nowhere"),
        (["table", f"{path}/.."], f"no study.json in {path}/..; it holds the studies demo"),
        (["table", path, "--sort", "speed"], "no column 'speed'; sort by one of: number, state"),
    ):
        assert main(arguments) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1)
        assert err.startswith(f"python -m analysis: {message}")


def test_a_directory_that_may_not_be_written_still_shows_its_table(
    built: StudyBuilder, capsys: pytest.CaptureFixture[str]
) -> None:
    built.measured(0)
    built.directory.table.mkdir()
    assert main(["table", str(built.directory.path)]) == 1
    out, err = capsys.readouterr()
    assert "12,345" in out
    assert err.startswith(f"python -m analysis: cannot write {built.directory.table}: ")


def test_a_loss_that_lags_by_deepspeeds_doing_is_said_to(built: StudyBuilder) -> None:
    built.measured(1)
    built.measured(2, plan=a_plan(zero={"stage": 0}))
    text = shown(built)
    assert "the loss of trial 0002 (zero0) is behind: in bf16 without ZeRO, DeepSpeed's first update" in text


def test_without_another_to_compare_with_it_is_not(built: StudyBuilder) -> None:
    built.measured(2, plan=a_plan(zero={"stage": 0}))
    assert "lags" not in shown(built)
