"""The operators of DeepSpeed that are compiled on each kind of machine, and the handling of failures."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from train_entry.install import operators
from train_entry.install.operators import (
    ASYNC_IO,
    CPU_ADAM,
    OPS,
    SHM_COMM,
    Op,
    build,
    has_libaio,
    listing,
    why_left_out,
)


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of compiled operators, which does not exist yet."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    monkeypatch.setenv("MAX_JOBS", "1")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    return tmp_path / "extensions"


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of the only c++ on PATH. A test writes the program."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    (tmp_path / "bin").mkdir()
    return tmp_path / "bin" / "c++"


def write_program(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def compiled(op: Op, directory: Path) -> None:
    (directory / op.folder).mkdir(parents=True)
    (directory / op.folder / f"{op.folder}.so").touch()


def test_on_cpus_everything_is_compiled_that_can_be() -> None:
    assert [why_left_out(op, gpus=False, libaio=True) for op in OPS] == [None] * len(OPS)


def test_on_gpus_only_what_needs_no_nvcc() -> None:
    assert [op for op in OPS if why_left_out(op, gpus=True, libaio=True) is None] == [CPU_ADAM]


def test_without_libaio_the_package_is_named() -> None:
    assert why_left_out(CPU_ADAM, gpus=False, libaio=False) is None
    assert "apt-get install libaio-dev" in (why_left_out(ASYNC_IO, gpus=False, libaio=False) or "")


def test_libaio_is_there_where_a_program_links_with_it(compiler: Path) -> None:
    assert not has_libaio()  # no compiler
    compiler.touch(mode=0o644)
    assert not has_libaio()  # one that we may not run
    write_program(compiler, "exit 1")
    assert not has_libaio()
    write_program(compiler, 'case "$*" in *-laio) exit 0;; esac; exit 1')
    assert has_libaio()


def test_the_list_says_what_is_there_and_what_is_not(directory: Path, compiler: Path) -> None:
    compiled(SHM_COMM, directory)
    lines = listing(gpus=False).splitlines()
    assert [line.split()[0] for line in lines] == [op.folder for op in OPS]
    assert lines[0].endswith("every job on CPUs  ready")
    assert lines[1].endswith("not compiled")
    assert "libaio is missing" in lines[2]


@pytest.mark.parametrize(("broken", "status"), [(SHM_COMM, 1), (CPU_ADAM, 0), (ASYNC_IO, 0)])
def test_only_an_operator_that_all_jobs_need_may_fail_an_install(
    directory: Path, monkeypatch: pytest.MonkeyPatch, broken: Op, status: int
) -> None:
    monkeypatch.setattr(operators, "has_libaio", lambda: True)
    monkeypatch.setattr(operators, "load", lambda op: op is not broken)
    assert build(gpus=False) == status


def test_what_is_compiled_says_how_long_it_takes(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(operators, "has_libaio", lambda: False)
    monkeypatch.setattr(operators, "load", lambda op: True)
    compiled(SHM_COMM, directory)
    build(gpus=False)
    assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()] == [
        ["async_io", "(for"],  # not compiled
        ["compiling", "cpu_adam"],
        ["DeepSpeed's", "operators"],
    ]


def test_only_locks_of_builders_that_must_be_gone_are_deleted(tmp_path: Path) -> None:
    old, young = tmp_path / "a" / "lock", tmp_path / "b" / "lock"
    for lock in (old, young):
        lock.parent.mkdir()
        lock.touch()
    os.utime(old, (0, time.time() - operators.STALE_LOCK_S))
    assert operators.remove_stale_locks(tmp_path, operators.STALE_LOCK_S) == [old]
    assert young.exists()


def test_each_rank_removes_stale_locks_before_it_could_wait_for_one(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compiled(ASYNC_IO, directory)
    lock = directory / ASYNC_IO.folder / "lock"
    lock.touch()
    os.utime(lock, (0, 0))
    assert operators.prepare_extensions() == directory
    assert not lock.exists()
    assert capsys.readouterr().out == f"removed a stale compile lock: {lock}\n"


def test_a_lock_that_another_rank_removes_first_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(operators, "compile_locks", lambda directory: [directory / "gone" / "lock"])
    assert operators.remove_stale_locks(tmp_path, operators.STALE_LOCK_S) == []


def test_ninja_is_found_beside_the_interpreter(directory: Path, compiler: Path) -> None:
    assert operators.prepare_extensions() == directory
    assert os.environ["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)
