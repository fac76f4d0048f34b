"""A real supervisor, over a rank that only sleeps, does what a rank cannot once it is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sweeps.cluster.node.rendezvous import RankPlace
from sweeps.cluster.node.supervisor import rank_environment
from tests.support.examples import a_plan, a_trial_spec
from train_entry.contract import (
    AttemptDir,
    ExitReason,
    Offload,
    OffloadPlan,
    RankExit,
    dump,
    load,
    scratch_prefix,
    write_atomic,
)

SUPERVISE = """
import sys
from sweeps.cluster.node.supervisor import supervise
sys.executable = sys.argv[2]
supervise(sys.argv[1])
"""
# It holds a directory on the given disk, as a rank that offloads to it does.
RANK = """
import sys, time
from train_entry.scratch import own_nvme_path
with own_nvme_path({"zero_optimization": {"offload_param": {"nvme_path": sys.argv[1]}}}, "demo-1-rank0"):
    time.sleep(60)
"""
PLACE = {
    "SUBMITIT_EXECUTOR": "local",
    "SUBMITIT_LOCAL_JOB_ID": "1",
    "SUBMITIT_LOCAL_NTASKS": "1",
    "SUBMITIT_LOCAL_GLOBALID": "0",
    "SUBMITIT_LOCAL_LOCALID": "0",
}


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    (tmp_path / "disk").mkdir()
    return tmp_path / "disk"


@pytest.fixture
def attempt(tmp_path: Path, disk: Path) -> AttemptDir:
    found = AttemptDir(tmp_path / "attempt-1")
    offload = OffloadPlan(param=Offload.NVME, nvme_path=str(disk))
    write_atomic(found.spec, dump(a_trial_spec(plan=a_plan(ranks=1, offload=offload))))
    return found


@pytest.fixture
def supervisor(tmp_path: Path, attempt: AttemptDir, disk: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The supervisor of rank 0, whose rank sleeps and holds a directory of its own on the disk."""
    (tmp_path / "rank.py").write_text(RANK)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{tmp_path}/rank.py" "{disk}"\n')
    python.chmod(0o755)
    environment = {**os.environ, **PLACE, "PYTHONPATH": str(Path.cwd())}
    command = [sys.executable, "-c", SUPERVISE, str(attempt.path), str(python)]
    with subprocess.Popen(command, env=environment, start_new_session=True) as process:
        yield process
        process.kill()


def wait_for_directory(disk: Path, within_s: float = 60.0) -> list[str]:
    deadline = time.monotonic() + within_s
    while not list(disk.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return [path.name for path in disk.iterdir()]


def test_what_a_killed_rank_wrote_is_deleted_after_it(
    supervisor: subprocess.Popen[bytes], attempt: AttemptDir, disk: Path
) -> None:
    assert [name.startswith(scratch_prefix()) for name in wait_for_directory(disk)] == [True]
    supervisor.send_signal(signal.SIGTERM)
    assert supervisor.wait(timeout=60) == 0
    ended = load(RankExit, attempt.exit(0).read_text())
    assert (ended.reason, ended.returncode) == (ExitReason.CANCELLED, -signal.SIGKILL)
    assert list(disk.iterdir()) == []


@pytest.mark.parametrize(("said", "threads"), [("3", "3"), ("32", "8"), (None, "2"), ("", "2")])
def test_a_ranks_threads_are_its_share_which_slurm_has_taken_already(
    monkeypatch: pytest.MonkeyPatch, said: str | None, threads: str
) -> None:
    """A node has four ranks; this process may use eight cores."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("SLURM_CPUS_PER_TASK", raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    if said is not None:
        monkeypatch.setenv("SLURM_CPUS_PER_TASK", said)
    spec = a_trial_spec(device="cuda")
    place = RankPlace(rank=0, local_rank=0, ranks=4, nodes=1)
    assert rank_environment(spec, place, {})["OMP_NUM_THREADS"] == threads
