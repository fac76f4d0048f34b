"""Fixtures that run the real command line in separate processes, apart from the user's own state."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.support.facilities import require_facilities
from tests.support.paths import ROOT

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tests run in parallel; torch reads it when it is imported

# With these settings a trial takes little more time than its start-up.
QUICK = (
    "model.layers=1",
    "measure.warmup_steps=1",
    "measure.steps=3",
    "measure.split_steps=0",
    "measure.futility=false",  # every trial is measured
    "confirm.best=0",
    "search.single_gpu=never",
)


def pytest_runtest_setup(item: pytest.Item) -> None:
    require_facilities(item)


@dataclass
class CommandLine:
    """The command `python sweep.py`, with studies below `directory`."""

    directory: Path
    script: Path = ROOT / "sweep.py"
    within: Sequence[str] = ()  # a command that runs it, such as srun
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def studies(self) -> Path:
        return self.directory / "studies"

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start the command in a session of its own, as if in its own terminal."""
        process = subprocess.Popen(
            [*self.within, sys.executable, str(self.script), *arguments],
            cwd=self.directory,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.started.append(process)
        return process

    def run(self, *arguments: str, limit_s: float = 280) -> subprocess.CompletedProcess[str]:
        process = self.start(*arguments)
        out, err = process.communicate(timeout=limit_s)
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "SHARDSWEEP_STATE_DIR": str(self.directory / "state")}

    def sweeps(self, *arguments: str, limit_s: float = 120) -> str:
        """Run `python -m sweeps` and return what it prints."""
        done = subprocess.run(
            [sys.executable, "-m", "sweeps", *arguments],
            cwd=ROOT,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=limit_s,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def end(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.kill()
            process.communicate()


@pytest.fixture
def command_line(tmp_path: Path) -> Iterator[CommandLine]:
    line = CommandLine(tmp_path)
    yield line
    line.end()


@pytest.fixture(scope="module")
def module_command_line(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandLine]:
    """A command line with one directory for all tests of a module, which share its measurements."""
    line = CommandLine(tmp_path_factory.mktemp("sweeps"))
    yield line
    line.end()


@pytest.fixture
def checkout(tmp_path: Path) -> CommandLine:
    """A command line in a copy of this checkout, whose conf/ a test may change."""
    for name in ("conf", "sweeps", "train_entry", "analysis"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "sweep.py", tmp_path / "sweep.py")
    return CommandLine(tmp_path, script=tmp_path / "sweep.py")


@pytest.fixture(scope="session")
def quick() -> tuple[str, ...]:
    return QUICK


@pytest.fixture(scope="session")
def wait_for() -> Callable[[Callable[[], bool], float], None]:
    """Poll until a condition holds."""

    def wait(condition: Callable[[], bool], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"not within {timeout_s} s: {condition}"
            time.sleep(0.1)

    return wait
