"""We check what offload needs of a host before anything is launched."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from sweeps.cluster.node import facilities
from sweeps.cluster.node.devices import detect
from sweeps.cluster.node.facilities import find_nvme, has_libaio, host_memory_bytes
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


# ---------------------------------------------------------------- host memory

MEMORY = {"proc/meminfo": "MemTotal:       16777216 kB\nMemFree:         1000000 kB\n"}  # 16 GiB
GIB = 2**30
Root = Callable[[Mapping[str, str]], Path]


@pytest.fixture
def root(tmp_path: Path) -> Root:
    """A host with 16 GiB of memory whose kernel also shows the given files."""

    def write(files: Mapping[str, str]) -> Path:
        for name, text in {**MEMORY, **files}.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
        return tmp_path

    return write


def test_without_cgroups_all_of_it_counts_whatever_is_free(root: Root) -> None:
    assert host_memory_bytes(root({})) == 16 * GIB


def test_the_smallest_limit_above_a_process_binds_it(root: Root) -> None:
    files = {
        "proc/self/cgroup": "0::/system.slice/job_7/task_0\n",
        "sys/fs/cgroup/system.slice/memory.max": f"{8 * GIB}\n",
        "sys/fs/cgroup/system.slice/job_7/memory.max": f"{4 * GIB}\n",
        "sys/fs/cgroup/system.slice/job_7/task_0/memory.max": "max\n",
        "sys/fs/cgroup/system.slice/job_8/memory.max": f"{GIB}\n",
    }
    assert host_memory_bytes(root(files)) == 4 * GIB


def test_a_container_sees_its_limit_at_the_top(root: Root) -> None:
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": f"{3 * GIB}\n"}
    assert host_memory_bytes(root(files)) == 3 * GIB


def test_version_1_has_a_limit_of_its_own(root: Root) -> None:
    files = {
        "proc/self/cgroup": "5:cpu,cpuacct:/slurm\n4:memory:/slurm/job_7\n0::/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/slurm/job_7/memory.limit_in_bytes": f"{2 * GIB}\n",
    }
    assert host_memory_bytes(root(files)) == 2 * GIB


def test_version_1_in_a_container_names_a_path_that_it_does_not_have(root: Root) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/docker/abc\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{6 * GIB}\n",
    }
    assert host_memory_bytes(root(files)) == 6 * GIB


def test_no_limit_is_the_hosts_own(root: Root) -> None:
    files = {
        "proc/self/cgroup": "4:memory:/\n0::/user.slice\n",
        "sys/fs/cgroup/user.slice/memory.max": "max\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    }
    assert host_memory_bytes(root(files)) == 16 * GIB


def test_a_host_that_shows_nothing_is_not_known(tmp_path: Path) -> None:
    assert host_memory_bytes(tmp_path) is None
