"""A configuration is checked against the cluster's nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sweeps.cluster.slurm import queries
from sweeps.cluster.slurm.check import require_acceptable, survey
from sweeps.cluster.slurm.request import Site
from sweeps.config.schema import ClusterConfig, LimitsConfig
from sweeps.errors import ConfigError
from sweeps.machine import Machine
from tests.sweeps.cluster.conftest import Commands

NODE = "{name}|64|512000|gpu:{gpus}|{features}|idle|gpu*|2-00:00:00\n"


@pytest.fixture
def sinfo(commands: Commands) -> Commands:
    """A cluster where n1 has four A100 and n2 four H100."""
    commands.answer("sinfo", a_node("n1", "a100:4", "old") + a_node("n2", "h100:4", "new,ib"))
    return commands


def a_node(name: str, gpus: str, features: str = "(null)") -> str:
    return NODE.format(name=name, gpus=gpus, features=features)


def asked(**keys: Any) -> ClusterConfig:
    return ClusterConfig(kind="slurm", **keys)


def test_cards_of_two_models_are_not_mixed(sinfo: Commands) -> None:
    with pytest.raises(ConfigError) as caught:
        survey(asked())
    assert caught.value.problems == (
        "cluster.gpu_type is not set, and partition gpu has GPUs of types a100 and h100; choose one",
    )


@pytest.mark.parametrize(
    "keys", [{"gpu_type": "h100"}, {"constraint": "new"}, {"exclude": "n1"}, {"exclude": "n[1,9]"}]
)
def test_one_of_them_is_chosen(sinfo: Commands, keys: dict[str, Any]) -> None:
    sinfo.answer("scontrol", "n1\nn9\n")
    found = survey(asked(**keys))
    assert [node.name for node in found.nodes] == ["n2"]
    assert (found.gpus_per_node, found.gpus_on_node) == (4, 4)


def test_what_a_constraint_means_may_be_known_to_slurm_alone(sinfo: Commands) -> None:
    assert len(survey(asked(constraint="old|new")).nodes) == 2


def test_of_a_node_with_several_kinds_the_chosen_one_counts(commands: Commands) -> None:
    commands.answer("sinfo", a_node("n1", "a100:2,gpu:1g.10gb:14"))
    with pytest.raises(ConfigError, match=r"types 1g\.10gb and a100"):
        survey(asked())
    found = survey(asked(gpu_type="a100"))
    assert (found.gpus_per_node, found.gpus_on_node) == (2, 16)


def test_draining_nodes_do_not_count(commands: Commands) -> None:
    commands.answer("sinfo", a_node("n1", "4") + a_node("n2", "4").replace("idle", "drng"))
    with pytest.raises(ConfigError, match="has 1 nodes that are up"):
        survey(asked(nodes=2))


@pytest.mark.parametrize(
    ("name", "said", "line"),
    [
        ("refusing", "sbatch: error: Invalid qos\n", "cluster=slurm: sbatch refuses such jobs: Invalid qos"),
        ("silent", "", "cluster=slurm: sbatch did not answer within 0 s"),
    ],
)
def test_what_sbatch_says_of_a_trials_job_is_one_line(
    commands: Commands, monkeypatch: pytest.MonkeyPatch, name: str, said: str, line: str
) -> None:
    commands.answer("sbatch", err=said, status=1)
    if name == "silent":
        monkeypatch.setattr(queries, "LIMIT_S", 0.3)
        Path(commands.folder / "sbatch").write_text("#!/bin/sh\nexec sleep 5\n")
    site = Site(cluster=asked(), machine=Machine(device="cpu", nodes=1, ranks_per_node=2, cores=8))
    with pytest.raises(ConfigError) as caught:
        require_acceptable(site, 2, LimitsConfig())
    assert caught.value.problems == (line,)
