"""A few recorded searches take the course that they took; `make bench` replays all of them."""

from __future__ import annotations

import json

import pytest

from tests.benchmarks.search_goldens import GOLDENS, SEEDS, Search, course_line, searches
from tests.benchmarks.simulator.tables import recorded_tables

# Each method once, each on another table than the method before it.
SOME = [(method, list(recorded_tables())[at % len(recorded_tables())], 0) for at, method in enumerate(SEEDS)]


@pytest.mark.parametrize("search", SOME, ids=lambda search: f"{search[0].strip()} on {search[1]}")
def test_a_search_takes_the_course_that_was_recorded(search: Search) -> None:
    recorded = dict(zip(searches(), GOLDENS.read_text(encoding="utf-8").splitlines(), strict=True))
    assert json.loads(course_line(search)) == json.loads(recorded[search])
