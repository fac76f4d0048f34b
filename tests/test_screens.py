"""Compare every screen with its recording, so that no screen changes by accident."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from sweeps.config.compose import register_resolvers
from tests.support.paths import DATA, ROOT
from tests.support.screens import extract_studies, screens_of
from tests.sweeps.conftest import composer_on

SCREENS = DATA / "screens"


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """All screens by name."""
    os.environ["COLUMNS"] = "200"
    studies = extract_studies(tmp_path_factory.mktemp("recorded") / "studies")
    yield {name: make() for name, make in screens_of(studies, composer_on(ROOT / "conf"))}
    del os.environ["COLUMNS"]
    register_resolvers(lambda: False)


def test_every_screen_is_as_it_was_recorded(seen: dict[str, str]) -> None:
    if os.environ.get("SHARDSWEEP_WRITE_SCREENS"):
        for old in SCREENS.glob("*.txt"):
            old.unlink()
        for name, text in seen.items():
            (SCREENS / f"{name}.txt").write_text(text, encoding="utf-8")
    recorded = {path.stem: path.read_text(encoding="utf-8") for path in SCREENS.glob("*.txt")}
    assert set(seen) == set(recorded)
    assert [name for name, text in seen.items() if recorded[name] != text] == []
