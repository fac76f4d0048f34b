"""The text form of a goal and of its values."""

from __future__ import annotations

import pytest

from train_entry.contract import GIB, GOALS, Goal
from train_entry.contract.study.goal_text import (
    goal_number,
    goal_text,
    goal_words,
    time_unit,
)


@pytest.mark.parametrize(
    ("name", "value", "text", "number"),
    [
        ("tokens_per_s", 41_230.4, "41,230 tokens/s", "41,230"),
        ("tokens_per_s_per_gpu", 7.5, "7.50 tokens/s/GPU", "7.50"),
        ("time_to_tokens", 90.0, "1.50 min", "1.50 min"),
        ("time_to_tokens", 7200.0, "2.00 h", "2.00 h"),
        ("time_to_tokens", 864_000.0, "10.0 days", "10.0 days"),
        ("peak_bytes", 12.34 * GIB, "12.3 GiB", "12.3 GiB"),
        ("loss", 3.25, "loss 3.250", "3.250"),
        ("cost", 1234.5, "cost 1,234", "1,234"),
    ],
)
def test_a_value_is_written_in_its_unit(name: str, value: float, text: str, number: str) -> None:
    goal = Goal(name=name, tokens=1e9)
    assert (goal_text(goal, value), goal_number(goal, value)) == (text, number)


def test_every_goal_has_words() -> None:
    words = [goal_words(Goal(name=name, tokens=1e9)) for name in GOALS]
    assert not set(words) & (set(GOALS) - {"loss"})
    assert "time to 1e9 tokens" in words


def test_the_longest_time_names_the_unit() -> None:
    assert [time_unit(times)[0] for times in ([], [59.0], [1.0, 61.0], [3600.0], [3 * 86_400.0])] == [
        "s",
        "s",
        "min",
        "h",
        "days",
    ]
