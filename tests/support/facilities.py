"""Programs and libraries that a test needs beyond README's list: a marker names each. CI has all but a GPU.

`make test` runs these tests in its second half, so that the first one needs nothing that may be missing.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from sweeps.cluster.node.devices import find_gpus
from sweeps.cluster.node.facilities import has_libaio
from train_entry.install.operators import ASYNC_IO, extensions

CHROMIUM, CHROMEDRIVER = Path("/usr/bin/chromium"), Path("/usr/bin/chromedriver")


def sshd_program() -> str | None:
    return shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")


def has_async_io() -> bool:
    return has_libaio() and ASYNC_IO.is_there(extensions())


# By marker: whether the facility is there, and the reason to print where it is not.
FACILITIES: dict[str, tuple[Callable[[], bool], str]] = {
    "browser": (
        lambda: CHROMIUM.exists() and CHROMEDRIVER.exists(),
        "needs chromium and chromium-driver: apt-get install chromium chromium-driver",
    ),
    "gpu": (lambda: bool(find_gpus()), "needs a GPU that NVML sees"),
    "libaio": (
        has_async_io,
        "needs DeepSpeed's async_io: apt-get install libaio-dev; python -m train_entry.install.operators",
    ),
    "sshd": (lambda: sshd_program() is not None, "needs sshd: apt-get install openssh-server"),
}
NOT_IN_CI = ("gpu",)


def missing(reason: str, details: str = "", is_in_ci: bool = True) -> NoReturn:
    """Skip a test for want of a facility. In CI fail it instead, if CI must have that facility."""
    if is_in_ci and os.environ.get("CI") == "true":
        pytest.fail(f"{reason}\n{details}".strip())
    pytest.skip(reason)


def require_facilities(test: pytest.Item) -> None:
    """Skip a test, or fail it in CI, if this machine lacks what one of its markers names."""
    for marker, (is_there, reason) in FACILITIES.items():
        if test.get_closest_marker(marker) is not None and not is_there():
            missing(reason, is_in_ci=marker not in NOT_IN_CI)
