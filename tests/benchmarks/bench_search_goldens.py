"""Every recorded search takes the course that it took: 123 searches in a minute."""

from __future__ import annotations

import json

from tests.benchmarks.search_goldens import GOLDENS, lines


def test_every_search_takes_the_course_that_was_recorded() -> None:
    recorded = GOLDENS.read_text(encoding="utf-8").splitlines()
    for now, then in zip(lines(), recorded, strict=True):
        assert json.loads(now) == json.loads(then)
