"""The table of a search: goals, baselines, repeats, drift; on a terminal and as CSV."""

from __future__ import annotations

import csv
import io

import pytest
from rich.table import Table

from analysis.load import load_study
from analysis.table import render, show, write_csv
from tests.analysis.conftest import StudyBuilder, measured_again
from tests.support.examples import a_measurement, a_plan, a_rank_measurement, a_repeat
from train_entry.contract import DeviceHealth, Goal, Origin, State, TimingEnd

HOUR_OF_TOKENS = 24_690.0 * 3600  # at the example's speed
TIME = Goal(name="time_to_tokens", tokens=HOUR_OF_TOKENS)
MEMORY = Goal(name="peak_bytes")
GIB = 2**30


def shown(built: StudyBuilder) -> list[str]:
    stream = io.StringIO()
    show(load_study(built.directory), stream)
    return stream.getvalue().splitlines()


def drawn(built: StudyBuilder, *, narrow: bool = False) -> Table:
    return render(load_study(built.directory), narrow=narrow)


def cells(built: StudyBuilder, header: str) -> list[str]:
    """A column of the table, from the top."""
    columns = {str(column.header).replace("\n", " "): column for column in drawn(built).columns}
    return [str(cell) for cell in columns[header].cells]


def headers(built: StudyBuilder, *, narrow: bool = False) -> list[str]:
    return [str(column.header).replace("\n", " ") for column in drawn(built, narrow=narrow).columns]


def csv_rows(built: StudyBuilder) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(write_csv(load_study(built.directory)).read_text())))


# ---------------------------------------------------------------- goals


def test_times_are_sorted_shortest_first_and_have_a_column(built: StudyBuilder) -> None:
    built.seeks(TIME)
    built.measured(1, tokens_per_s=12_345.0)
    built.measured(2)
    assert cells(built, "trial") == ["0002", "0001"]
    assert cells(built, f"{HOUR_OF_TOKENS:.0f} tokens h") == ["1.00", "2.00"]
    assert [row["time_to_tokens_s"] for row in csv_rows(built)] == ["3600.0", "7200.0"]
    assert shown(built)[0] == f"study demo: tiny, by time_to_tokens for {HOUR_OF_TOKENS:.0f} tokens"


def test_days_are_days_for_all_rows(built: StudyBuilder) -> None:
    built.seeks(Goal(name="time_to_tokens", tokens=1e10))
    built.measured(1)  # 1e10 / 24,690 s: 4.69 days
    built.measured(2, tokens_per_s=246_900.0)
    assert cells(built, "1e10 tokens days") == ["0.47", "4.69"]


def test_cost_counts_every_gpu_of_a_plan(built: StudyBuilder) -> None:
    built.seeks(Goal(name="cost", tokens=HOUR_OF_TOKENS, price_per_gpu_hour=3.0))
    built.measured(1)  # 2 GPUs for an hour
    assert cells(built, f"{HOUR_OF_TOKENS:.0f} tokens cost") == ["6.00"]
    assert [row["cost"] for row in csv_rows(built)] == ["6.0"]


def test_the_least_memory_or_loss_comes_first_and_needs_no_column_of_its_own(built: StudyBuilder) -> None:
    built.seeks(MEMORY)
    built.measured(1, peak_bytes=3 * GIB)
    built.measured(2, peak_bytes=2 * GIB)
    assert cells(built, "peak GiB") == ["2.00", "3.00"]
    built.seeks(Goal(name="loss"))
    built.measured(1, loss=2.0)
    built.measured(2, loss=3.0)
    assert cells(built, "trial") == ["0001", "0002"]


