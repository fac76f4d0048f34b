"""`python -m analysis calibration`: what is printed, written as CSV and plotted."""

from __future__ import annotations

import csv
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from analysis.__main__ import main
from analysis.calibration.scatter import SIZE, Point, svg, ticks
from tests.analysis.conftest import StudyBuilder
from tests.support.estimates import GIB, an_estimate, too_large
from train_entry.contract import Failure, FailureKind, Fit, MemoryKind, State

OOM = Failure(kind=FailureKind.GPU_OOM, message="full")


@pytest.fixture
def report(built: StudyBuilder, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The printed lines of six measured trials, one of them borderline, and of others."""
    for number in range(6):
        values = {"strategy": "zero2", "micro_batch": number}
        said = an_estimate(observations=number, tokens_per_s_per_gpu=100.0 - number)
        built.estimated(number, said, trial={"values": values}, tokens_per_s_per_gpu=50.0 + number)
    built.estimated(6, too_large(fit=Fit.BORDERLINE), peak_bytes=50 * GIB, tokens_per_s_per_gpu=1.0)
    built.trial(7, State.INFEASIBLE, estimate=an_estimate(), outcome=OOM)
    built.refused(8, fingerprint="a")
    built.estimated(9, too_large(), trial={"fingerprint": "a", "is_shared": True}, tokens_per_s_per_gpu=2.0)
    built.refused(10, too_large(fit=Fit.BORDERLINE))
    assert main(["calibration", str(built.directory.path)]) == 0
    return capsys.readouterr().out.splitlines()


def line(report: list[str], *start: str) -> list[str]:
    """Words of the line that begins so."""
    (found,) = [words for text in report if (words := text.split())[: len(start)] == list(start)]
    return found


def test_a_row_compares_memory_and_time_of_a_trial(report: list[str]) -> None:
    memory, step = ["3.30", "3.00", "+10.0%"], ["300", "250", "+20.0%"]
    assert line(report, "0004") == ["0004", "zero2", "4", *memory, *step, "4", "fits"]


def test_a_time_taken_beside_another_trial_is_marked_and_not_compared(report: list[str]) -> None:
    assert line(report, "0009")[6:] == ["300", "250*", "0", "too", "large"]
    assert any(text.startswith("*: another trial ran on the same node at the same time") for text in report)


def test_errors_are_summed_up_by_what_estimates_had_to_go_by(report: list[str]) -> None:
    # Memory: six times 0.1, then 45 / 50 - 1 and 45 / 3 - 1. Time: seven times 0.2, one is not compared.
    assert line(report, "memory", "all")[2:] == ["8", "10.0%", "427.0%", "913.5%", "1400.0%", "+10.0%"]
    assert line(report, "memory", "from", "3", "trials", "or", "more")[6:] == ["3", *["10.0%"] * 4, "+10.0%"]
    assert line(report, "step", "time", "all")[3:] == ["7", *["20.0%"] * 4, "+20.0%"]


def test_the_lines_below_judge_the_order_and_the_gate(report: list[str]) -> None:
    # Of seven: said 100 to 95 and 10,000, seen 50 to 55 and 1: the exact opposite.
    of = "of estimated and measured tokens/s/GPU, over 7 trials (1: the same order)"
    assert report[-8:-1] == [
        f"order: rank correlation -1.00 {of}",
        "fastest: trial 0005, place 8 of 8 by the estimates: not among the first 5",
        "not launched: 2 plans estimated not to fit (1 of them borderline)",
        "refused but known to fit: 0008 (measured as 0009)",
        "ran out of memory: trial 0007; of these estimated to fit: 0007",
        "borderline, launched to learn: fitted: 0006",
        "too large by the estimate, launched at the user's request: fitted: 0009",
    ]


def test_memory_of_a_run_without_gpu_is_called_resident(
    built: StudyBuilder, capsys: pytest.CaptureFixture[str]
) -> None:
    built.estimated(0, an_estimate(), memory_kind=MemoryKind.HOST_RSS)
    main(["calibration", str(built.directory.path)])
    text = capsys.readouterr().out
    assert "RSS GiB" in text
    assert "RSS: resident memory of the fullest rank's process, since the study ran without a GPU" in text
    assert "resident memory, GiB" in (built.directory.path / "calibration.html").read_text()


def test_a_study_without_estimates_says_so(built: StudyBuilder, capsys: pytest.CaptureFixture[str]) -> None:
    built.measured(0)
    assert main(["calibration", str(built.directory.path)]) == 0
    assert capsys.readouterr().out.startswith("no trial has both an estimate and a measurement yet\n")
    assert "<svg" not in (built.directory.path / "calibration.html").read_text()


def test_the_csv_has_raw_numbers(built: StudyBuilder, tmp_path: Path) -> None:
    built.estimated(3, an_estimate(observations=2))
    path = tmp_path / "comparison.csv"
    assert main(["calibration", str(built.directory.path), "--csv", str(path)]) == 0
    with path.open(newline="") as file:
        (row,) = csv.DictReader(file)
    assert {name: row.pop(name) for name in ("peak_error", "step_error")} == {
        "peak_error": str(33 * GIB // 10 / (3 * GIB) - 1),
        "step_error": str(0.3 / 0.25 - 1),
    }
    assert list(row.items()) == [
        ("number", "3"),
        ("strategy", "zero2"),
        ("fit", "fits"),
        ("observations", "2"),
        ("memory_kind", "device"),
        ("estimated_peak_bytes", str(33 * GIB // 10)),
        ("peak_bytes", str(3 * GIB)),
        ("estimated_step_s", "0.3"),
        ("step_s", "0.25"),
        ("estimated_tokens_per_s", "20000.0"),
        ("tokens_per_s", "24690.0"),
        ("micro_batch", "4"),
        ("overrides", "strategy=zero2 micro_batch=4"),
    ]


def test_a_file_that_cannot_be_written_is_said_in_one_line(
    built: StudyBuilder, capsys: pytest.CaptureFixture[str]
) -> None:
    built.estimated(0, an_estimate())
    path = built.directory.path / "calibration.html"
    path.mkdir()
    assert main(["calibration", str(built.directory.path)]) == 1
    assert capsys.readouterr().err.startswith(f"python -m analysis: cannot write {path}: ")


def test_a_csv_makes_no_folders(
    built: StudyBuilder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    built.estimated(0, an_estimate())
    path = tmp_path / "out" / "comparison.csv"
    assert main(["calibration", str(built.directory.path), "--csv", str(path)]) == 2
    said = capsys.readouterr()
    why = f"there is no folder {path.parent}; make it, or give another"
    assert (said.out, said.err) == ("", f"python -m analysis: --csv {path}: {why}\n")
    assert not path.parent.exists()


def test_a_csv_is_no_directory(built: StudyBuilder, capsys: pytest.CaptureFixture[str]) -> None:
    built.estimated(0, an_estimate())
    path = built.directory.path / "trials"
    assert main(["calibration", str(built.directory.path), "--csv", str(path)]) == 2
    assert capsys.readouterr().err == f"python -m analysis: --csv {path}: is a directory; give a file in it\n"


# ---------------------------------------------------------------- the page


class Reader(HTMLParser):
    """Fails where a tag is closed that was not opened; collects what a page asks others for."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.opened: list[str] = []
        self.foreign: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.foreign += [f"{tag} {name}" for name, _ in attrs if name in ("src", "href", "xlink:href")]
        self.foreign += ["script"] if tag == "script" else []
        self.opened += [tag] if tag not in ("meta", "br") else []

    def handle_endtag(self, tag: str) -> None:
        assert self.opened.pop() == tag


def test_the_page_is_whole_in_itself(built: StudyBuilder) -> None:
    values = {"strategy": "zero2", "note": "<b>&"}
    built.estimated(0, an_estimate(), trial={"values": values})
    main(["calibration", str(built.directory.path)])
    text = (built.directory.path / "calibration.html").read_text()
    reader = Reader(text)
    assert (reader.opened, reader.foreign) == ([], [])
    assert "<b>&" not in text
    assert "note=&lt;b&gt;&amp;: estimated 3.30, measured 3.00 GiB (+10.0%)</title>" in text
    drawings = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert [len(list(ElementTree.fromstring(drawing).iter("circle"))) for drawing in drawings] == [1, 1]


def circles(*points: tuple[float, float]) -> list[tuple[float, float]]:
    """The positions of points, by measured and estimated values."""
    drawn = [Point(x=x, y=y, series="a", hollow=False, label="") for x, y in points]
    found = ElementTree.fromstring(svg(drawn, "ms", {"a": "red"})).iter("circle")
    return [(float(circle.get("cx", "")), float(circle.get("cy", ""))) for circle in found]


def test_a_point_lies_by_the_logarithms_of_its_values() -> None:
    # Both axes from 10 / 1.26 to 1000 x 1.26 (a twentieth of two decades more): 100 is in the middle.
    low, middle, high = circles((10, 10), (100, 100), (1000, 1000))
    assert middle == pytest.approx(((low[0] + high[0]) / 2, (low[1] + high[1]) / 2), abs=0.1)
    assert middle == pytest.approx(((58 + SIZE - 12) / 2, (12 + SIZE - 44) / 2), abs=0.1)
    assert low[0] < high[0]
    assert low[1] > high[1]  # upwards


def test_an_estimate_that_is_too_high_lies_above_the_diagonal() -> None:
    right, high = circles((100, 100), (100, 200))
    assert (right[0], right[1] > high[1]) == (high[0], True)


def test_one_point_alone_is_in_the_middle() -> None:
    assert circles((0.25, 0.25)) == [pytest.approx((233.0, 194.0), abs=0.1)]


@pytest.mark.parametrize(
    ("low", "high", "marks"),
    [
        (0.7, 250.0, [1, 10, 100]),
        (20.0, 120.0, [20, 50, 100]),
        (27.0, 90.0, [30, 40, 50, 60, 80]),
        (0.68, 0.88, [0.7, 0.8]),
    ],
)
def test_ticks_are_round_numbers(low: float, high: float, marks: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(marks)


@pytest.mark.parametrize("start", [0.013, 1.0, 3.7, 88.0, 950.0])
@pytest.mark.parametrize("ratio", [1.21, 1.5, 3.0, 20.0, 1e6, 1e12])
def test_an_axis_always_has_a_few_ticks(start: float, ratio: float) -> None:
    found = ticks(start, start * ratio)
    assert 2 <= len(found) <= 8
    assert all(start <= mark <= start * ratio * (1 + 1e-9) and math.isfinite(mark) for mark in found)
