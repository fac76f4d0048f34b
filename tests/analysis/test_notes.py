"""The notes on plans that were not launched and on the errors of estimates."""

from __future__ import annotations

from typing import TYPE_CHECKING

from analysis.load import load_study
from analysis.notes import MAX_REFUSED, notes
from tests.support.estimates import GIB, an_estimate, too_large
from train_entry.contract import Fit

if TYPE_CHECKING:
    from tests.analysis.conftest import StudyBuilder


def below(built: StudyBuilder, *, everything: bool = False) -> list[str]:
    return [str(note) for note in notes(load_study(built.directory), everything=everything)]


def test_plans_that_were_not_launched_are_told_with_what_they_need(built: StudyBuilder) -> None:
    built.refused(1)
    assert below(built) == [
        "not launched: 1 plan estimated not to fit",
        "  GPU memory: trial 0001 (zero2): needs 50.00 GiB (first_step) of 40.00 GiB, H100",
    ]


def test_dozens_of_them_are_grouped_and_those_that_nearly_fit_stand_for_all(built: StudyBuilder) -> None:
    for number in range(24):
        built.refused(number, too_large(needed_gib=90 - number))
    built.refused(24, an_estimate(fit=Fit.TOO_LARGE, why="needs 200.00 GiB", host_bytes=200 * GIB))
    lines = below(built)
    assert lines[0] == "not launched: 25 plans estimated not to fit"
    shown = [line.split()[3] for line in lines[1:-2]]
    assert shown == ["0023", "0022", "0021"]  # 67, 68 and 69 GiB
    assert lines[-2:] == [
        f"  GPU memory: {24 - MAX_REFUSED} more that need even more: --all shows them",
        "  host memory: trial 0024 (zero2): needs 200.00 GiB",
    ]
    assert len(below(built, everything=True)) == 1 + 25


def test_what_there_is_too_little_of_is_read_off_the_numbers(built: StudyBuilder) -> None:
    built.refused(0, too_large(host_bytes=200 * GIB))
    built.refused(1, an_estimate(fit=Fit.TOO_LARGE, why="needs 9 TiB", nvme_bytes=9 * 2**40))
    built.refused(2, too_large(reservable_bytes=None))  # a CPU
    built.refused(3, too_large(host_bytes=200 * GIB, host_limit_bytes=None))  # nobody knows how much there is
    what = [line.split(":")[0].strip() for line in below(built)[1:]]
    assert what == ["GPU memory and host memory", "NVMe", "memory", "GPU memory"]


def test_a_study_ends_by_saying_how_far_estimates_were_off(built: StudyBuilder) -> None:
    built.measured(0)
    assert "estimates were off" not in "\n".join(below(built))
    built.estimated(1, an_estimate(), peak_bytes=3 * GIB, step_s=0.3)  # 10% too high, and right
    # 50% too low, 8.4% too high
    built.estimated(2, an_estimate(), peak_bytes=66 * GIB // 10, step_s=0.3 / 1.084)
    off = "median error of the estimates over 2 trials: 30% (memory), 4.2% (step time); details"
    assert f"{off}: python -m analysis calibration {built.directory.path}" in below(built)
