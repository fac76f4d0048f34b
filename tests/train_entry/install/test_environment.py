"""The choice of torch, the messages for a bare machine, and concurrent installs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from train_entry.install import environment, operators, torch_choice
from train_entry.install.environment import Environment, main, missing_packages, only_one
from train_entry.install.torch_choice import (
    TORCH_FOR_CUDA,
    TORCH_WITHOUT_GPU,
    InstallError,
    constraints_beside,
    driver_cuda,
    find_torch,
    parse_driver_cuda,
    torch_requirement,
)

SMI = "| NVIDIA-SMI 570.86.15     Driver Version: 570.86.15     CUDA Version: 12.8     |"


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder on PATH."""
    found = tmp_path / "programs"
    found.mkdir()
    monkeypatch.setenv("PATH", str(found))
    return found


def write_program(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("driver", "version"),
    [
        ((14, 1), "2.13.0"),
        ((13, 0), "2.13.0"),
        ((12, 9), "2.10.0"),
        ((12, 8), "2.10.0"),
        ((12, 6), "2.7.1"),
        ((12, 5), "2.6.0"),
        ((12, 2), "2.6.0"),
    ],
)
def test_a_driver_gets_the_newest_torch_that_it_runs(driver: tuple[int, int], version: str) -> None:
    assert torch_requirement(driver) == f"torch=={version},!={version}+cpu"


def test_without_a_driver_pip_may_choose_a_cpu_build() -> None:
    assert torch_requirement(None) == f"torch=={TORCH_WITHOUT_GPU}"


def test_too_old_a_driver_is_told_what_it_has_and_what_is_needed() -> None:
    with pytest.raises(
        InstallError, match=r"^the NVIDIA driver supports CUDA 11\.8 at most, torch needs 12\.0"
    ):
        torch_requirement((11, 8))


def test_the_table_is_newest_first_and_ends_at_the_oldest_torch_allowed() -> None:
    cudas = [cuda for cuda, _ in TORCH_FOR_CUDA]
    assert cudas == sorted(cudas, reverse=True)
    oldest = ".".join(map(str, torch_choice.OLDEST_TORCH))
    assert TORCH_FOR_CUDA[-1][1].startswith(f"{oldest}.")
    assert f'"torch>={oldest}"' in (environment.ROOT / "pyproject.toml").read_text()


def test_the_torch_without_a_gpu_is_the_pinned_one() -> None:
    assert f"torch=={TORCH_WITHOUT_GPU}" in environment.PINS.read_text().splitlines()


@pytest.mark.parametrize(
    ("text", "cuda"),
    [(SMI, (12, 8)), ("| CUDA UMD Version: 13.2  |", (13, 2)), ("| CUDA Version: N/A |", None), ("", None)],
)
def test_the_heading_of_nvidia_smi_names_the_drivers_cuda(text: str, cuda: tuple[int, int] | None) -> None:
    assert parse_driver_cuda(text) == cuda


def test_a_machine_without_nvidia_smi_has_no_driver(programs: Path) -> None:
    assert driver_cuda() is None


def test_the_driver_is_asked_through_nvidia_smi(programs: Path) -> None:
    write_program(programs / "nvidia-smi", f"echo '{SMI}'")
    assert driver_cuda() == (12, 8)


def test_an_nvidia_smi_that_reaches_no_driver_means_no_gpu(programs: Path) -> None:
    write_program(programs / "nvidia-smi", "exit 9")
    assert driver_cuda() is None


def test_an_nvidia_smi_that_names_no_cuda_asks_the_user(programs: Path) -> None:
    write_program(programs / "nvidia-smi", "echo hello")
    with pytest.raises(InstallError, match="--cuda"):
        driver_cuda()


def test_a_python_without_torch_offers_none(tmp_path: Path) -> None:
    python = write_program(tmp_path / "python", "exit 1")
    assert find_torch(python) is None
    assert find_torch(tmp_path / "absent") is None


