"""The machine where a study ran, reconstructed on another machine."""

from __future__ import annotations

import dataclasses

import pytest

from sweeps.commands.machines import study_machine
from sweeps.config.schema import ClusterConfig, SweepConfig
from sweeps.errors import ConfigError
from tests.support.examples import a_measured_trial, a_measurement, a_rank_measurement, a_study_record
from train_entry.contract import StudyRecord, Trial

GIB = 2**30
H200 = "NVIDIA H200"


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> StudyRecord:
    """The record of a study on H200s. No scheduler answers, as on a laptop to which the study was copied."""
    monkeypatch.setenv("PATH", "")
    return dataclasses.replace(a_study_record(name="mine", versions={"device": H200}), asked={"ranks": 16})


def on_slurm(**keys: object) -> SweepConfig:
    return SweepConfig(cluster=ClusterConfig(kind="slurm", **keys))  # type: ignore[arg-type]


def measured() -> Trial:
    rank = a_rank_measurement(device_total_bytes=140 * GIB)
    return a_measured_trial(outcome=a_measurement(ranks=(rank,)))


@pytest.mark.parametrize(("keys", "per_node"), [({"nodes": 2}, 8), ({"nodes": 4, "gpus_per_node": 4}, 4)])
def test_nodes_of_a_scheduler_are_as_many_as_the_study_asked_for(
    record: StudyRecord, keys: dict[str, object], per_node: int
) -> None:
    machine, note = study_machine(record, [measured()], on_slurm(**keys))
    assert (machine.nodes, machine.ranks_per_node, machine.capacity) == (keys["nodes"], per_node, 16)
    assert {gpu.name for gpu in machine.gpus} == {H200}
    assert note == "estimated for NVIDIA H200, 140.00 GiB, where the study ran"


def test_a_card_that_nobody_knows_is_asked_for_where_it_is(record: StudyRecord) -> None:
    unknown = dataclasses.replace(record, versions={"device": "Card of Tomorrow"})
    with pytest.raises(
        ConfigError, match="whose memory is unknown here; run this command where the study ran"
    ):
        study_machine(unknown, [], on_slurm(nodes=2))
