"""Trials over two hosts, both played by a real sshd, through `python sweep.py`."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.hostfile.conftest import DOWN, HOSTS, HostfileLine
from train_entry.contract import (
    AttemptDir,
    FailureKind,
    Heartbeat,
    Measurement,
    SchedulerWord,
    State,
    StudyDir,
    Trial,
    read_document,
    read_trial,
)

pytestmark = [pytest.mark.slow, pytest.mark.jobs, pytest.mark.sshd]

Wait = Callable[[Callable[[], bool], float], None]
ONE = ("ranks=2", "strategy=zero2", "micro_batch=1", "study=x")


def trials(line: HostfileLine) -> list[Trial]:
    places = StudyDir(line.studies / "x").trials()
    return [trial for place in places if (trial := read_trial(place)) is not None]


def attempt(line: HostfileLine, number: int = 1) -> AttemptDir:
    return StudyDir(line.studies / "x").trial(1).attempt(number)


def processes_of(place: AttemptDir) -> list[int]:
    """The pids of this host's processes whose command names the attempt."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes()
        except OSError:
            continue
        if str(place.path).encode() in command:
            found.append(int(path.parent.name))
    return found


def launchers_of(place: AttemptDir) -> list[int]:
    """The pids of DeepSpeed's launchers, one for each host."""
    return [
        pid
        for pid in processes_of(place)
        if b"deepspeed.launcher" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


def has_begun(place: AttemptDir) -> bool:
    return all(place.heartbeat(rank).exists() for rank in (0, 1))


def test_a_trial_over_two_hosts_is_measured(line: HostfileLine) -> None:
    done = line.run(*line.arguments(), *ONE)
    assert done.returncode == 0, done.stdout + done.stderr
    (trial,) = trials(line)
    assert trial.state is State.MEASURED
    assert [attempt.slots for attempt in trial.attempts] == [tuple(f"{host}/0" for host in HOSTS)]
    assert isinstance(trial.outcome, Measurement)
    assert [rank.rank for rank in trial.outcome.ranks] == [0, 1]
    address = json.loads(attempt(line).address.read_text())
    assert address["host"] == HOSTS[0]
    assert 30000 <= address["port"] <= 32767
    assert processes_of(attempt(line)) == []


def test_two_trials_of_one_host_each_run_side_by_side(line: HostfileLine) -> None:
    two = ("ranks=1", "strategy=zero1,zero2", "micro_batch=1", "study=x")
    done = line.run(*line.arguments(), *two)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [trial.state for trial in trials(line)] == [State.MEASURED] * 2
    slots = {attempt.slots for trial in trials(line) for attempt in trial.attempts}
    assert slots == {(f"{host}/0",) for host in HOSTS}
    assert not any(trial.is_shared for trial in trials(line))


def test_a_host_that_is_down_is_named_before_anything_is_launched(line: HostfileLine) -> None:
    done = line.run(*line.arguments((HOSTS[0], DOWN)), *ONE)
    assert (done.returncode, done.stdout) == (2, "")
    (said,) = done.stderr.splitlines()
    assert said.startswith(f"host {DOWN}: ")
    assert "Connection refused" in said
    assert not line.studies.exists()


def test_all_that_is_wrong_with_a_hostfile_is_said_at_once(line: HostfileLine) -> None:
    arguments = line.arguments()
    (line.directory / "hosts").write_text("a slots=2\nb slot=2\na slots=2\n")
    done = line.run(*arguments, *ONE)
    assert done.returncode == 2
    path = line.directory / "hosts"
    assert done.stderr.splitlines() == [
        f"{path}:2: 'b slot=2' names no host; write HOST slots=N",
        f"{path}:3: a is listed twice; give each host one line",
    ]


def environment_of(place: AttemptDir, rank: int) -> dict[str, str]:
    beat = read_document(place.heartbeat(rank), Heartbeat)
    assert beat is not None
    words = Path(f"/proc/{beat.pid}/environ").read_bytes().decode().split("\0")
    return dict(word.split("=", 1) for word in words if "=" in word)


def test_ranks_have_the_environment_and_ctrl_c_leaves_no_process_on_any_host(
    line: HostfileLine, wait_for: Wait, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("NCCL_API_TOKEN", "secret")
    process = line.start(*line.arguments(), *ONE)
    wait_for(lambda: has_begun(attempt(line)), 90)
    assert len(launchers_of(attempt(line))) == len(HOSTS)
    for rank in (0, 1):
        seen = environment_of(attempt(line), rank)
        assert seen["NCCL_DEBUG"] == "WARN"
        assert "NCCL_API_TOKEN" not in seen
        assert Path(seen["TORCH_EXTENSIONS_DIR"]).is_relative_to(line.directory / "state"), (
            "a host's own copy"
        )
    os.kill(process.pid, signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert processes_of(attempt(line)) == []
    assert [trial.state for trial in trials(line)] == [State.CANCELLED]


def test_a_trial_without_an_orchestrator_is_cancelled_on_all_hosts(
    line: HostfileLine, wait_for: Wait
) -> None:
    process = line.start(*line.arguments(), *ONE)
    wait_for(lambda: has_begun(attempt(line)), 90)
    os.killpg(process.pid, signal.SIGKILL)
    assert line.sweeps("cancel", str(line.studies / "x")).startswith("cancelled 1 running trial;")
    assert processes_of(attempt(line)) == []


def test_a_launcher_that_is_killed_is_a_lost_node_and_leaves_no_rank(
    line: HostfileLine, wait_for: Wait
) -> None:
    """A launcher dies as if the kernel had killed it because memory ran out."""
    process = line.start(*line.arguments(), *ONE)
    wait_for(lambda: has_begun(attempt(line)), 90)
    os.kill(launchers_of(attempt(line))[1], signal.SIGKILL)
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, out + err
    assert [(trial.state, len(trial.attempts)) for trial in trials(line)] == [(State.MEASURED, 2)]
    assert processes_of(attempt(line)) == []
    found = read_document(attempt(line).scheduler, SchedulerWord)
    assert found is not None
    assert found.kind is FailureKind.NODE_LOST


def test_a_trial_outlives_its_orchestrator_and_is_found_again(line: HostfileLine, wait_for: Wait) -> None:
    process = line.start(*line.arguments(), *ONE)
    wait_for(lambda: attempt(line).launcher.exists(), 60)
    os.killpg(process.pid, signal.SIGKILL)
    done = line.run(*line.arguments(), *ONE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [(trial.state, len(trial.attempts)) for trial in trials(line)] == [(State.MEASURED, 1)]
