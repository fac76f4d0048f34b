"""Which torch suits a machine: the one it has, or the newest that its NVIDIA driver runs.

Imported by install.py under the machine's own python3: standard library only.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import NamedTuple

# The newest torch whose wheel on PyPI is built for a CUDA that the driver runs, newest first. Read from the
# nvidia-* packages that each release requires: 2.6 12.4, 2.7 12.6, 2.8 to 2.10 12.8, 2.11 and later 13.0.
TORCH_FOR_CUDA = (
    ((13, 0), "2.13.0"),
    ((12, 8), "2.10.0"),
    ((12, 6), "2.7.1"),
    ((12, 4), "2.6.0"),
    (
        (12, 0),
        "2.6.0",
    ),  # a driver runs later minor versions of its own CUDA, all but code compiled on the fly
)
TORCH_WITHOUT_GPU = "2.13.0"  # as in constraints.txt
OLDEST_TORCH = (2, 6)  # as in pyproject.toml
SMI_TIMEOUT_S = 120  # it loads the driver first, where no process keeps it loaded: tens of seconds on 8 GPUs

# Prints what `import torch` finds: its version, what it requires, and the names of all packages there.
PROBE = """
import json, torch
from importlib import metadata
names = [found.metadata["Name"] for found in metadata.distributions()]
print(json.dumps([metadata.version("torch"), metadata.requires("torch") or [], names]))
"""


class InstallError(Exception):
    """Said to the user as it is, without a traceback."""


class Torch(NamedTuple):
    """One that is already there, and is never replaced."""

    version: str
    requires: Sequence[str]
    packages: Sequence[str]  # all that its Python sees


def torch_requirement(driver_cuda: tuple[int, int] | None) -> str:
    """What pip is asked for, given the highest CUDA that the driver runs; None without a driver."""
    if driver_cuda is None:
        return f"torch=={TORCH_WITHOUT_GPU}"  # pip prefers the +cpu build where one of its sources has it
    for cuda, version in TORCH_FOR_CUDA:
        if driver_cuda >= cuda:
            return f"torch=={version},!={version}+cpu"
    has, least = (".".join(map(str, cuda)) for cuda in (driver_cuda, TORCH_FOR_CUDA[-1][0]))
    raise InstallError(
        f"the NVIDIA driver here runs CUDA {has} at most, torch needs {least}: update the driver"
    )


def parse_driver_cuda(smi: str) -> tuple[int, int] | None:
    """From the heading of nvidia-smi, which newer drivers word `CUDA UMD Version`."""
    found = re.search(r"CUDA (?:UMD )?Version\s*:\s*(\d+)\.(\d+)", smi)
    return (int(found[1]), int(found[2])) if found else None


def driver_cuda() -> tuple[int, int] | None:
    """The highest CUDA that this machine's driver runs; None where no NVIDIA GPU answers."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        smi = subprocess.run([program], capture_output=True, text=True, timeout=SMI_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise InstallError("nvidia-smi does not answer; say which CUDA to install for: --cuda X.Y") from None
    if smi.returncode != 0 or "No devices" in smi.stdout:
        print("nvidia-smi finds no GPU here")
        return None
    cuda = parse_driver_cuda(smi.stdout)
    if cuda is None:
        raise InstallError("nvidia-smi names no CUDA version; say which one to install for: --cuda X.Y")
    return cuda


def find_torch(python: Path) -> Torch | None:
    """The one that this Python imports, if any."""
    if not python.exists():
        return None
    probe = subprocess.run([str(python), "-P", "-W", "ignore", "-c", PROBE], capture_output=True, text=True)
    if probe.returncode != 0:
        return None
    torch = Torch(*json.loads(probe.stdout.splitlines()[-1]))
    if tuple(int(part) for part in torch.version.split(".")[:2]) < OLDEST_TORCH:
        raise InstallError(
            f"{python} has torch {torch.version}, and 2.6 or newer is needed: use another Python"
        )
    return torch


def constraints_beside(torch: str, given_up: Collection[str], pins: Sequence[str]) -> list[str]:
    """The pins beside a torch that is not the pinned one: what that torch came with stays as it is."""
    names = {plain_name(name) for name in given_up} | {"torch"}
    return [pin for pin in pins if plain_name(pin) not in names] + [f"torch=={torch}"]


def plain_name(requirement: str) -> str:
    """The name that a requirement starts with, spelled as pip compares names."""
    name = re.match(r"[A-Za-z0-9._-]+", requirement)
    return re.sub(r"[-_.]+", "-", name[0]).lower() if name else ""
