"""Let the ranks of a job meet: at a file on one host, at a port of rank 0's host on several.

On several hosts rank 0's supervisor chooses the port, since only that host knows which ports are free, and
writes it into the attempt directory. It holds a lock on the port as long as it lives, so that two trials on
one host choose different ports.
"""

from __future__ import annotations

import fcntl
import os
import random
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from sweeps.cluster.node.leases import private_directory
from train_entry.contract import AttemptDir, ContractError, dump, read_document, write_atomic

# Environment variables by which a job learns the cluster's settings.
PORTS = "SHARDSWEEP_PORTS"  # LOW-HIGH
INTERFACE = "SHARDSWEEP_INTERFACE"  # the network interface over which ranks talk to each other
ADDRESS = "SHARDSWEEP_ADDRESS"  # this host's address, where others do not reach it by its own name
# Above commonly used ports, below Linux's ephemeral ports (32768 and up), which any connection may take.
DEFAULT_PORTS = "30000-32767"
WAIT_S = 120.0  # for rank 0's supervisor: tasks of one job start seconds apart
LOOK_S = 0.1
SIOCGIFADDR = 0x8915  # linux/sockios.h


class RendezvousError(RuntimeError):
    """The ranks of a job cannot meet."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankPlace:
    """The place of one process in its job."""

    rank: int
    local_rank: int  # among the ranks of this host
    ranks: int
    nodes: int
    job_id: str = ""

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> RankPlace:
        """Read what DeepSpeed's launcher, torchrun or srun has set. Raises RendezvousError if none has."""
        for names in (_LAUNCHER, _SRUN):
            if names["rank"] in environ and names["ranks"] in environ:
                return cls._read(environ, names)
        raise RendezvousError(
            "neither RANK and WORLD_SIZE nor SLURM_PROCID and SLURM_STEP_NUM_TASKS are set; start this with "
            "srun, torchrun or DeepSpeed's launcher"
        )

    @classmethod
    def _read(cls, environ: Mapping[str, str], names: Mapping[str, str]) -> RankPlace:
        ranks, rank = int(environ[names["ranks"]]), int(environ[names["rank"]])
        local_rank = int(environ.get(names["local_rank"], rank))
        return cls(
            rank=rank,
            local_rank=local_rank,
            ranks=ranks,
            nodes=_nodes(environ, names, ranks),
            job_id=environ.get("SLURM_JOB_ID", str(os.getsid(0))),
        )

    @property
    def ranks_here(self) -> int:
        """The number of ranks on this host, assuming equally many on each host."""
        return max(1, self.ranks // self.nodes)


_LAUNCHER = {
    "rank": "RANK",
    "local_rank": "LOCAL_RANK",
    "ranks": "WORLD_SIZE",
    "nodes": "CROSS_SIZE",  # DeepSpeed's
    "local_ranks": "LOCAL_WORLD_SIZE",  # torchrun's
}
_SRUN = {
    "rank": "SLURM_PROCID",
    "local_rank": "SLURM_LOCALID",
    "ranks": "SLURM_STEP_NUM_TASKS",  # of this step, which may be smaller than the job
    "nodes": "SLURM_STEP_NUM_NODES",
    "local_ranks": "SLURM_NTASKS_PER_NODE",
}


def _nodes(environ: Mapping[str, str], names: Mapping[str, str], ranks: int) -> int:
    if names["nodes"] in environ:
        return int(environ[names["nodes"]])
    if names["local_ranks"] in environ:
        return -(-ranks // int(environ[names["local_ranks"]]))
    return 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Address:
    """address.json: where rank 0 listens."""

    host: str
    port: int


@contextmanager
def meeting(attempt: AttemptDir, place: RankPlace, environ: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Yield the variables with which a rank finds its peers. Raises RendezvousError.

    On one host the ranks meet at a file: two trials cannot clash over it, and no port has to be free.
    """
    names = _interfaces(environ)
    if place.nodes == 1:
        yield {**names, "SHARDSWEEP_RENDEZVOUS": f"file://{attempt.rendezvous.resolve()}"}
    elif place.rank == 0:
        with free_port(environ.get(PORTS, DEFAULT_PORTS)) as port:
            address = Address(host=own_address(environ), port=port)
            write_atomic(attempt.address, dump(address))
            yield {**names, **_variables(address)}
    else:
        yield {**names, **_variables(_published(attempt, WAIT_S))}


def _variables(address: Address) -> dict[str, str]:
    return {
        "SHARDSWEEP_RENDEZVOUS": f"tcp://{address.host}:{address.port}",
        "MASTER_ADDR": address.host,
        "MASTER_PORT": str(address.port),
    }


def _interfaces(environ: Mapping[str, str]) -> dict[str, str]:
    """The interface for NCCL and gloo, unless the user has set their variables."""
    if not (name := environ.get(INTERFACE)):
        return {}
    return {
        variable: environ.get(variable, name) for variable in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
    }


def _published(attempt: AttemptDir, patience_s: float) -> Address:
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        os.listdir(attempt.path)  # makes NFS look again for a file that was not there
        try:
            if found := read_document(attempt.address, Address):
                return found
        except ContractError:
            pass
        time.sleep(LOOK_S)
    raise RendezvousError(
        f"rank 0 did not publish its address within {patience_s:.0f} s: {attempt.address} is missing; is "
        "the studies directory on a file system that all nodes share?"
    )


def own_address(environ: Mapping[str, str]) -> str:
    """The address by which other hosts reach this one: that of INTERFACE, else ADDRESS, else the hostname."""
    if interface := environ.get(INTERFACE):
        return _interface_address(interface)
    return environ.get(ADDRESS) or socket.gethostname()


def _interface_address(interface: str) -> str:
    request = struct.pack("256s", interface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), SIOCGIFADDR, request)
        except OSError as error:
            names = ", ".join(name for _, name in socket.if_nameindex())
            raise RendezvousError(
                f"cluster.interface={interface}: no such interface with an IPv4 address on "
                f"{socket.gethostname()}, which has {names}"
            ) from error
    return socket.inet_ntoa(answer[20:24])


def parse_ports(text: str) -> range:
    """Parse `30000-32767`, or one port. Raises ValueError."""
    low, _, high = text.partition("-")
    ports = range(int(low), int(high or low) + 1)
    if not ports or ports[0] < 1024 or ports[-1] > 65535:
        raise ValueError(f"{text!r} is not a range of ports; give LOW-HIGH between 1024 and 65535")
    return ports


@contextmanager
def free_port(text: str) -> Iterator[int]:
    """Yield a free port of this range, and keep it locked until the block ends. Raises RendezvousError."""
    ports = list(parse_ports(text))
    random.Random(os.getpid()).shuffle(ports)
    directory = private_directory() / "ports"
    directory.mkdir(exist_ok=True, mode=0o700)
    for port in ports:
        with (directory / f"{port}.lock").open("w") as lock:
            if _is_ours(lock.fileno()) and _is_free(port):
                yield port
                return
    raise RendezvousError(f"cluster.ports={text}: none of them is free on {socket.gethostname()}")


def _is_ours(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:  # another trial of this user has chosen it
        return False
    return True


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch's store does
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
