"""A real sshd that runs during the tests on loopback addresses, each of which plays a host."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import QUICK, CommandLine
from tests.support.facilities import missing, sshd_program

HOSTS = ("127.0.0.2", "127.0.0.3")
DOWN = "127.0.0.4"  # nobody listens there
TINY = ("-m", "cluster=hostfile", "cluster.device=cpu", "model=tiny_llama", "tracking=none", *QUICK)


@dataclass(frozen=True)
class Sshd:
    """A running sshd, reached with its own key and list of known hosts."""

    directory: Path
    port: int

    @property
    def keys(self) -> tuple[str, ...]:
        """The configuration keys by which a study reaches it."""
        arguments = (
            "-F/dev/null",
            f"-i{self.directory}/key",
            f"-oUserKnownHostsFile={self.directory}/known_hosts",
            "-oStrictHostKeyChecking=yes",
        )
        listed = ",".join(f'"{argument}"' for argument in arguments)
        return (f"cluster.ssh_port={self.port}", f"cluster.ssh_args=[{listed}]")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOSTS[0], 0))
        return int(probe.getsockname()[1])


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((HOSTS[0], port)) == 0


def _configure(directory: Path, port: int) -> Path:
    for name in ("host_key", "key"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(directory / name)]
        subprocess.run(command, check=True, timeout=30)
    shutil.copy(directory / "key.pub", directory / "authorized_keys")
    kind, key, *_ = (directory / "host_key.pub").read_text().split()
    known = [f"[{host}]:{port} {kind} {key}\n" for host in HOSTS]
    (directory / "known_hosts").write_text("".join(known))
    lines = [
        *(f"ListenAddress {host}:{port}" for host in HOSTS),
        f"HostKey {directory}/host_key",
        f"AuthorizedKeysFile {directory}/authorized_keys",
        f"AllowUsers {getpass.getuser()}",
        "PasswordAuthentication no",
        "KbdInteractiveAuthentication no",
        "PermitRootLogin prohibit-password",
        "StrictModes no",  # everybody may write to the directory of temporary files
        "UsePAM no",
        f"PidFile {directory}/sshd.pid",
    ]
    config = directory / "sshd_config"
    config.write_text("\n".join(lines) + "\n")
    return config


@pytest.fixture(scope="session")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    program = sshd_program()
    assert program is not None, "the marker sshd is missing"
    directory, port = tmp_path_factory.mktemp("sshd"), _free_port()
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # sshd's privilege separation needs it
    config = _configure(directory, port)
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen([program, "-D", "-e", "-f", str(config)], stderr=log)
    deadline = time.monotonic() + 20
    while not _listens(port):
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            missing(f"no sshd: {(directory / 'log').read_text()}")
        time.sleep(0.05)
    yield Sshd(directory, port)
    process.terminate()
    process.wait()


@dataclass
class HostfileLine(CommandLine):
    """`python sweep.py` with two hosts of one slot each."""

    keys: tuple[str, ...] = ()

    def arguments(self, hosts: tuple[str, ...] = HOSTS, slots: int = 1) -> tuple[str, ...]:
        path = self.directory / "hosts"
        path.write_text("# two of them\n\n" + "".join(f"{host}  slots={slots}\n" for host in hosts))
        return (*TINY, f"cluster.hostfile={path}", *self.keys)


@pytest.fixture
def line(sshd: Sshd, tmp_path: Path) -> Iterator[HostfileLine]:
    found = HostfileLine(tmp_path, keys=sshd.keys)
    yield found
    found.end()
