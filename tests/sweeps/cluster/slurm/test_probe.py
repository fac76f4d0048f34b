"""The probe's job requests little, and reports what its node has."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest

from sweeps.cluster.node.operators import cpu_signature
from sweeps.cluster.slurm import probe
from sweeps.cluster.slurm.check import Survey
from sweeps.cluster.slurm.probe import Probe, report_path
from sweeps.cluster.slurm.queries import parse_sinfo
from sweeps.cluster.slurm.request import Site
from sweeps.config.schema import ClusterConfig
from sweeps.machine import Machine
from train_entry.contract import dump, read_document

NODES = Survey(
    nodes=tuple(parse_sinfo("n1|8|16000|(null)|(null)|idle|main*|infinite\n")), device="cpu", longest_min=None
)
# It replaces the Python interpreter: it names what is missing, or compiles what the test allows.
PYTHON = """#!/bin/sh
echo "$*" >> '{calls}'
there=$TORCH_EXTENSIONS_DIR
case "$*" in
*--missing*) for op in cpu_adam async_io; do test -e $there/$op/$op.so || echo $op; done ;;
*) for op in {compiles}; do
    mkdir -p $there/$op; test -e $there/$op/$op.so || printf new > $there/$op/$op.so; done ;;
esac
"""


@dataclasses.dataclass(frozen=True)
class Node:
    """The node that answers the question; `known` has the operators of the login node."""

    folder: Path

    @property
    def known(self) -> Path:
        return self.folder / "known"

    def has(self, *ops: str) -> None:
        for op in ops:
            (self.known / op).mkdir(parents=True)
            (self.known / op / f"{op}.so").write_text("old")

    def answers(self, cpu: str) -> Probe:
        asked = probe._Question(
            answer=str(self.folder / "answer.json"),
            device="cpu",
            nvme_path=None,
            ops=str(self.known),
            cpu=cpu,
            ops_elsewhere=str(self.folder / "elsewhere"),
        )
        probe.answer_on_node(dump(asked))
        found = read_document(self.folder / "answer.json", Probe)
        assert found is not None
        return found

    def compiled(self) -> dict[str, str]:
        return {path.stem: path.read_text() for path in (self.folder / "elsewhere").glob("*/*.so")}


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    compiling(tmp_path, "cpu_adam async_io")
    return Node(tmp_path)


def compiling(folder: Path, compiles: str) -> None:
    (folder / "python").write_text(PYTHON.format(calls=folder / "calls", compiles=compiles))
    (folder / "python").chmod(0o755)


def test_what_is_compiled_for_this_processor_is_used_as_it_is(node: Node) -> None:
    node.has("cpu_adam", "async_io")
    found = node.answers(cpu_signature())
    assert (found.ops, found.cpu, found.doubt) == (str(node.known), cpu_signature(), "")
    assert (node.folder / "calls").read_text().count("\n") == 1


def test_what_is_not_there_is_compiled_beside_what_is(node: Node) -> None:
    """This happens after `make install CUDA=...` on a login node, which has no GPU."""
    node.has("async_io")
    found = node.answers(cpu_signature())
    assert found.ops == str(node.folder / "elsewhere")
    assert node.compiled() == {"async_io": "old", "cpu_adam": "new"}


def test_for_another_processor_all_is_compiled(node: Node) -> None:
    node.has("cpu_adam", "async_io")
    assert node.answers("another").ops == str(node.folder / "elsewhere")
    assert node.compiled() == {"async_io": "new", "cpu_adam": "new"}


def test_what_cannot_be_compiled_is_said(node: Node) -> None:
    compiling(node.folder, "async_io")
    assert node.answers(cpu_signature()).doubt.startswith("could not compile cpu_adam; ")


def test_another_container_is_asked_anew(tmp_path: Path) -> None:
    one, other = (
        report_path(tmp_path, ClusterConfig(kind="slurm", srun_args=[f"--container-image={name}"]), NODES)
        for name in ("a", "b")
    )
    assert one != other


@pytest.mark.parametrize(
    ("keys", "longest_min", "asks"),
    [
        ({}, None, {"time": 60}),
        ({"time_min": 90}, 45, {"time": 45}),
        ({"time_min": 20, "memory_gib": 4}, 45, {"time": 20, "mem": "4096M"}),
    ],
)
def test_it_asks_for_no_more_than_a_trial_may_have(
    keys: dict[str, Any], longest_min: int | None, asks: dict[str, Any]
) -> None:
    machine = Machine(device="cpu", nodes=1, ranks_per_node=2, cores=8)
    site = Site(cluster=ClusterConfig(kind="slurm", **keys), machine=machine, longest_min=longest_min)
    assert probe._asks(site) == asks