def test_the_pareto_front_of_several_goals_is_marked_and_listed(built: StudyBuilder) -> None:
    built.seeks(TIME, MEMORY)
    built.measured(1, peak_bytes=3 * GIB)
    built.measured(2, tokens_per_s=12_345.0, peak_bytes=2 * GIB)
    built.measured(3, tokens_per_s=12_345.0, peak_bytes=4 * GIB)
    built.measured(4, state=State.SUSPECT, tokens_per_s=99_999.0, peak_bytes=GIB)
    assert cells(built, "Pareto") == ["yes", "yes", "", ""]
    lines = shown(built)
    start = lines.index(f"Pareto front of time to {HOUR_OF_TOKENS:.0f} tokens, peak memory: 2 trials")
    assert lines[start + 1 : start + 3] == [
        "  trial 0001 (zero2) micro_batch=4: 1.00 h, 3.00 GiB",
        "  trial 0002 (zero2) micro_batch=4: 2.00 h, 2.00 GiB",
    ]
    assert "Pareto: no other trial is at least as good in every goal and better in one" in "\n".join(lines)
    assert [row["pareto"] for row in csv_rows(built)] == ["true", "true", "", ""]


def test_one_goal_has_no_front(built: StudyBuilder) -> None:
    built.measured(1)
    assert "Pareto" not in headers(built)


# ---------------------------------------------------------------- where trials come from


def test_trials_of_the_baselines_and_remedies_are_marked_where_there_is_room(built: StudyBuilder) -> None:
    built.baseline(1, "zero2 x4", 500.0)
    built.measured(2, trial={"origin": Origin.REMEDY, "parent": 1}, tokens_per_s_per_gpu=400.0)
    built.measured(3, trial={"origin": Origin.PRIOR}, tokens_per_s_per_gpu=300.0)
    built.measured(4, tokens_per_s_per_gpu=200.0)
    assert cells(built, "from") == ["baseline", "remedy of 0001", "prior", "sampler"]
    assert "from" not in headers(built, narrow=True)
    first, second, *_ = csv_rows(built)
    assert (first["origin"], first["rung"]) == ("baseline", "zero2 x4")
    assert (second["origin"], second["parent"]) == ("remedy", "1")


def test_a_study_of_the_samplers_trials_alone_has_no_such_column(built: StudyBuilder) -> None:
    built.measured(1)
    assert "from" not in headers(built)


def test_a_single_gpu_baseline_stands_behind_those_measured_and_cannot_win(built: StudyBuilder) -> None:
    alone = {"origin": Origin.BASELINE, "baseline": "one GPU", "is_single_gpu": True}
    built.measured(1, tokens_per_s_per_gpu=90_000.0, plan=a_plan(ranks=1), trial=alone)
    built.measured(2)
    assert list(zip(cells(built, "#"), cells(built, "state"), strict=True)) == [
        ("1", "measured"),
        ("", "measured single-GPU baseline"),
    ]
    assert [row.style for row in drawn(built).rows] == ["bold green", "dim"]
    assert "best configuration, trial 0002: python sweep.py strategy=zero2 micro_batch=4" in shown(built)
    assert "single-GPU baseline: measures scaling; it cannot win" in "\n".join(shown(built))


# ---------------------------------------------------------------- how trials were timed


def test_a_trial_on_different_cards_says_so(built: StudyBuilder) -> None:
    cards = tuple(
        a_rank_measurement(rank=rank, device_name=name) for rank, name in enumerate(("A100", "H100"))
    )
    built.measured(1, state=State.SUSPECT, ranks=cards)
    assert cells(built, "state") == ["suspect mixed GPUs"]


def test_a_suspect_trial_says_which_limit_slowed_its_cards(built: StudyBuilder) -> None:
    health = DeviceHealth(
        clock_mhz=1410,
        max_clock_mhz=1980,
        temperature_c=87,
        power_w=600.0,
        throttled=("hw_thermal_slowdown",),
    )
    built.measured(1, state=State.SUSPECT, ranks=(a_rank_measurement(health=health),))
    assert cells(built, "state") == ["suspect hw_thermal_slowdown"]
    (row,) = csv_rows(built)
    assert (row["throttled"], row["clock_mhz"], row["temperature_c"]) == ("hw_thermal_slowdown", "1410", "87")


