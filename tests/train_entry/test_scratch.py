from __future__ import annotations

import errno
import fcntl
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sweeps.plan.ds_config import deepspeed_config
from tests.support.examples import a_plan
from train_entry.contract import Offload, OffloadPlan, delete_abandoned_scratch, lock_scratch, scratch_prefix
from train_entry.scratch import own_nvme_path

KILLED = """
import os, signal, sys
from train_entry.scratch import own_nvme_path
config = {"zero_optimization": {"offload_param": {"nvme_path": sys.argv[1]}}}
with own_nvme_path(config, "killed"):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def nvme_config(root: Path) -> dict[str, Any]:
    offload = OffloadPlan(optimizer=Offload.NVME, param=Offload.NVME, nvme_path=str(root))
    return deepspeed_config(a_plan(zero={"stage": 3}, offload=offload))


def paths(config: dict[str, Any]) -> set[Path]:
    zero = config["zero_optimization"]
    return {Path(zero[section]["nvme_path"]) for section in ("offload_optimizer", "offload_param")}


def raise_os_error(code: int) -> bool:
    raise OSError(code, os.strerror(code))


def test_two_ranks_write_to_directories_of_their_own(tmp_path: Path) -> None:
    given = nvme_config(tmp_path)
    with own_nvme_path(given, "demo-1-rank0") as one, own_nvme_path(given, "demo-1-rank1") as two:
        assert len(paths(one)) == len(paths(two)) == 1
        assert sorted(tmp_path.iterdir()) == sorted(paths(one) | paths(two))
    assert paths(given) == {tmp_path}


def test_what_was_written_is_gone_even_after_a_failure(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), own_nvme_path(nvme_config(tmp_path), "demo") as config:
        (paths(config).pop() / "zero_stage_3").mkdir()
        raise RuntimeError("out of memory")
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_rank_left_is_deleted_by_the_next(tmp_path: Path) -> None:
    (tmp_path / "of somebody else").mkdir()
    assert subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)]).returncode < 0
    assert len(list(tmp_path.iterdir())) == 2
    with own_nvme_path(nvme_config(tmp_path), "demo"):
        names = sorted(path.name for path in tmp_path.iterdir())
    assert (
        len(names) == 2 and names[0] == "of somebody else" and names[1].startswith(f"{scratch_prefix()}demo-")
    )


def test_only_what_nobody_holds_is_deleted(tmp_path: Path) -> None:
    held, abandoned = (tmp_path / f"{scratch_prefix()}demo-{name}" for name in ("held", "abandoned"))
    held.mkdir()
    (abandoned / "zero_stage_3").mkdir(parents=True)
    lock = lock_scratch(held)
    assert lock is not None
    delete_abandoned_scratch(tmp_path)
    assert list(tmp_path.iterdir()) == [held]
    os.close(lock)


def test_directories_of_other_hosts_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = socket.gethostname()
    for host in ("another-host", f"{here}-2"):
        monkeypatch.setattr(socket, "gethostname", lambda host=host: host)
        (tmp_path / f"{scratch_prefix()}demo").mkdir()
    monkeypatch.setattr(socket, "gethostname", lambda: here)
    with own_nvme_path(nvme_config(tmp_path), "demo"):
        assert len(list(tmp_path.iterdir())) == 3
    assert len(list(tmp_path.iterdir())) == 2


def test_a_disk_that_is_not_there_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match=r"nvme_path: .*absent on .*: No such file or directory; give a"),
        own_nvme_path(nvme_config(tmp_path / "absent"), "demo"),
    ):
        pass


def test_a_disk_without_direct_io_is_refused_and_left_clean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: object, flags: int, *others: Any, opened: Any = os.open, **named: Any) -> int:
        direct = flags & os.O_DIRECT
        return -1 if direct and raise_os_error(errno.EINVAL) else opened(path, flags, *others, **named)

    monkeypatch.setattr(os, "open", refuse)
    with (
        pytest.raises(ValueError, match=r"nvme_path: .*: Invalid argument; give a directory on a local disk"),
        own_nvme_path(nvme_config(tmp_path), "demo"),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("code", [errno.EBADF, errno.ENOLCK])
def test_a_disk_without_locks_is_refused_and_leaks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda handle, operation: raise_os_error(code))
    before = os.listdir("/proc/self/fd")
    with (
        pytest.raises(ValueError, match=f"nvme_path: .*: {os.strerror(code)}; give a directory"),
        own_nvme_path(nvme_config(tmp_path), "demo"),
    ):
        pass
    delete_abandoned_scratch(tmp_path)  # raises nothing
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == len(before)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_a_disk_that_takes_no_directory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    monkeypatch.setattr("tempfile.mkdtemp", lambda prefix, dir: raise_os_error(code))
    with (
        pytest.raises(ValueError, match=f"nvme_path: .*: {os.strerror(code)}; give a directory"),
        own_nvme_path(nvme_config(tmp_path), "demo"),
    ):
        pass


def test_a_plan_without_nvme_is_left_as_it_is() -> None:
    config = deepspeed_config(a_plan())
    with own_nvme_path(config, "demo") as same:
        assert same == config
