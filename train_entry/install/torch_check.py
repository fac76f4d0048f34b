"""Check that torch sees this machine's GPUs: `python -m train_entry.install.torch_check`; status 2 if not.

torch itself silently falls back to the CPU, and a sweep would then measure the CPU instead.
"""

from __future__ import annotations

import os
import platform
import re
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata

REMEDY = "`make clean install` chooses a torch for this driver; `make clean install CUDA=X.Y` an older one"


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """A GPU that torch sees."""

    name: str
    capability: tuple[int, int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Driver:
    """The NVIDIA driver and its GPUs according to NVML, even if torch cannot use them."""

    version: str
    cuda: str  # the highest version that it supports
    gpus: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    python: str
    torch: str
    torch_cuda: str | None  # the CUDA version that torch is built for; None: a CPU build
    kernels: tuple[str, ...]  # the architectures of torch's kernels, such as sm_90 or compute_90
    deepspeed: str
    gpus: tuple[Gpu, ...] = ()
    driver: Driver | None = None
    hidden: bool = False  # CUDA_VISIBLE_DEVICES hides all GPUs on purpose


def runs_on(capability: tuple[int, int], kernels: Sequence[str]) -> bool:
    """Return whether any kernel runs on a GPU of this compute capability.

    sm_XY runs on the same major version with the same or a later minor one, compute_XY on all later versions.
    """
    for kind, major, minor in re.findall(r"(sm|compute)_(\d+)(\d)", " ".join(kernels)):
        built = (int(major), int(minor))
        if built <= capability and (kind == "compute" or built[0] == capability[0]):
            return True
    return False


def problem(facts: Facts) -> str | None:
    """Return why training would not use this machine's GPUs, with the remedy; None if it would use them."""
    driver = facts.driver
    if driver and driver.gpus and not facts.gpus and not facts.hidden:
        build = f"built for CUDA {facts.torch_cuda}" if facts.torch_cuda else "a CPU build"
        return (
            f"torch does not see the {len(driver.gpus)} x {driver.gpus[0]}: driver {driver.version} supports"
            f" CUDA {driver.cuda} at most, and torch {facts.torch} is {build}. {REMEDY}"
        )
    for gpu in facts.gpus:
        if not runs_on(gpu.capability, facts.kernels):
            has = ", ".join(facts.kernels)
            sm = "sm_{}{}".format(*gpu.capability)
            return f"torch {facts.torch} has no kernels for {gpu.name} ({sm}), only {has}. {REMEDY}"
    return None


def summary(facts: Facts) -> str:
    names = [gpu.name for gpu in facts.gpus]
    gpus = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) or "no GPU"
    return f"Python {facts.python}, torch {facts.torch}, DeepSpeed {facts.deepspeed}, {gpus}"


def read_driver() -> Driver | None:
    """Return what NVML reports; None without an NVIDIA driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    cuda = pynvml.nvmlSystemGetCudaDriverVersion()  # 13000 is 13.0
    handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
    return Driver(
        version=pynvml.nvmlSystemGetDriverVersion(),
        cuda=f"{cuda // 1000}.{cuda % 1000 // 10}",
        gpus=tuple(pynvml.nvmlDeviceGetName(handle) for handle in handles),
    )


def gather() -> Facts:
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's long warnings about an old driver or GPU; problem() says it
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        properties = [torch.cuda.get_device_properties(index) for index in range(count)]
    return Facts(
        python=platform.python_version(),
        torch=torch.__version__,
        torch_cuda=torch.version.cuda,
        kernels=tuple(torch.cuda.get_arch_list()),
        deepspeed=metadata.version("deepspeed"),
        gpus=tuple(Gpu(name=found.name, capability=(found.major, found.minor)) for found in properties),
        driver=read_driver(),
        hidden=os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"),
    )


def main() -> int:
    facts = gather()
    wrong = problem(facts)
    print(wrong or summary(facts), file=sys.stderr if wrong else sys.stdout)
    return 2 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
