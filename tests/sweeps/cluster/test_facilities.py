"""What offload needs of a host is looked at before anything is launched."""

from __future__ import annotations

from pathlib import Path

import pytest

from sweeps.cluster import facilities
from sweeps.cluster.devices import detect
from sweeps.cluster.facilities import find_nvme, has_libaio
from sweeps.config.schema import ClusterConfig
from train_entry.contract import scratch_prefix


def test_no_directory_named_is_no_nvme() -> None:
    assert find_nvme(None) is None


def test_a_directory_shows_its_free_space(tmp_path: Path) -> None:
    found = find_nvme(str(tmp_path))
    assert found is not None
    assert (found.path, found.problem) == (str(tmp_path), None)
    assert found.free_bytes > 0


def test_what_dead_ranks_left_is_gone_before_space_is_looked_at(tmp_path: Path) -> None:
    (tmp_path / f"{scratch_prefix()}demo-1-rank0-x" / "zero_stage_3").mkdir(parents=True)
    (tmp_path / "of somebody else").mkdir()
    find_nvme(str(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["of somebody else"]


def test_a_missing_directory_says_so_and_has_no_space(tmp_path: Path) -> None:
    found = find_nvme(str(tmp_path / "nowhere"))
    assert found is not None
    assert (found.problem, found.free_bytes) == ("is not a directory", 0)


def test_a_machine_knows_its_directory(tmp_path: Path) -> None:
    machine = detect(ClusterConfig(device="cpu", nvme_path=str(tmp_path)))
    assert machine.nvme is not None
    assert machine.nvme.path == str(tmp_path)


def test_libaio_needs_its_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facilities, "LIBAIO_HEADERS", (str(tmp_path / "libaio.h"),))
    monkeypatch.setattr("ctypes.util.find_library", lambda name: f"lib{name}.so.1")
    assert not has_libaio()
    (tmp_path / "libaio.h").touch()
    assert has_libaio()
