"""The files that a dry run writes, read back."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from sweeps.config.compose import Composer
from sweeps.errors import ConfigError
from sweeps.show.dry_run import Listing
from sweeps.show.dry_run_file import require_target, write_listing
from tests.support.dry_runs import GIB, an_estimate, listed, too_large

MIXED = ("strategy=ddp,zero3", "micro_batch=1,3", "zero.prefetch_bucket_size=1e7,5e7")


@pytest.fixture
def listing(composer: Composer) -> Listing:
    """A listing of one plan that fits, two that do not, and three rejected points."""
    return listed(
        composer,
        *MIXED,
        estimate=lambda plan: an_estimate() if plan.strategy == "ddp" else too_large(12.0, phase="step"),
        basis="by hand",
    )


def csv_rows(listing: Listing, path: Path) -> list[dict[str, str]]:
    write_listing(listing, path)
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def document(listing: Listing, path: Path) -> dict[str, Any]:
    write_listing(listing, path)
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_csv_has_a_row_a_legal_plan_in_bytes_and_seconds(listing: Listing, tmp_path: Path) -> None:
    first, *others = csv_rows(listing, tmp_path / "plans.csv")
    assert first["number"] == "1"
    assert (first["strategy"], first["micro_batch"], first["zero.prefetch_bucket_size"]) == ("ddp", "1", "")
    assert (first["verdict"], first["why"]) == ("fits", "")
    assert int(first["peak_bytes"]) == int(8.5 * GIB)
    assert int(first["needed_bytes"]) == 9 * GIB
    assert int(first["limit_bytes"]) == 10 * GIB
    assert float(first["step_s"]) == 0.25
    assert float(first["tokens_per_s_per_gpu"]) == 2000.0
    assert int(first["component_moments_bytes"]) == GIB
    assert float(first["part_forward_s"]) == 0.1
    assert first["overrides"] == "strategy=ddp micro_batch=1"
    assert [row["verdict"] for row in others] == ["too_large", "too_large"]
    assert others[0]["why"] == "needs 12.00 GiB (loss) of 10.00 GiB, a card"


def test_json_has_the_same_rows_and_the_rejections(listing: Listing, tmp_path: Path) -> None:
    found = document(listing, tmp_path / "plans.json")
    rows = csv_rows(listing, tmp_path / "plans.csv")
    assert [list(plan) for plan in found["plans"]] == [list(row) for row in rows]
    assert found["plans"][0]["peak_bytes"] == int(8.5 * GIB)
    assert found["plans"][0]["zero.prefetch_bucket_size"] is None
    (rejection,) = found["rejections"]
    assert (rejection["rule"], rejection["count"]) == ("batches_divide", 3)
    assert "micro_batch=3" in rejection["example"]
    assert (found["looked_at"], found["legal"], found["rejected"], found["estimates"]) == (6, 3, 3, "by hand")


def test_components_of_a_row_sum_to_its_peak(composer: Composer, tmp_path: Path) -> None:
    rows = csv_rows(listed(composer, "strategy=zero1,zero3", "micro_batch=1,2"), tmp_path / "plans.csv")
    sums = [sum(int(text) for name, text in row.items() if name.startswith("component_")) for row in rows]
    assert sums == [int(row["peak_bytes"]) for row in rows]


def test_a_limit_that_nobody_knows_is_blank(composer: Composer, tmp_path: Path) -> None:
    listing = listed(composer, "strategy=zero1", "micro_batch=1,2")
    assert csv_rows(listing, tmp_path / "plans.csv")[0]["limit_bytes"] == ""
    assert document(listing, tmp_path / "plans.json")["plans"][0]["limit_bytes"] is None


def test_a_list_of_nothing_has_a_head_and_its_rejections(composer: Composer, tmp_path: Path) -> None:
    listing = listed(composer, "strategy=zero1", "micro_batch=3,5")
    assert csv_rows(listing, tmp_path / "plans.csv") == []
    assert document(listing, tmp_path / "plans.json")["rejections"][0]["count"] == 2


def test_an_older_file_is_replaced(listing: Listing, tmp_path: Path) -> None:
    path = tmp_path / "plans.json"
    path.write_text("old")
    assert document(listing, path)["legal"] == 3
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["plans.txt", "plans", "plans.xlsx"])
def test_another_suffix_is_one_line_that_says_what_would_do(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        require_target(tmp_path / name)
    assert str(refused.value) == f"dry_run_to={tmp_path / name}: give a file that ends in .csv or .json"


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no folder .*gone; make it, or give another"):
        require_target(tmp_path / "gone" / "plans.csv")


def test_a_folder_in_the_place_of_the_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "plans.csv").mkdir()
    with pytest.raises(ConfigError, match="is a directory; give a file in it"):
        require_target(tmp_path / "plans.csv")


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)  # a superuser may write anywhere
    with pytest.raises(ConfigError, match="cannot be written; give another"):
        require_target(tmp_path / "plans.csv")
