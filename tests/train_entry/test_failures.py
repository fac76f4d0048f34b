from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from train_entry.contract import FailureKind, Phase
from train_entry.failures import DivergedError, failure_from, kind_of


def caught(function: object) -> BaseException:
    with pytest.raises(RuntimeError) as info:
        function()  # type: ignore[operator]
    return info.value


@pytest.mark.parametrize(
    ("error", "phase", "kind"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), Phase.STEPS, FailureKind.GPU_OOM),
        (RuntimeError("CUDA error: out of memory"), Phase.RENDEZVOUS, FailureKind.GPU_OOM),
        (dist.DistBackendError("Cuda failure 2 'out of memory'"), Phase.ENGINE, FailureKind.GPU_OOM),
        (MemoryError(), Phase.DATA, FailureKind.HOST_OOM),
        (DivergedError("loss is nan"), Phase.STEPS, FailureKind.DIVERGED),
        (ValueError("batch sizes"), Phase.ENGINE, FailureKind.BAD_CONFIG),
        (AssertionError("batch sizes"), Phase.ENGINE, FailureKind.BAD_CONFIG),
        (ValueError("a bug"), Phase.STEPS, FailureKind.CRASHED),
        (dist.DistBackendError("NCCL error"), Phase.RENDEZVOUS, FailureKind.COMMS),
        (dist.DistBackendError("NCCL error"), Phase.STEPS, FailureKind.PEER_LOST),
        (dist.DistNetworkError("refused"), Phase.RENDEZVOUS, FailureKind.COMMS),
        (dist.DistStoreError("timeout"), Phase.MODEL, FailureKind.PEER_LOST),
        (RuntimeError("[pair.cc:547] Connection closed by peer [::1]"), Phase.STEPS, FailureKind.PEER_LOST),
        (RuntimeError("read: Connection reset by peer"), Phase.RENDEZVOUS, FailureKind.COMMS),
        (RuntimeError("Timed out waiting 5000ms for recv"), Phase.STEPS, FailureKind.PEER_LOST),
        (RuntimeError("shapes do not match"), Phase.STEPS, FailureKind.CRASHED),
        (KeyError("x"), Phase.IMPORTS, FailureKind.CRASHED),
        (NotImplementedError("unsupported mix of dtypes"), Phase.ENGINE, FailureKind.BAD_CONFIG),
        (RuntimeError("Error building extension 'cpu_adam'"), Phase.ENGINE, FailureKind.CRASHED),
        (OSError(28, "No space left on device"), Phase.ENGINE, FailureKind.CRASHED),
    ],
)
def test_an_exception_becomes_its_kind(error: BaseException, phase: Phase, kind: FailureKind) -> None:
    assert kind_of(error, phase) is kind


def test_more_memory_than_the_host_has_is_host_oom() -> None:
    error = caught(lambda: torch.empty(2**60, dtype=torch.uint8))
    assert kind_of(error, Phase.MODEL) is FailureKind.HOST_OOM


def test_what_deepspeed_refuses_is_a_bad_configuration(deepspeed_config_error: type[Exception]) -> None:
    assert kind_of(deepspeed_config_error("no"), Phase.ENGINE) is FailureKind.BAD_CONFIG


def test_a_failure_has_one_line_and_the_whole_traceback() -> None:
    failure = failure_from(caught(lambda: torch.zeros(2) @ torch.zeros(3)), rank=1, phase=Phase.STEPS)
    assert failure.message.startswith("RuntimeError: ")
    assert "\n" not in failure.message
    assert "torch.zeros(3)" in failure.evidence
    assert (failure.rank, failure.phase) == (1, Phase.STEPS)


def test_pinned_memory_that_runs_out_is_the_hosts() -> None:
    def pin_memory() -> None:
        raise RuntimeError("CUDA error: out of memory")

    assert kind_of(caught(pin_memory), Phase.ENGINE) is FailureKind.HOST_OOM


def test_an_assertion_without_words_shows_its_line() -> None:
    def swap_in() -> None:
        assert sum([1]) == 2

    with pytest.raises(AssertionError) as info:
        swap_in()
    info.value.args = ()  # pytest's message, which a rank does not have
    failure = failure_from(info.value, rank=0, phase=Phase.STEPS)
    assert failure.message == "AssertionError: assert sum([1]) == 2"


def test_an_operator_that_cannot_be_compiled_here_is_a_bad_configuration(
    deepspeed_builder: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deepspeed_builder, "is_compatible", lambda self, verbose: False)
    error = caught(lambda: deepspeed_builder().jit_load())
    assert kind_of(error, Phase.ENGINE) is FailureKind.BAD_CONFIG


# The message of torch 2.11 on a GPU that is not full.
OVER_ITS_LIMIT = (
    "CUDA out of memory. Tried to allocate 1002.00 MiB. GPU 0 has a total capacity of 139.80 GiB of which "
    "125.05 GiB is free. Including non-PyTorch memory, this process has 14.75 GiB memory in use. 14.00 GiB "
    "allowed; Of the allocated memory 13.31 GiB is allocated by PyTorch, and 412.51 MiB is reserved by "
    "PyTorch but unallocated."
)


def test_running_out_under_a_limit_names_the_limit_first() -> None:
    failure = failure_from(torch.OutOfMemoryError(OVER_ITS_LIMIT), rank=0, phase=Phase.STEPS)
    assert failure.kind is FailureKind.GPU_OOM
    assert failure.message.startswith(
        "OutOfMemoryError: limited to 14.00 GiB of the GPU: CUDA out of memory. Tried to allocate 1002.00 MiB"
    )


def test_running_out_of_the_whole_card_names_no_limit() -> None:
    without = OVER_ITS_LIMIT.replace("14.00 GiB allowed; ", "")
    failure = failure_from(torch.OutOfMemoryError(without), rank=0, phase=Phase.STEPS)
    assert failure.message.startswith("OutOfMemoryError: CUDA out of memory. Tried")
