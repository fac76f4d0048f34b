"""A trial's requests to Slurm, as sbatch gets them."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest

from sweeps.cluster.slots import Layout
from sweeps.cluster.slurm.request import Site, memory, minutes, trial_parameters
from sweeps.cluster.slurm.submit import Executor
from sweeps.config.schema import ClusterConfig
from sweeps.machine import Gpu, Machine
from tests.support.examples import a_plan, a_trial_spec
from train_entry.contract import Expected, TimeLimits

GIB = 2**30
CARDS = tuple(Gpu(index=n, uuid=str(n), name="H100", memory_bytes=80 * GIB) for n in range(8))
NODES = Machine(device="cuda", nodes=4, ranks_per_node=8, gpus=CARDS, cores=64, host_memory_bytes=512 * GIB)
LIMITS = TimeLimits(attempt_s=1800, startup_silence_s=900, step_silence_s=300, startup_s=600)


def site(machine: Machine = NODES, **cluster: Any) -> Site:
    return Site(cluster=ClusterConfig(kind="slurm", **cluster), machine=machine)


def script(where: Site, ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines that sbatch would get for the first attempt of trial 1."""
    monkeypatch.setattr(shutil, "which", lambda _: "/usr/bin/srun")  # submitit looks for srun first
    spec = a_trial_spec(plan=a_plan(ranks=ranks), limits=LIMITS, study="mine")
    executor = Executor(tmp_path)
    executor.update_parameters(**trial_parameters(where, spec, "/studies/mine"))
    return executor.script().splitlines()


def options(lines: list[str]) -> set[str]:
    return {line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")}


def test_a_trial_of_two_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = site(partition="gpu", account="ours", qos="high", constraint="ib&hbm3", exclude="n[7-9]")
    found = options(script(where, 16, tmp_path, monkeypatch))
    assert {
        "--job-name=mine/0001/1",
        "--comment=/studies/mine",
        "--partition=gpu",
        "--account=ours",
        "--qos=high",
        "--constraint='ib&hbm3'",
        "--exclude='n[7-9]'",
        "--nodes=2",
        "--ntasks-per-node=8",
        "--gpus-per-node=8",
        "--cpus-per-task=8",
        "--exclusive",
        "--no-requeue",
        "--mem=0",
    } <= found


def test_containers_and_modules_reach_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = site(
        setup=["module load cuda/12.6"],
        srun_args=["--container-image=/images/my torch.sqsh", "--container-mounts=/home"],
        sbatch_args=["--reservation=course", "--overcommit"],
        gpu_type="h100",
    )
    lines = script(where, 4, tmp_path, monkeypatch)
    assert {"--reservation=course", "--overcommit", "--gpus-per-node=h100:4"} <= options(lines)
    assert "module load cuda/12.6" in lines
    [srun] = [line for line in lines if line.startswith("srun")]
    assert "'--container-image=/images/my torch.sqsh' --container-mounts=/home" in srun
    assert "--cpus-per-task=8" in srun


def test_jobs_are_told_ports_interface_and_operators(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = dataclasses.replace(
        site(interface="ib0", ports="31000-31010"), ops="/shared/my ops", ops_cpu="f0"
    )
    lines = script(where, 8, tmp_path, monkeypatch)
    assert "export SHARDSWEEP_PORTS=31000-31010" in lines
    assert "export SHARDSWEEP_INTERFACE=ib0" in lines
    assert {"export SHARDSWEEP_OPS='/shared/my ops'", "export SHARDSWEEP_OPS_CPU=f0"} <= set(lines)
    assert not any("CUDA_VISIBLE_DEVICES" in line for line in lines), "Slurm says which"


def test_a_part_of_a_nodes_gpus_leaves_its_neighbours_their_cores() -> None:
    four = dataclasses.replace(NODES, ranks_per_node=4)
    shared = dataclasses.replace(site(four, exclusive=False), gpus_on_node=8)
    assert (shared.slots_on_node, shared.cores_per_rank) == (8, 8)
    alone = dataclasses.replace(site(four), gpus_on_node=8)
    assert alone.cores_per_rank == 16, "nobody else can use them"
    assert site(four, exclusive=False, cpus_per_rank=3).cores_per_rank == 3


def test_on_cpus_no_gpu_is_asked_for_or_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = script(site(Machine(device="cpu", nodes=1, ranks_per_node=4, cores=8)), 2, tmp_path, monkeypatch)
    assert not any("gpus" in option for option in options(lines))
    assert "export CUDA_VISIBLE_DEVICES=''" in lines
    assert "--cpus-per-task=2" in options(lines)


def test_ranks_that_do_not_divide_are_counted_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = options(script(site(), 9, tmp_path, monkeypatch))
    assert {"--nodes=2", "--ntasks-per-node=5", "--ntasks=9", "--distribution=block"} <= found


@pytest.mark.parametrize(("ranks", "nodes", "tasks"), [(1, 1, 1), (8, 1, 8), (12, 2, 6), (32, 4, 8)])
def test_ranks_fill_as_few_nodes_as_hold_them(ranks: int, nodes: int, tasks: int) -> None:
    layout = Layout.of(ranks, 8)
    assert (layout.nodes, layout.tasks_per_node) == (nodes, tasks)


def test_time_follows_the_estimate_within_the_limits() -> None:
    assert minutes(site(), LIMITS, steps_s=1.0) == (600 + 300 + 180) / 60
    assert minutes(site(), LIMITS, steps_s=60.0) == (600 + 600 + 180) / 60
    assert minutes(site(), LIMITS, steps_s=1e6) == (600 + 1800 + 180) / 60
    assert minutes(site(), LIMITS, steps_s=None) == (600 + 1800 + 180) / 60
    assert minutes(dataclasses.replace(site(), longest_min=15), LIMITS, steps_s=None) == 15
    assert minutes(site(time_min=7), LIMITS, steps_s=1e6) == 7


def test_memory_follows_the_estimate_where_a_node_is_shared() -> None:
    layout, shared = Layout.of(2, 8), site(exclusive=False)
    assert memory(site(), layout, 10 * GIB) == "0"
    assert memory(shared, layout, 10 * GIB) == f"{(15 + 4) * 1024}M"
    assert memory(shared, layout, 1000 * GIB) == f"{512 * 1024}M"
    assert memory(site(memory_gib=1.5), layout, None) == "1536M"
    assert memory(site(memory_gib=0), layout, None) == "0"


def test_an_estimate_reaches_the_request() -> None:
    spec = a_trial_spec(limits=LIMITS, expected=Expected(steps_s=60.0, host_bytes=10 * GIB))
    found = trial_parameters(site(exclusive=False), spec, "")
    assert (found["time"], found["mem"]) == (23, f"{(15 + 4) * 1024}M")