def test_a_vendors_torch_is_found_under_the_chatter_of_its_import(tmp_path: Path) -> None:
    python = write_program(
        tmp_path / "python", """echo hello; echo '["2.7.0a0+nv25", ["sympy"], ["numpy"]]'"""
    )
    found = find_torch(python)
    assert found == ("2.7.0a0+nv25", ["sympy"], ["numpy"])


def test_a_torch_that_is_too_old_is_an_error_and_not_replaced(tmp_path: Path) -> None:
    python = write_program(tmp_path / "python", """echo '["1.13.1", [], []]'""")
    with pytest.raises(InstallError, match=r"has torch 1\.13\.1, but 2\.6 or newer is needed"):
        find_torch(python)


def test_pins_give_way_to_what_a_kept_torch_came_with() -> None:
    pins = ["# a comment", "sympy==1.14.0", "torch==2.13.0", "typing_extensions==4.16.0", "torchmetrics==1"]
    kept = constraints_beside("2.6.0", ["sympy==1.13.1; python_version >= '3.9'", "typing-extensions"], pins)
    assert kept == ["# a comment", "torchmetrics==1", "torch==2.6.0"]


def test_all_that_a_bare_machine_lacks_is_named_at_once(tmp_path: Path) -> None:
    missing = missing_packages(lambda name: None, lambda name: None, tmp_path)
    assert list(missing) == ["python3-venv", "g++", "python3-dev"]


def test_a_machine_that_has_everything_lacks_nothing(tmp_path: Path) -> None:
    (tmp_path / "Python.h").touch()
    assert missing_packages(lambda name: True, lambda name: name, tmp_path) == {}


def test_a_missing_compiler_is_one_line_with_debians_package(
    programs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--venv", str(tmp_path / "venv")]) == 1
    assert re.fullmatch(
        r"error: missing: .*a C\+\+ compiler.*apt-get install .*g\+\+.*\n", capsys.readouterr().err
    )
    assert not (tmp_path / "venv").exists()


def test_an_old_python_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(environment, "OLDEST_PYTHON", (4, 0))
    assert main([]) == 1
    assert re.fullmatch(r"error: Python 3\.11 or newer is needed; .*\n", capsys.readouterr().err)


def test_a_fresh_environment_is_left_alone_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "check_machine", lambda: None)
    fresh = Environment(tmp_path)
    fresh.stamp(dev=False).touch()
    assert main(["--venv", str(tmp_path)]) == 0
    assert not fresh.log.exists()


def test_an_environment_older_than_its_pins_is_not_fresh(tmp_path: Path) -> None:
    environment = Environment(tmp_path)
    environment.stamp(dev=True).touch()
    assert environment.is_fresh(dev=True)
    assert not environment.is_fresh(dev=False)
    os.utime(environment.stamp(dev=True), (0, 0))
    assert not environment.is_fresh(dev=True)


def test_a_failed_step_shows_the_end_of_the_log(tmp_path: Path) -> None:
    environment = Environment(tmp_path)
    with pytest.raises(InstallError, match=r"greeting: failed\. The end of .*install\.log:\nhello\n"):
        environment.step("greeting", ["sh", "-c", "echo hello; exit 3"])


def test_a_step_finds_the_programs_of_the_environment_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = Environment(tmp_path)
    (tmp_path / "bin").mkdir()
    write_program(tmp_path / "bin" / "ninja", "echo ours")
    environment.step("building", ["ninja"])
    assert environment.log.read_text().endswith("$ ninja\nours\n")
    assert re.fullmatch(r"building \.\.\. \d+ s\n", capsys.readouterr().out)


def test_a_second_install_waits_for_the_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    venv = tmp_path / "venv"
    events: list[str] = []

    def second() -> None:
        with only_one(venv):
            events.append("second")

    waiting = threading.Thread(target=second)
    with only_one(venv):
        waiting.start()
        waiting.join(timeout=0.2)
        events.append("first")
    waiting.join()
    assert events == ["first", "second"]
    assert "waiting for another install" in capsys.readouterr().out