def test_a_trial_that_was_stopped_has_numbers_but_no_rank(built: StudyBuilder) -> None:
    built.measured(1)
    built.measured(2, state=State.STOPPED, ended=TimingEnd.FUTILE, spared_steps=14, relative_error=0.02)
    assert list(zip(cells(built, "#"), cells(built, "tokens/s /GPU"), strict=True)) == [
        ("1", "12,345"),
        ("", "12,345"),
    ]
    row = csv_rows(built)[1]
    assert (row["ended"], row["spared_steps"], row["relative_error"]) == ("futile", "14", "0.02")


def test_speeds_of_a_slower_machine_are_shown_corrected_and_marked(built: StudyBuilder) -> None:
    built.measured(1, trial=measured_again({50.0: 0.96}))
    later = {"closed_at": 60.0}
    built.measured(2, tokens_per_s=24_000.0, tokens_per_s_per_gpu=12_000.0, trial=later)
    assert cells(built, "trial") == ["0002", "0001"]
    assert cells(built, "state") == ["measured^", "measured"]
    assert cells(built, "tokens/s /GPU") == ["12,500", "12,345"]
    assert cells(built, "step ms") == ["240", "250"]
    assert [(row["tokens_per_s"], row["drift"]) for row in csv_rows(built)] == [
        ("24000.0", "0.96"),  # as measured
        ("24690.0", "1.0"),
    ]
    assert "^: speed and time are corrected for the machine's drift" in "\n".join(shown(built))


# ---------------------------------------------------------------- the confirmed


def test_the_confirmed_winner_is_on_top_with_the_mean_of_its_repeats(built: StudyBuilder) -> None:
    again = {"repeats": [a_repeat(round=1, outcome=a_measurement())] * 2}
    built.measured(1, tokens_per_s_per_gpu=500.0, trial=again)
    built.measured(2, tokens_per_s_per_gpu=510.0, trial=again)
    built.measured(3, tokens_per_s_per_gpu=505.0)
    built.confirmed((1, 503.0), (2, 498.0))
    assert cells(built, "trial") == ["0001", "0003", "0002"]
    assert cells(built, "repeats") == ["503", "", "498"]
    assert [row.style for row in drawn(built).rows] == ["bold green", "", ""]
    assert [(row["repeats"], row["confirmed"]) for row in csv_rows(built)] == [
        ("2", "503.0"),
        ("", ""),
        ("2", "498.0"),
    ]
    assert "best configuration, trial 0001: python sweep.py strategy=zero2 micro_batch=4" in shown(built)


def test_repeats_are_in_the_unit_of_their_goals_column(built: StudyBuilder) -> None:
    built.seeks(TIME)
    built.measured(1)
    built.confirmed((1, 1800.0), goal=TIME.name)
    assert cells(built, "repeats min") == ["30.0"]
    built.seeks(MEMORY)
    built.confirmed((1, 2.0 * GIB), goal=MEMORY.name)
    assert cells(built, "repeats GiB") == ["2.00"]


def test_a_narrow_terminal_does_not_explain_columns_it_has_not(built: StudyBuilder) -> None:
    built.baseline(1, "ddp", 500.0)
    built.confirmed((1, 503.0))
    wide, narrow = (str(drawn(built, narrow=is_narrow).caption) for is_narrow in (False, True))
    assert "repeats: mean of the repeated runs" in wide
    assert "repeats" not in narrow
    assert "origin of each trial: in table.csv" in narrow


@pytest.mark.parametrize("columns", ["40", "80"])
def test_the_headline_stands_above_a_table_of_any_width(
    built: StudyBuilder, monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    built.baseline(1, "ddp", 400.0)
    built.measured(2, tokens_per_s_per_gpu=500.0)
    assert shown(built)[:2] == [
        "study demo: tiny, by tokens_per_s_per_gpu",
        "the best configuration, trial 0002 (zero2), is 1.25 times as fast as the best baseline, "
        "trial 0001 (zero2) (each measured once, not confirmed)",
    ]
