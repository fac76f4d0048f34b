"""The text form of numbers, sizes and values."""

from __future__ import annotations

import pytest

from train_entry.contract import GIB, KIB, MIB, Scalar, digits, gib, short, size_text, typed


def test_small_and_large_numbers_keep_about_three_digits() -> None:
    numbers = (0.001234, 0.5, 5.5, 55.55, 555.5, 55_555.5)
    assert [digits(number) for number in numbers] == ["0.00123", "0.50", "5.50", "55.5", "556", "55,556"]


def test_gib_are_written_without_their_unit() -> None:
    assert [gib(size) for size in (0, GIB // 2, 1234.5 * GIB)] == ["0.00", "0.50", "1,234.50"]


def test_a_size_has_the_unit_that_suits_it() -> None:
    sizes = (0, -5, 512, 3 * KIB, 500 * MIB, 12.34 * GIB)
    assert [size_text(size) for size in sizes] == [
        *("nothing", "nothing", "0.50 KiB", "3.00 KiB", "500 MiB", "12.3 GiB")
    ]


@pytest.mark.parametrize(
    ("value", "for_commands", "for_people"),
    [
        (None, "null", "null"),
        (True, "true", "true"),
        ("cpu", "cpu", "cpu"),
        (8, "8", "8"),
        (1.0, "1.0", "1"),
        (0.0003, "0.0003", "0.0003"),
        (5e8, "500000000.0", "5e8"),
        (2.5e10, "25000000000.0", "2.5e10"),
        (100_000, "100000", "1e5"),
        (123_456.0, "123456.0", "123456"),
        (5000.0, "5000.0", "5000"),
    ],
)
def test_a_value_keeps_every_digit(value: Scalar, for_commands: str, for_people: str) -> None:
    assert (typed(value), short(value)) == (for_commands, for_people)
