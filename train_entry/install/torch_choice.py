"""Choose the torch for a machine: the one it has, or the newest that its NVIDIA driver supports.

venv.py imports this module under the machine's own python3, so it uses only the standard library.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

# For a driver's CUDA version, the newest torch whose PyPI wheel it can run; newest first. The CUDA version of
# a wheel follows from the nvidia-* packages that it requires: torch 2.6 has 12.4, 2.7 12.6, 2.8 to 2.10 12.8,
# 2.11 and later 13.0.
TORCH_FOR_CUDA = (
    ((13, 0), "2.13.0"),
    ((12, 8), "2.10.0"),
    ((12, 6), "2.7.1"),
    ((12, 4), "2.6.0"),
    (
        (12, 0),
        "2.6.0",
    ),  # a driver also runs later minor versions of its CUDA, except for code compiled just in time
)
TORCH_WITHOUT_GPU = "2.13.0"  # as in constraints.txt
OLDEST_TORCH = (2, 6)  # as in pyproject.toml
SMI_TIMEOUT_S = 120  # nvidia-smi loads the driver if no process holds it: tens of seconds with 8 GPUs

# Prints the version and the requirements of the torch that is imported, and the names of all packages.
PROBE = """
import json, torch
from importlib import metadata
names = [found.metadata["Name"] for found in metadata.distributions()]
print(json.dumps([metadata.version("torch"), metadata.requires("torch") or [], names]))
"""


class InstallError(Exception):
    """An error whose text the user sees as it is, without a traceback."""


class Torch(NamedTuple):
    """An installed torch. It is never replaced."""

    version: str
    requires: Sequence[str]
    packages: Sequence[str]  # all packages that its Python sees


def torch_requirement(driver_cuda: tuple[int, int] | None) -> str:
    """The requirement to give to pip, for the highest CUDA version of the driver (None: no driver)."""
    if driver_cuda is None:
        return f"torch=={TORCH_WITHOUT_GPU}"  # pip prefers the +cpu build if one of its sources has it
    for cuda, version in TORCH_FOR_CUDA:
        if driver_cuda >= cuda:
            return f"torch=={version},!={version}+cpu"
    has, least = (".".join(map(str, cuda)) for cuda in (driver_cuda, TORCH_FOR_CUDA[-1][0]))
    raise InstallError(
        f"the NVIDIA driver supports CUDA {has} at most, torch needs {least}: update the driver"
    )


def parse_driver_cuda(smi: str) -> tuple[int, int] | None:
    """Read the CUDA version from the heading of nvidia-smi. Newer drivers call it `CUDA UMD Version`."""
    found = re.search(r"CUDA (?:UMD )?Version\s*:\s*(\d+)\.(\d+)", smi)
    return (int(found[1]), int(found[2])) if found else None


def driver_cuda() -> tuple[int, int] | None:
    """The highest CUDA version that this machine's driver supports; None without a working NVIDIA GPU."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        smi = subprocess.run([program], capture_output=True, text=True, timeout=SMI_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise InstallError("nvidia-smi does not answer; give the CUDA to install for: --cuda X.Y") from None
    if smi.returncode != 0 or "No devices" in smi.stdout:
        print("nvidia-smi finds no GPU")
        return None
    cuda = parse_driver_cuda(smi.stdout)
    if cuda is None:
        raise InstallError("nvidia-smi reports no CUDA version; give the one to install for: --cuda X.Y")
    return cuda


def find_torch(python: Path) -> Torch | None:
    """Return the torch that this Python imports; None if it has none. Raise InstallError if it is too old."""
    if not python.exists():
        return None
    probe = subprocess.run([str(python), "-P", "-W", "ignore", "-c", PROBE], capture_output=True, text=True)
    if probe.returncode != 0:
        return None
    torch = Torch(*json.loads(probe.stdout.splitlines()[-1]))
    if tuple(int(part) for part in torch.version.split(".")[:2]) < OLDEST_TORCH:
        raise InstallError(
            f"{python} has torch {torch.version}, but 2.6 or newer is needed: use another Python"
        )
    return torch


def constraints_beside(torch: str, given_up: Collection[str], pins: Sequence[str]) -> list[str]:
    """Return the pins to use with another torch than the pinned one: without the packages `given_up`."""
    names = {plain_name(name) for name in given_up} | {"torch"}
    return [pin for pin in pins if plain_name(pin) not in names] + [f"torch=={torch}"]


def plain_name(requirement: str) -> str:
    """The package name at the start of a requirement, normalized as pip does it."""
    name = re.match(r"[A-Za-z0-9._-]+", requirement)
    return re.sub(r"[-_.]+", "-", name[0]).lower() if name else ""
