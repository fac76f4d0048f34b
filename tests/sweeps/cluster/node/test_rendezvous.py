"""Ranks find where they meet, and each finds its place."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest
from torch.distributed.rendezvous import rendezvous

from sweeps.cluster.node.rendezvous import (
    ADDRESS,
    INTERFACE,
    PORTS,
    RankPlace,
    RendezvousError,
    free_port,
    meeting,
    own_address,
    parse_ports,
)
from train_entry.contract import AttemptDir

TORCHRUN = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
DEEPSPEED = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "CROSS_SIZE": "2"}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_NUM_NODES": "2",
}


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDSWEEP_STATE_DIR", str(tmp_path / "state"))


@pytest.fixture
def attempt(tmp_path: Path) -> AttemptDir:
    (tmp_path / "attempt-1").mkdir()
    return AttemptDir(tmp_path / "attempt-1")


def place(rank: int, nodes: int) -> RankPlace:
    return RankPlace(rank=rank, local_rank=0, ranks=2, nodes=nodes)


@pytest.mark.parametrize("environ", [TORCHRUN, DEEPSPEED, SRUN])
def test_every_launcher_says_where_a_rank_stands(environ: dict[str, str]) -> None:
    found = RankPlace.from_env({**environ, "SLURM_JOB_ID": "7"})
    assert found == RankPlace(rank=5, local_rank=1, ranks=8, nodes=2, job_id="7")
    assert found.ranks_here == 4


def test_no_launcher_is_said() -> None:
    with pytest.raises(RendezvousError, match="start this with srun, torchrun or DeepSpeed's launcher"):
        RankPlace.from_env({})


def test_on_one_host_ranks_meet_in_a_file(attempt: AttemptDir) -> None:
    with meeting(attempt, place(0, nodes=1), {}) as found:
        assert found == {"SHARDSWEEP_RENDEZVOUS": f"file://{attempt.rendezvous}"}


def test_torch_opens_that_very_file_whatever_its_directory_is_called(tmp_path: Path) -> None:
    attempt = AttemptDir(tmp_path / "50% näher; a, b" / "attempt-1")
    attempt.path.mkdir(parents=True)
    with meeting(attempt, place(0, nodes=1), {}) as found:
        store, _rank, _ranks = next(rendezvous(found["SHARDSWEEP_RENDEZVOUS"], rank=0, world_size=1))
        store.set("key", "value")
    assert attempt.rendezvous.is_file()


def test_on_several_hosts_all_meet_where_rank_0_says(attempt: AttemptDir) -> None:
    environ = {ADDRESS: "node-a", PORTS: "30000-30100"}
    with meeting(attempt, place(0, nodes=2), environ) as first:
        with meeting(attempt, place(1, nodes=2), environ) as second:
            assert first == second
    assert first["MASTER_ADDR"] == "node-a"
    assert int(first["MASTER_PORT"]) in range(30000, 30101)
    assert first["SHARDSWEEP_RENDEZVOUS"] == f"tcp://node-a:{first['MASTER_PORT']}"


def test_others_wait_for_rank_0(attempt: AttemptDir) -> None:
    found: list[dict[str, str]] = []

    def join() -> None:
        with meeting(attempt, place(1, nodes=2), {}) as meet:
            found.append(meet)

    waiting = threading.Thread(target=join)
    waiting.start()
    with meeting(attempt, place(0, nodes=2), {}) as first:
        waiting.join(timeout=30)
    assert found == [first]


def test_two_trials_of_a_host_take_different_ports() -> None:
    with free_port("30200-30201") as one, free_port("30200-30201") as other:
        assert {one, other} == {30200, 30201}
        with pytest.raises(RendezvousError, match=r"cluster.ports=30200-30201: none of them is free"):
            with free_port("30200-30201"):
                pass


def test_a_port_that_a_service_listens_at_is_passed_over() -> None:
    with socket.socket() as service:
        service.bind(("127.0.0.1", 0))
        service.listen()
        taken = service.getsockname()[1]
        with pytest.raises(RendezvousError), free_port(str(taken)):
            pass


def test_the_interface_gives_the_address_and_names_nccls() -> None:
    assert own_address({INTERFACE: "lo"}) == "127.0.0.1"
    assert own_address({INTERFACE: "lo", ADDRESS: "node-a"}) == "127.0.0.1", (
        "names may lead to another network"
    )
    assert own_address({ADDRESS: "node-a"}) == "node-a"
    assert own_address({}) == socket.gethostname()
    with pytest.raises(RendezvousError, match=r"cluster.interface=nix: no such interface"):
        own_address({INTERFACE: "nix"})


def test_what_the_user_set_for_nccl_stays(attempt: AttemptDir) -> None:
    environ = {INTERFACE: "lo", "NCCL_SOCKET_IFNAME": "ib0"}
    with meeting(attempt, place(0, nodes=2), environ) as found:
        assert (found["NCCL_SOCKET_IFNAME"], found["GLOO_SOCKET_IFNAME"]) == ("ib0", "lo")


@pytest.mark.parametrize("text", ["", "80", "40000-30000", "60000-70000", "a-b"])
def test_what_are_no_ports(text: str) -> None:
    with pytest.raises(ValueError):
        parse_ports(text)


def test_a_lock_is_held_only_as_long_as_the_port_is_used() -> None:
    with free_port("30300"):
        pass
    with free_port("30300") as port:
        assert port == 30300
    assert os.path.exists(os.environ["SHARDSWEEP_STATE_DIR"])
