"""Hostfiles are read as DeepSpeed reads them, and ranks on other hosts get their settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from sweeps.cluster.hostfile.check import find_machine
from sweeps.cluster.hostfile.hosts import Hosts, lay_out, parse_hostfile, ssh_command
from sweeps.cluster.hostfile.jobs import exported
from sweeps.cluster.hostfile.over_ssh import Launch, LaunchRecord, end_nodes, launcher_command, on_host
from sweeps.config.schema import ClusterConfig, GateConfig
from sweeps.errors import ConfigError
from train_entry.contract import AttemptDir, JobRecord

GOOD = "# ours\n\n  a slots=4\nuser@b\tslots=2 # older\n#c slots=8\nd slots=0\n"
BAD = ("a slots=2\na slots=2\n", "a 2\n", "# nothing\n", "a  slots=x\n", "slots=2\n")


def test_comments_empty_lines_and_what_follows_are_left_out() -> None:
    assert parse_hostfile(GOOD, "hosts") == {"a": 4, "user@b": 2}


@pytest.mark.slow
def test_deepspeed_reads_the_same() -> None:
    from deepspeed.launcher.runner import _parse_hostfile  # this import takes three seconds

    assert {host: slots for host, slots in _parse_hostfile(GOOD.splitlines()).items() if slots} == (
        parse_hostfile(GOOD, "hosts")
    )
    for text in BAD:
        with pytest.raises(ValueError, match=r"(?i)hostfile"):
            _parse_hostfile(text.splitlines())


@pytest.mark.parametrize("text", BAD)
def test_what_deepspeed_refuses_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="hosts"):
        parse_hostfile(text, "hosts")


def test_every_bad_line_is_named_and_no_host_is_an_option_of_ssh() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_hostfile("a 2\n-oProxyCommand=x slots=1\n", "hosts")
    assert caught.value.problems == (
        "hosts:1: 'a 2' names no host; write HOST slots=N",
        "hosts:2: -oProxyCommand=x is not a host name",
    )


def test_ranks_lie_on_as_few_hosts_as_hold_them_equally_many_on_each() -> None:
    free = {"a": 4, "b": 4, "c": 2}
    assert lay_out(free, 4, 4) == {"a": 4}
    assert lay_out(free, 6, 4) == {"a": 3, "b": 3}
    assert lay_out(free, 5, 4) == {"a": 3, "b": 2}
    assert lay_out({"a": 4, "c": 2}, 8, 4) is None


def test_ranks_get_what_deepspeed_exports_and_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / ".deepspeed_env").write_text("NCCL_IB_HCA=mlx5\n\n")
    environ = {"NCCL_DEBUG": "INFO", "MLFLOW_TRACKING_PASSWORD": "x", "PYTHON_TOKEN": "y", "RANK": "3"}
    found = exported(ClusterConfig(kind="hostfile", interface="ib0"), "cuda", environ)
    assert found.keys() == {
        "NCCL_DEBUG",
        "NCCL_IB_HCA",
        "PYTHONPATH",
        "CUDA_DEVICE_ORDER",
        "DS_ACCELERATOR",
        "SHARDSWEEP_PORTS",
        "SHARDSWEEP_INTERFACE",
        "SHARDSWEEP_OPS",
        "SHARDSWEEP_OPS_CPU",
    }


def test_what_a_shell_would_read_reaches_ssh_quoted() -> None:
    command = on_host(ssh_command(2222, ["-ikey file"]), "a", "run")
    assert command[:4] == ["ssh", "-p", "2222", "-ikey file"]
    assert command[-3:-1] == ["--", "a"]
    assert command[-1].endswith("-P -u -m sweeps.cluster.hostfile.on_host run")


def test_without_ssh_every_host_has_a_line_and_none_is_said_to_be_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    hosts = Hosts(slots={"a": 1, "b": 1}, ssh=ssh_command(22, []))
    with pytest.raises(ConfigError) as caught:
        find_machine(hosts, ClusterConfig(kind="hostfile"), GateConfig(), tmp_path)
    reason = "ssh cannot be run here (No such file or directory)"
    assert caught.value.problems == (f"host a: {reason}", f"host b: {reason}")
    leader = JobRecord(job_id="1", host="here", leader_pid=1, leader_start_ticks=1, started_at=0.0)
    record = LaunchRecord(leader=leader, ssh=hosts.ssh, hosts=("a", "b"))
    assert end_nodes(AttemptDir(tmp_path), record) == ["a", "b"]


def test_each_node_is_told_its_place_and_the_explicit_port() -> None:
    launch = Launch(
        attempt="/x/attempt-1",
        ssh=("ssh",),
        slots={"me@a": (0, 1), "b": (2, 3)},
        master_port=30001,
        environment={},
    )
    command = launcher_command(launch, 1)
    assert {"--node_rank=1", "--master_addr=a", "--master_port=30001", "--no_local_rank"} <= set(command)
    assert command[-2:] == ("sweeps.cluster.node.supervisor", "/x/attempt-1")
