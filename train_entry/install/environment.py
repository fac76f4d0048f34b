"""Install everything that a sweep needs: `python3 train_entry/install/environment.py [--venv .venv] [--dev]`.

It runs under any python3 that the machine has, so it uses only the standard library, and only modules that an
older Python can import: it must be able to say which version is needed.
"""

from __future__ import annotations

import argparse
import fcntl
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

if not __package__:  # run by its path
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from train_entry.install.torch_choice import (
    TORCH_WITHOUT_GPU,
    InstallError,
    Torch,
    constraints_beside,
    driver_cuda,
    find_torch,
    torch_requirement,
)

ROOT = Path(__file__).resolve().parents[2]
PINS = ROOT / "constraints.txt"
SOURCES = (ROOT / "pyproject.toml", PINS)  # an environment older than one of these is out of date
OLDEST_PYTHON = (3, 11)  # as in pyproject.toml
LOG_TAIL = 20  # lines of the log shown when a step fails
GRACE_S = 10  # for an interrupted step to clean up
# DeepSpeed compiles with -march=native: another processor may be unable to run the result.
OPS_ELSEWHERE = (
    "no GPU on this machine: the first trial that offloads its optimizer compiles cpu_adam where it runs"
)


class Environment:
    """A virtual environment to create. Each step prints one line; its output goes to the log."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.python = path / "bin" / "python"
        self.log = path / "install.log"

    def stamp(self, dev: bool) -> Path:
        """The file that marks a complete install. It is written last; the Makefile reads its time."""
        return self.path / (".installed-dev" if dev else ".installed")

    def is_fresh(self, dev: bool) -> bool:
        stamp = self.stamp(dev)
        return stamp.exists() and stamp.stat().st_mtime >= max(source.stat().st_mtime for source in SOURCES)

    def step(self, title: str, command: Sequence[str]) -> None:
        """Run a command and print one line. Raise InstallError with the end of the log if it fails."""
        print(f"{title} ... ", end="", flush=True)
        start = time.monotonic()
        self.path.mkdir(parents=True, exist_ok=True)
        with self.log.open("a+") as log:
            log.write(f"\n$ {' '.join(command)}\n")
            log.flush()
            begin = log.tell()
            status = run(command, log.fileno(), self.path / "bin")
            log.seek(begin)
            end = "".join(log.readlines()[-LOG_TAIL:])
        print(f"{time.monotonic() - start:.0f} s" if status == 0 else "failed", flush=True)
        if status != 0:
            raise InstallError(f"{title}: failed. The end of {self.log}:\n{end}")

    def pip(self, title: str, *arguments: str) -> None:
        quiet = ("--disable-pip-version-check", "--no-input", "--progress-bar=off")
        self.step(title, [str(self.python), "-m", "pip", "install", *quiet, *arguments])

    def create(self, vendor: Torch | None) -> None:
        """Create the environment, or complete one whose creation was interrupted."""
        if not self.python.exists():
            share = ["--system-site-packages"] if vendor else []
            make = [sys.executable, "-m", "venv", "--without-pip", *share, str(self.path)]
            self.step(f"creating {self.path.name}", make)
        if vendor and sys.prefix != sys.base_prefix:
            # This Python itself is in an environment, and --system-site-packages does not share its packages.
            site = Path(sysconfig.get_path("purelib", vars={"base": str(self.path)}))
            (site / "vendor.pth").write_text(sysconfig.get_path("purelib") + "\n")
        if not has_pip(self.python):
            self.step("installing pip", [str(self.python), "-m", "ensurepip", "--default-pip"])

    def install_torch(self, vendor: Torch | None, cuda: tuple[int, int] | None) -> Torch:
        """Return the torch that is there, or install the one for this machine.

        This comes before all other packages, or pip would choose a torch for them.
        """
        torch = find_torch(self.python)
        if torch is None and vendor is not None:
            raise InstallError(
                f"{self.path} does not see the torch of {sys.executable}: `make clean install`"
            )
        if torch is None:
            wanted = torch_requirement(cuda)
            version = wanted.removeprefix("torch==").split(",")[0]
            tested = ["-c", str(PINS)] if version == TORCH_WITHOUT_GPU else []
            self.pip(f"installing torch {version}", *tested, wanted)
            torch = find_torch(self.python)
        if torch is None:
            raise InstallError(f"`{self.python} -c 'import torch'` fails: see why, then `make clean install`")
        return torch

    def install_project(self, torch: Torch, vendor: Torch | None, dev: bool) -> None:
        pins = PINS.read_text().splitlines()
        if vendor is not None or torch.version.split("+")[0] != TORCH_WITHOUT_GPU:
            print(f"keeping torch {torch.version}")
            given_up = [*torch.requires, *(vendor.packages if vendor else ())]
            pins = constraints_beside(torch.version, given_up, pins)
        constraints = self.path / "constraints.txt"
        constraints.write_text("\n".join(pins) + "\n")
        what = f"{ROOT}[dev]" if dev else str(ROOT)
        self.pip("installing shardsweep and what it needs", "-c", str(constraints), "-e", what)

    def compile_ops(self, gpus: bool) -> None:
        """Compile DeepSpeed's operators. Jobs on GPUs start without them, so a failure there is not fatal."""
        # Not at module level: an older Python cannot import it, and must first report its version.
        from train_entry.install import operators

        directory = self.path / "torch_extensions"
        operators.remove_stale_locks(directory, operators.STALE_LOCK_S)
        for lock in operators.compile_locks(directory):  # perhaps a job's; torch waits for it forever
            print(f"waiting for another process to compile; if none does (a killed install), delete {lock}")
        command = [str(self.python), "-m", "train_entry.install.operators"]
        try:
            if gpus:
                self.step("compiling DeepSpeed's CPU Adam, once (1 to 2 minutes)", [*command, "--gpus"])
            else:
                self.step("compiling DeepSpeed's CPU operators, once (3 to 12 minutes)", command)
        except InstallError:
            if not gpus:
                raise
            print(f"see {self.log}; the first trial that offloads its optimizer compiles it")
        for line in operators.left_out(gpus):
            print(line)

    def verify(self) -> None:
        command = [str(self.python), "-m", "train_entry.install.torch_check"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode != 0:
            raise InstallError((done.stderr.strip() or f"status {done.returncode}").splitlines()[-1])
        print(done.stdout.strip())


def run(command: Sequence[str], output: int, programs: Path) -> int:
    """Run a command and return its exit status.

    If this process is interrupted, the command is interrupted too and gets time to clean up.
    """
    # The environment's programs come first: torch starts ninja by name.
    env = {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ.get('PATH', os.defpath)}"}
    # In a process group of its own, so that compilers, which are children of children, end as well.
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env, cwd=ROOT, process_group=0
    ) as child:
        try:
            return child.wait()
        except BaseException:
            os.killpg(child.pid, signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                child.wait(timeout=GRACE_S)
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            raise


def has_pip(python: Path) -> bool:
    return subprocess.run([str(python), "-m", "pip", "--version"], capture_output=True).returncode == 0


def missing_packages(
    module: Callable[[str], object], program: Callable[[str], str | None], headers: Path
) -> dict[str, str]:
    """Map Debian's name of each missing package to its purpose."""
    needs = {
        "python3-venv": ("Python's venv and ensurepip", bool(module("venv") and module("ensurepip"))),
        "g++": ("a C++ compiler", bool(program("c++"))),  # torch starts it by this name
        "python3-dev": ("Python's C headers", (headers / "Python.h").exists()),
    }
    return {package: purpose for package, (purpose, there) in needs.items() if not there}


def check_machine() -> None:
    if sys.version_info < OLDEST_PYTHON:
        raise InstallError(f"Python 3.11 or newer is needed; {sys.executable} is {sys.version.split()[0]}")
    missing = missing_packages(importlib.util.find_spec, shutil.which, Path(sysconfig.get_paths()["include"]))
    if missing:
        what, packages = ", ".join(missing.values()), " ".join(missing)
        raise InstallError(f"missing: {what}. On Debian: apt-get install {packages}")


@contextmanager
def only_one(venv: Path) -> Iterator[None]:
    """Wait while another process installs into the same environment."""
    with venv.with_name(venv.name + ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another install into {venv} ...", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def is_for_other_machines(asked_cuda: tuple[int, int] | None) -> bool:
    """True if a CUDA version is given and this machine has no GPU: jobs then run on other machines."""
    try:
        return asked_cuda is not None and driver_cuda() is None
    except InstallError:  # there is a GPU, and its driver does not report a CUDA version
        return False


def install(environment: Environment, asked_cuda: tuple[int, int] | None, dev: bool) -> None:
    start = time.monotonic()
    cuda = asked_cuda or driver_cuda()
    vendor = find_torch(Path(sys.executable))
    environment.create(vendor)
    torch = environment.install_torch(vendor, cuda)
    environment.install_project(torch, vendor, dev)
    if is_for_other_machines(asked_cuda):
        print(OPS_ELSEWHERE)
    else:
        environment.compile_ops(gpus=cuda is not None)
    environment.verify()
    for stamp in (environment.stamp(False), *([environment.stamp(True)] if dev else [])):
        stamp.touch()
    print(f"installed in {time.monotonic() - start:.0f} s")


def cuda_version(text: str) -> tuple[int, int]:
    major, minor = text.split(".")
    return int(major), int(minor)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Install shardsweep into a virtual environment.")
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    parser.add_argument("--dev", action="store_true", help="also install what checks and tests need")
    help_cuda = "install for this CUDA version (X.Y), e.g. on a login node without GPUs"
    parser.add_argument("--cuda", type=cuda_version, help=help_cuda)
    asked = parser.parse_args(arguments)
    environment = Environment(asked.venv.absolute())
    for stop in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(stop) is not signal.SIG_IGN:  # as under nohup
            signal.signal(stop, lambda number, frame: sys.exit(128 + number))
    try:
        check_machine()
        with only_one(environment.path):
            if not environment.is_fresh(asked.dev):
                install(environment, asked.cuda, asked.dev)
    except InstallError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted; run the same command to continue", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
