"""The messages for machines whose torch does or does not see the GPUs."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from train_entry.install import torch_check
from train_entry.install.torch_check import Driver, Facts, Gpu, main, problem, runs_on, summary

H200 = Gpu(name="NVIDIA H200", capability=(9, 0))
DRIVER = Driver(version="550.54", cuda="12.4", gpus=("NVIDIA H200", "NVIDIA H200"))
CPU = Facts(python="3.12.1", torch="2.13.0+cpu", torch_cuda=None, kernels=(), deepspeed="0.19.8")
SEEN = replace(CPU, torch="2.6.0", torch_cuda="12.4", kernels=("sm_90",), gpus=(H200, H200), driver=DRIVER)


def test_a_machine_without_a_gpu_is_fine() -> None:
    assert problem(CPU) is None
    assert summary(CPU) == "Python 3.12.1, torch 2.13.0+cpu, DeepSpeed 0.19.8, no GPU"


def test_gpus_that_torch_sees_are_counted_by_name() -> None:
    assert problem(SEEN) is None
    assert summary(SEEN).endswith("DeepSpeed 0.19.8, 2 x NVIDIA H200")


def test_a_torch_too_new_for_the_driver_names_both_versions() -> None:
    said = problem(replace(SEEN, torch="2.13.0", torch_cuda="13.0", gpus=()))
    assert said is not None
    assert "2 x NVIDIA H200" in said
    assert "driver 550.54 supports CUDA 12.4 at most, and torch 2.13.0 is built for CUDA 13.0." in said
    assert "\n" not in said


def test_a_cpu_build_beside_a_gpu_is_an_error() -> None:
    assert "torch 2.13.0+cpu is a CPU build" in str(problem(replace(CPU, driver=DRIVER)))


def test_gpus_hidden_on_purpose_are_not_missed() -> None:
    assert problem(replace(CPU, driver=DRIVER, hidden=True)) is None


def test_a_gpu_that_the_build_has_no_kernels_for_is_an_error() -> None:
    old = Gpu(name="Tesla V100", capability=(7, 0))
    said = str(problem(replace(SEEN, gpus=(old,), kernels=("sm_75", "sm_90"))))
    assert "no kernels for Tesla V100 (sm_70), only sm_75, sm_90." in said


@pytest.mark.parametrize(
    ("capability", "kernels", "runs"),
    [
        ((9, 0), ("sm_80", "sm_90a"), True),
        ((8, 9), ("sm_80",), True),
        ((8, 0), ("sm_86",), False),
        ((12, 1), ("sm_90", "sm_120"), True),
        ((10, 0), ("sm_90",), False),
        ((10, 0), ("sm_90", "compute_90"), True),
        ((9, 0), ("compute_120",), False),
    ],
)
def test_kernels_run_on_their_own_generation_and_portable_ones_on_later(
    capability: tuple[int, int], kernels: tuple[str, ...], runs: bool
) -> None:
    assert runs_on(capability, kernels) is runs


def test_a_problem_is_one_line_on_stderr_and_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch_check, "gather", lambda: replace(CPU, driver=DRIVER))
    assert main() == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1


def test_the_facts_of_this_machine_are_true() -> None:
    facts = torch_check.gather()
    assert facts.python.startswith(f"{sys.version_info.major}.{sys.version_info.minor}.")
    assert facts.torch.startswith("2.")
    assert facts.deepspeed
