"""Check what a fresh clone relies on: pins within their ranges, reasons for them, the Makefile's targets."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.paths import ROOT

PYPROJECT = (ROOT / "pyproject.toml").read_text()
PROJECT = tomllib.loads(PYPROJECT)["project"]
DECLARED = [Requirement(text) for text in PROJECT["dependencies"] + PROJECT["optional-dependencies"]["dev"]]
PIN_LINES = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = ("help", "install", "sweep", "test", "check", "lint", "fast", "format", "bench", "clean")


def test_every_dependency_has_its_reason_beside_it() -> None:
    lines = re.findall(r'^    "[A-Za-z].*$', PYPROJECT.split("[tool.")[0], re.MULTILINE)
    assert len(lines) == len(DECLARED)
    assert [line for line in lines if not re.search(r'",\s+# \w', line)] == []


def test_every_pin_is_exact_and_of_a_public_version() -> None:
    assert [
        line for line in PIN_LINES if not re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*", line)
    ] == []


@pytest.mark.parametrize("declared", DECLARED, ids=str)
def test_the_pin_of_a_dependency_is_in_its_range(declared: Requirement) -> None:
    pins = {canonicalize_name(name): version for name, version in (line.split("==") for line in PIN_LINES)}
    assert declared.specifier.contains(pins[canonicalize_name(declared.name)])


@pytest.mark.parametrize("target", TARGETS)
def test_a_promised_target_exists_and_says_what_it_does(target: str) -> None:
    assert re.search(rf"^{target}:.*  ## [A-Z]", MAKEFILE, re.MULTILINE)


def test_plain_make_lists_the_targets() -> None:
    listed = subprocess.run(
        ["make", "--no-print-directory"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert tuple(line.split()[0] for line in listed.splitlines()) == TARGETS


def test_what_ci_runs_is_valid_bash() -> None:
    subprocess.run(["bash", "-n", ".ci/run"], cwd=ROOT, check=True)
    assert (ROOT / ".ci/run").stat().st_mode & 0o100


def test_no_module_hides_one_of_pythons_own() -> None:
    # A program that is run by its path finds the modules of its own folder before the standard library.
    for program in re.findall(r"\$\(PYTHON\) (\S+\.py)", (ROOT / "Makefile").read_text()):
        beside = (ROOT / program).parent.iterdir()
        names = {path.stem for path in beside if path.suffix == ".py" or path.is_dir()}
        assert len(names) > 1
        assert names & sys.stdlib_module_names == set()


def test_the_license_is_whole() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert "END OF TERMS AND CONDITIONS" in text
    assert re.search(r"Copyright \d{4} The shardsweep authors", text)
