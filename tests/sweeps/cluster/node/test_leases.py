"""An owner holds its slots as long as it lives, and no longer."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from sweeps.cluster.node.leases import LeasePool, Slot, default_directory
from sweeps.errors import ConfigError

CORES = [Slot(name=f"core-{index}", kind="CPU") for index in range(4)]
MIXED = [
    Slot(name="GPU-a", kind="H200"),
    Slot(name="GPU-b", kind="A100"),
    Slot(name="GPU-c", kind="A100"),
]
ME = os.getpid()


@pytest.fixture
def other() -> Iterator[subprocess.Popen[bytes]]:
    """Another process that lives until it is killed."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def pool(tmp_path: Path) -> LeasePool:
    return LeasePool(CORES, tmp_path)


def test_slots_are_taken_in_order_until_none_is_left(pool: LeasePool) -> None:
    assert pool.acquire(3, ME) == ("core-0", "core-1", "core-2")
    assert pool.free() == 1
    assert pool.acquire(2, ME) is None
    assert pool.acquire(1, ME) == ("core-3",)


def test_nothing_is_taken_where_there_is_not_enough(pool: LeasePool) -> None:
    assert pool.acquire(5, ME) is None
    assert pool.free() == 4


def test_released_slots_can_be_taken_again(pool: LeasePool) -> None:
    names = pool.acquire(4, ME) or ()
    pool.release(names[1:3], owners=(ME,))
    assert pool.acquire(2, ME) == ("core-1", "core-2")


def test_studies_of_one_user_see_each_others_leases(pool: LeasePool, tmp_path: Path) -> None:
    pool.acquire(3, ME)
    assert LeasePool(CORES, tmp_path).acquire(2, ME) is None


def test_a_dead_owner_holds_nothing(pool: LeasePool, other: subprocess.Popen[bytes]) -> None:
    pool.acquire(4, other.pid)
    assert pool.free() == 0
    other.kill()
    other.wait()
    assert pool.free() == 4


def test_an_owner_that_is_a_zombie_holds_nothing(pool: LeasePool, other: subprocess.Popen[bytes]) -> None:
    pool.acquire(4, other.pid)
    other.kill()
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)  # dead, not yet reaped
    assert pool.free() == 4


def test_a_reused_pid_is_another_process(pool: LeasePool, tmp_path: Path) -> None:
    pool.acquire(1, ME)
    lease = tmp_path / "leases" / "core-0.json"
    lease.write_text(f'{{"pid": {ME}, "start_ticks": 1}}')
    assert pool.free() == 4


def test_a_lease_outlives_the_orchestrator_once_it_is_handed_over(
    pool: LeasePool, other: subprocess.Popen[bytes]
) -> None:
    names = pool.acquire(2, ME) or ()
    pool.hand_over(names, other.pid)
    pool.release(names, owners=(ME,))
    assert pool.free() == 2
    pool.release(names, owners=(ME, other.pid))
    assert pool.free() == 4


def test_a_slot_that_has_gone_to_somebody_else_is_not_released(
    pool: LeasePool, other: subprocess.Popen[bytes]
) -> None:
    pool.acquire(1, other.pid)
    pool.release(["core-0", "core-1"], owners=(ME, None))
    assert pool.free() == 3


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}', '{"pid": "x", "start_ticks": 1}', "null"])
def test_an_unreadable_lease_holds_nothing(pool: LeasePool, tmp_path: Path, text: str) -> None:
    (tmp_path / "leases" / "core-0.json").write_text(text)
    assert pool.acquire(4, ME) is not None


def test_slots_of_one_trial_are_of_one_kind(tmp_path: Path) -> None:
    pool = LeasePool(MIXED, tmp_path)
    assert pool.free() == 2
    assert pool.acquire(2, ME) == ("GPU-b", "GPU-c")
    assert pool.acquire(2, ME) is None
    assert pool.acquire(1, ME) == ("GPU-a",)


def test_the_directory_is_the_users_unless_the_environment_names_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("SHARDSWEEP_STATE_DIR", raising=False)
    assert default_directory() == Path(f"/tmp/shardsweep-{os.getuid()}")
    monkeypatch.setenv("SHARDSWEEP_STATE_DIR", "/var/state")
    assert default_directory() == Path("/var/state")


def test_a_state_directory_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(ConfigError, match="only you can write to"):
        LeasePool([Slot(name="core-0", kind="CPU")], shared)


def test_a_state_directory_that_is_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="SHARDSWEEP_STATE_DIR"):
        LeasePool([Slot(name="core-0", kind="CPU")], tmp_path / "link")


def test_a_link_in_place_of_the_lock_is_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious.txt"
    precious.write_text("results")
    pool = LeasePool([Slot(name="core-0", kind="CPU")], tmp_path / "state")
    (tmp_path / "state" / "leases" / ".lock").symlink_to(precious)
    with pytest.raises(OSError):
        pool.free()
    assert precious.read_text() == "results"


def test_leases_of_other_studies_are_neighbours_and_ones_own_are_not(tmp_path: Path) -> None:
    slots = [Slot(name=f"core-{index}", kind="CPU") for index in range(3)]
    pool = LeasePool(slots, tmp_path / "state")
    ours = pool.acquire(1, os.getpid()) or ()
    assert not pool.has_others(ours)
    LeasePool(slots, tmp_path / "state").acquire(1, os.getpid())
    assert pool.has_others(ours)
