"""Ask all hosts of a hostfile what they have, at once, over ssh, before anything is launched."""

from __future__ import annotations

import dataclasses
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sweeps.cluster.hostfile.hosts import Hosts, address_of, parse_hostfile, ssh_command
from sweeps.cluster.hostfile.on_host import Look, Seen, versions
from sweeps.cluster.hostfile.over_ssh import on_host
from sweeps.cluster.node.devices import as_wanted
from sweeps.config.schema import ClusterConfig, GateConfig
from sweeps.errors import ConfigError
from sweeps.machine import Machine
from train_entry.contract import ContractError, dump, load

LIMIT_S = 60.0  # for one host to answer: Python may start from a slow file system


def find_hosts(cluster: ClusterConfig) -> Hosts:
    """Read the hostfile. Raises ConfigError with everything that is wrong with it."""
    path = Path(cluster.hostfile)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise ConfigError(f"cluster.hostfile={path}: {reason}; its lines must be HOST slots=N") from error
    slots = parse_hostfile(text, str(path))
    problems = [
        f"{path}: {host} has slots={count}, and cluster.gpus_per_node={cluster.gpus_per_node}"
        for host, count in slots.items()
        if count < (cluster.gpus_per_node or 1)
    ]
    if cluster.nodes not in (1, len(slots)):
        problems.append(
            f"cluster.nodes={cluster.nodes}: {path} names {len(slots)} hosts with slots, and all are used"
        )
    if problems:
        raise ConfigError(problems)
    return Hosts(slots=slots, ssh=ssh_command(cluster.ssh_port, cluster.ssh_args))


def find_machine(hosts: Hosts, cluster: ClusterConfig, gate: GateConfig, studies: Path) -> Machine:
    """Return what every host has. Raises ConfigError with a line for each host that cannot be used."""
    answers = _ask(hosts, cluster, studies)
    problems = [line for host, answer in answers.items() for line in _problems(host, answer)]
    seen = {host: answer for host, answer in answers.items() if isinstance(answer, Seen)}
    problems += _differences(hosts, cluster, {host: answer.machine for host, answer in seen.items()})
    if problems:
        raise ConfigError(problems)
    per_host = cluster.gpus_per_node or min(hosts.slots.values())
    wanted = dataclasses.replace(cluster, nodes=len(hosts.slots), gpus_per_node=per_host)
    return as_wanted(_least([answer.machine for answer in seen.values()]), wanted, gate)


def _ask(hosts: Hosts, cluster: ClusterConfig, studies: Path) -> dict[str, Seen | str]:
    """Return, by host, what it has, or why there is no answer."""
    existing = next(parent for parent in (studies.absolute(), *studies.absolute().parents) if parent.exists())
    with tempfile.NamedTemporaryFile(prefix=".shardsweep-", dir=existing) as token:
        order = Look(
            token=token.name,
            device=cluster.device,
            nvme_path=cluster.nvme_path,
            hosts=tuple(map(address_of, hosts.slots)) if cluster.interface is None else (),
        )
        with ThreadPoolExecutor(max_workers=32) as pool:
            answers = pool.map(lambda host: _ask_host(hosts, host, order), hosts.slots)
            return dict(zip(hosts.slots, answers, strict=True))


def _ask_host(hosts: Hosts, host: str, order: Look) -> Seen | str:
    try:
        done = subprocess.run(
            on_host(hosts.ssh, host, "look"),
            input=dump(order, indent=None) + "\n",
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
    except OSError as error:
        return f"ssh cannot be run here ({error.strerror})"
    except subprocess.TimeoutExpired:
        return f"no answer within {LIMIT_S:.0f} s"
    lines = done.stdout.strip().splitlines()
    try:
        if done.returncode == 0 and lines:
            return load(Seen, lines[-1])  # a login shell may print something before it
    except ContractError as error:
        return str(error)
    said = done.stderr.strip().splitlines()
    return said[-1] if said else f"exit status {done.returncode} without a message"


def _problems(host: str, answer: Seen | str) -> Iterator[str]:
    if isinstance(answer, str):
        yield f"host {host}: {answer}"
        return
    for name, here in versions().items():
        there = answer.versions.get(name)
        if there != here:
            yield f"host {host}: {name} {there or 'is missing'}, here it is {here}"
    if not answer.sees_studies:
        yield f"host {host}: does not see the directory of studies; put studies_dir on a shared file system"
    for unknown in answer.unknown_hosts:
        yield (
            f"host {host}: cannot resolve the name {unknown}, which its ranks connect to; "
            "add it there, or set cluster.interface"
        )


def _differences(hosts: Hosts, cluster: ClusterConfig, found: Mapping[str, Machine]) -> Iterator[str]:
    """Problems with the hosts' GPUs: a study never mixes models, and every slot needs a GPU."""
    names = {host: sorted({gpu.name for gpu in machine.gpus}) for host, machine in found.items()}
    first = next(iter(names.values()), [])
    for host, machine in found.items():
        if names[host] != first or len(first) > 1:
            yield f"host {host}: has {' and '.join(names[host]) or 'no GPU'}; all must have one model of GPU"
        elif not machine.gpus and cluster.device == "cuda":
            yield f"host {host}: shows no GPU, and cluster.device=cuda"
        elif machine.gpus and hosts.slots[host] > len(machine.gpus):
            yield f"host {host}: slots={hosts.slots[host]}, but it has {len(machine.gpus)} GPUs"


def _least(machines: list[Machine]) -> Machine:
    """Return the least that a trial finds on any host."""
    first = machines[0]
    memory = [machine.host_memory_bytes for machine in machines if machine.host_memory_bytes is not None]
    return dataclasses.replace(
        min(machines, key=lambda machine: min((gpu.memory_bytes for gpu in machine.gpus), default=0)),
        cores=min(machine.cores for machine in machines),
        host_memory_bytes=min(memory, default=None),
        has_libaio=all(machine.has_libaio for machine in machines),
        has_fp16=all(machine.has_fp16 for machine in machines),
        has_flash_attention=all(machine.has_flash_attention for machine in machines),
        nvme=next((m.nvme for m in machines if m.nvme and m.nvme.problem), first.nvme),
    )