def test_a_terminated_step_takes_its_childrens_children_along(tmp_path: Path) -> None:
    program = (
        "import signal, sys; from pathlib import Path;"
        "from train_entry.install.environment import Environment;"
        "signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number));"
        f"Environment(Path({str(tmp_path)!r})).step('sleeping', ['sh', '-c', 'sleep 60 & echo $!; wait'])"
    )
    log = tmp_path / "install.log"
    with subprocess.Popen(
        [sys.executable, "-c", program], cwd=environment.ROOT, stdout=subprocess.PIPE
    ) as started:
        while not (log.exists() and re.search(r"^\d+$", log.read_text(), re.MULTILINE)):
            assert started.poll() is None
        time.sleep(0.2)  # by now `step` waits for the command
        started.send_signal(signal.SIGTERM)
        assert started.wait(timeout=30) == 128 + signal.SIGTERM
    sleeper = Path("/proc", log.read_text().splitlines()[-1], "cmdline")
    assert not sleeper.exists() or sleeper.read_bytes() == b""  # gone, or a zombie


def test_the_installer_imports_nothing_that_a_bare_python_lacks() -> None:
    bare = [
        sys.executable,
        "-I",
        "-S",
        str(environment.ROOT / "train_entry" / "install" / "environment.py"),
        "--help",
    ]
    assert "--venv" in subprocess.run(bare, capture_output=True, text=True, check=True).stdout


def a_python(environment: Environment, status: int) -> Environment:
    """Give the environment an interpreter that only prints a word and exits with `status`."""
    environment.python.parent.mkdir(parents=True)
    write_program(environment.python, f"echo compiling; exit {status}")
    return environment


def test_on_gpus_a_failed_operator_is_one_line_and_no_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a_python(Environment(tmp_path), status=1).compile_ops(gpus=True)
    assert "the first trial that offloads its optimizer compiles it" in capsys.readouterr().out


def test_on_cpus_a_failed_operator_fails_the_install(tmp_path: Path) -> None:
    with pytest.raises(InstallError, match="compiling"):
        a_python(Environment(tmp_path), status=1).compile_ops(gpus=False)


def test_what_is_left_out_is_said_on_the_screen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(operators, "has_libaio", lambda: False)
    a_python(Environment(tmp_path), status=0).compile_ops(gpus=False)
    assert "async_io (for offload to NVMe) not compiled: libaio is missing" in capsys.readouterr().out


def test_compiling_takes_over_from_a_killed_install_but_not_from_a_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, young = (tmp_path / "torch_extensions" / name / "lock" for name in ("cpu_adam", "async_io"))
    for lock in (old, young):
        lock.parent.mkdir(parents=True)
        lock.touch()
    os.utime(old, (0, time.time() - operators.STALE_LOCK_S))
    a_python(Environment(tmp_path), status=0).compile_ops(gpus=False)
    assert (old.exists(), young.exists()) == (False, True)
    assert f"if none does (a killed install), delete {young}\n" in capsys.readouterr().out


@pytest.fixture
def compiled_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Replace all install steps, and return the list in which they record whether they compile for GPUs."""
    for step in ("create", "install_torch", "install_project", "verify"):
        monkeypatch.setattr(Environment, step, lambda *arguments: None)
    noted: list[bool] = []
    monkeypatch.setattr(Environment, "compile_ops", lambda self, gpus: noted.append(gpus))
    return noted


def test_a_login_node_compiles_nothing_for_the_processors_of_other_nodes(
    programs: Path, tmp_path: Path, compiled_for: list[bool], capsys: pytest.CaptureFixture[str]
) -> None:
    environment.install(Environment(tmp_path), (12, 8), dev=False)
    assert compiled_for == []
    assert f"{environment.OPS_ELSEWHERE}\n" in capsys.readouterr().out


@pytest.mark.parametrize("smi", [SMI, "hello"])
def test_a_cuda_asked_for_beside_a_driver_compiles_here(
    programs: Path, tmp_path: Path, compiled_for: list[bool], smi: str
) -> None:
    write_program(programs / "nvidia-smi", f"echo '{smi}'")
    environment.install(Environment(tmp_path), (12, 6), dev=False)
    assert compiled_for == [True]
