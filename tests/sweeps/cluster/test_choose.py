"""All that is known of a cluster is put together, and attempts are ended whoever launched them."""

from __future__ import annotations

from pathlib import Path

import pytest

from sweeps.cluster import local
from sweeps.cluster.choose import _host, cancel_attempts
from sweeps.cluster.slurm import jobs, submit
from sweeps.cluster.slurm.check import Survey
from sweeps.cluster.slurm.probe import Probe
from sweeps.cluster.slurm.queries import parse_sinfo
from sweeps.errors import SweepError
from sweeps.machine import Machine
from tests.sweeps.cluster.conftest import Commands
from train_entry.contract import AttemptDir, Submission, dump, write_atomic

GIB = 2**30
NODES = Survey(
    nodes=tuple(parse_sinfo("n1|8|16384|(null)|(null)|idle|main*|infinite\n")), device="cpu", longest_min=None
)
SEEN = Probe(host="n1", machine=Machine(device="cpu", nodes=1, ranks_per_node=8), ops="/ops", cpu="f0")


@pytest.mark.parametrize(("asked", "counts"), [(None, 16), (0, 16), (4, 4), (64, 16)])
def test_a_job_has_no_more_memory_than_it_asks_for(asked: float | None, counts: int) -> None:
    assert _host(SEEN, NODES, asked).host_memory_bytes == counts * GIB


def test_every_attempt_is_told_to_end_whatever_becomes_of_others(
    tmp_path: Path, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    def elsewhere(attempt: AttemptDir) -> None:
        raise SweepError(f"{attempt.path.name}: runs elsewhere")

    monkeypatch.setattr(local, "cancel_attempt", elsewhere)
    monkeypatch.setattr(submit, "CANCEL_S", 0.3)
    commands.answer("squeue", "7|RUNNING|None|1:00|30:00|x/0001/1|\n8|CANCELLED|None|1:00|30:00|x/0002/1|\n")
    attempts = [AttemptDir(tmp_path / name) for name in ("a", "b", "c", "d")]
    for attempt, job_id in zip(attempts[1:3], ("7", "8"), strict=True):
        write_atomic(attempt.submission, dump(Submission(cluster=jobs.NAME, job_id=job_id, submitted_at=0.0)))
    found = cancel_attempts(attempts)
    assert found[0].startswith("job 7 may still run")
    assert found[1:] == ["a: runs elsewhere", "d: runs elsewhere"]
    assert commands.calls("scancel") == ["7 8"]
