"""Requests of a held allocation, and what its end means to the trial that ran in it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from sweeps.cluster.slurm.held_request import (
    hold_minutes,
    hold_parameters,
    hold_word,
    needed_s,
    nodes_of,
    require_holdable,
    step_command,
)
from sweeps.cluster.slurm.queries import JobFacts
from sweeps.cluster.slurm.request import Site
from sweeps.config.schema import ClusterConfig
from sweeps.errors import ConfigError
from sweeps.machine import Machine
from tests.support.examples import a_trial_spec
from train_entry.contract import AttemptDir, FailureKind

GIB = 2**30
MACHINE = Machine(device="cpu", nodes=4, ranks_per_node=2, cores=8, host_memory_bytes=16 * GIB)
SITE = Site(cluster=ClusterConfig(kind="slurm", nodes=4, hold=True, holds=2), machine=MACHINE)


def test_an_allocation_takes_its_part_of_the_nodes_and_runs_no_step_of_its_own() -> None:
    found = hold_parameters(SITE, "x/hold-0", Path("/x/holds/0001"))
    assert (found["nodes"], found["ntasks_per_node"], found["use_srun"]) == (2, 2, False)
    assert (found["job_name"], found["time"]) == ("x/hold-0", 480)


def test_its_time_is_at_most_the_partitions() -> None:
    assert hold_minutes(dataclasses.replace(SITE, longest_min=60)) == 60


@pytest.mark.parametrize(("holds", "ranks"), [(3, 2), (2, 6)])
def test_allocations_that_do_not_add_up_or_hold_no_trial_are_refused(holds: int, ranks: int) -> None:
    with pytest.raises(ConfigError):
        require_holdable(dataclasses.replace(SITE.cluster, holds=holds), ranks, 2)


def test_a_step_runs_on_the_nodes_that_it_has_leased() -> None:
    slots = ("hold-1.node-0/0", "hold-1.node-0/1", "hold-1.node-1/0", "hold-1.node-1/1")
    assert nodes_of(slots) == [0, 1]
    command = step_command(SITE, a_trial_spec(), AttemptDir(Path("/x/trials/0001/attempt-1")), "7", ["n3"])
    assert {"--jobid=7", "--nodes=1", "--nodelist=n3", "--ntasks=2", "--exact"} <= set(command)
    assert not any(word.startswith("--mem") for word in command), "it has the node's memory to itself"


def test_containers_reach_a_step_too() -> None:
    arguments = ["--container-image=/images/my torch.sqsh", "--container-mounts=/home"]
    site = dataclasses.replace(SITE, cluster=dataclasses.replace(SITE.cluster, srun_args=arguments))
    command = step_command(site, a_trial_spec(), AttemptDir(Path("/x/trials/0001/attempt-1")), "7", ["n3"])
    where = command.index(arguments[0])
    assert list(command[where : where + 2]) == arguments
    assert where < command.index("-m"), "they are srun's, not the supervisor's"


def test_a_trial_needs_twice_what_others_took_and_no_more_than_half_an_allocation() -> None:
    spec = a_trial_spec()
    assert needed_s(SITE, spec, 100.0) < needed_s(SITE, spec, 0.0) <= 480 * 60 / 2 + 60


@pytest.mark.parametrize(
    ("state", "had_its_time", "kind"),
    [
        ("TIMEOUT", False, FailureKind.PREEMPTED),
        ("TIMEOUT", True, FailureKind.TIMED_OUT),
        ("CANCELLED", True, FailureKind.PREEMPTED),
        ("PREEMPTED", False, FailureKind.PREEMPTED),
        ("NODE_FAIL", False, FailureKind.NODE_LOST),
        ("OUT_OF_MEMORY", False, FailureKind.HOST_OOM),
        ("FAILED", False, FailureKind.NODE_LOST),
    ],
)
def test_what_the_end_of_an_allocation_says_of_a_trial(
    state: str, had_its_time: bool, kind: FailureKind
) -> None:
    assert hold_word(JobFacts(job_id="7", state=state), had_its_time).kind is kind
