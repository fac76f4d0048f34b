"""Read a hostfile as DeepSpeed does, `HOST slots=N` a line, and lay ranks out on its hosts. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from sweeps.errors import ConfigError

# deepspeed/launcher/runner.py 0.19.8, _parse_hostfile. It ignores what follows the number, too.
LINE = re.compile(r"^(\S+)\s+slots=(\d+)")


def parse_hostfile(text: str, path: str) -> dict[str, int]:
    """Slots by host, in the file's order. Raises ConfigError with every line that is wrong."""
    slots: dict[str, int] = {}
    problems: list[str] = []
    for number, line in enumerate(map(str.strip, text.splitlines()), start=1):
        if line.startswith("#") or not line:
            continue
        found = LINE.search(line)
        if found is None:
            problems.append(f"{path}:{number}: {line!r} names no host; write HOST slots=N")
        elif found[1] in slots:
            problems.append(f"{path}:{number}: {found[1]} is listed twice; give each host one line")
        elif found[1].startswith("-"):  # ssh would take it for an option
            problems.append(f"{path}:{number}: {found[1]} is not a host name")
        else:
            slots[found[1]] = int(found[2])
    if not slots and not problems:
        problems.append(f"{path}: names no host; write a line HOST slots=N for each")
    if problems:
        raise ConfigError(problems)
    return {host: count for host, count in slots.items() if count}  # DeepSpeed starts nothing on the others


@dataclass(frozen=True, kw_only=True, slots=True)
class Hosts:
    """The hosts of a study: how many slots each gives, and how it is reached."""

    slots: Mapping[str, int]
    ssh: tuple[str, ...]  # the command, without the host


def ssh_command(port: int | None, more: list[str]) -> tuple[str, ...]:
    """The ssh command for every host: it never asks at the terminal, and notices when a host is gone."""
    options = ("BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=10", "ServerAliveCountMax=6")
    ports = ("-p", str(port)) if port is not None else ()
    return ("ssh", *ports, *more, *(word for option in options for word in ("-o", option)))


def address_of(host: str) -> str:
    """The host's name for other hosts, without the user that a hostfile may add."""
    return host.rpartition("@")[2]


def lay_out(free: Mapping[str, int], ranks: int, per_host: int) -> dict[str, int] | None:
    """Return the ranks by host: all on one, or spread evenly on as few as hold them; None: no room now."""
    count = -(-ranks // per_host)
    wanted = -(-ranks // count)
    hosts = [host for host, slots in free.items() if slots >= wanted][:count]
    if len(hosts) < count:
        return None
    left, layout = ranks, {}
    for host in hosts:
        layout[host] = min(wanted, left)
        left -= layout[host]
    return layout
