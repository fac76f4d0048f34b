"""The schema's leaf keys, dotted; reading and setting one of them. Pure."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sweeps.config.schema import SweepConfig
from train_entry.contract import Scalar

# A URI, a line of shell or an argument may hold a password, and what is asked of a trial is shown everywhere.
UNSHOWN_KEYS = ("tracking", "cluster.setup", "cluster.srun_args", "cluster.sbatch_args", "cluster.ssh_args")

# How a study is run, not what it compares: may change from one start to the next.
FREE_KEYS = (
    "study",
    "studies_dir",
    "dry_run",
    "dry_run_to",
    "gate",
    "accept_versions",
    "objective",  # recorded on its own
    "token_budget",  # within it
    "cluster.price_per_gpu_hour",
    "limits",
    "tracking",
    "search",
    "check",
    "confirm",
    "space",  # recorded as dimensions
    "cluster.parallel",
    "cluster.on_interrupt",
    "cluster.ports",
    "cluster.interface",
    "cluster.partition",
    "cluster.account",
    "cluster.qos",
    "cluster.time_min",
    "cluster.memory_gib",
    "cluster.exclude",
    "cluster.setup",
    "cluster.srun_args",
    "cluster.sbatch_args",
    "cluster.hold",
    "cluster.holds",
    "cluster.hold_min",
    "cluster.hold_idle_s",
    "cluster.hostfile",
    "cluster.ssh_port",
    "cluster.ssh_args",
)


def under(key: str, names: Sequence[str]) -> bool:
    """Whether a dotted key is one of these, or lies below one."""
    return any(key == name or key.startswith(f"{name}.") for name in names)


def fields_by_key(schema: type = SweepConfig, prefix: str = "") -> dict[str, dataclasses.Field[Any]]:
    """Every leaf key of the schema, dotted, with its dataclass field."""
    found: dict[str, dataclasses.Field[Any]] = {}
    for field in dataclasses.fields(schema):
        nested = field.default_factory
        if isinstance(nested, type) and dataclasses.is_dataclass(nested):
            found |= fields_by_key(nested, f"{prefix}{field.name}.")
        else:
            found[prefix + field.name] = field
    return found


FIELDS = fields_by_key()


def block_interval(text: str) -> int | None:
    """k, where every k-th block recomputes its activations: 1 for full, 0 for none; None: not a setting."""
    named = {"none": 0, "full": 1}
    if text in named:
        return named[text]
    return int(text) if text.isdigit() and int(text) > 0 else None


def goal_names(objective: Any) -> tuple[str, ...]:
    """The goals of an objective: one name, or a list of names, the most important first."""
    return tuple(map(str, objective)) if isinstance(objective, (list, tuple)) else (str(objective),)


def value_at(config: SweepConfig, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def with_value(config: SweepConfig, key: str, value: Any) -> SweepConfig:
    """A copy with one key set; the original is left as it is."""
    section, _, name = key.rpartition(".")
    if not section:
        return dataclasses.replace(config, **{name: value})
    part = dataclasses.replace(getattr(config, section), **{name: value})
    return dataclasses.replace(config, **{section: part})


def flat_default(key: str) -> Any:
    """The default as a flattened configuration has it: lists as JSON. None for a key that is no field."""
    default = default_of(key) if key in FIELDS else None
    return json.dumps(default) if isinstance(default, list) else default


def default_of(key: str) -> Any:
    """What a key is where nobody sets it."""
    field = FIELDS[key]
    return field.default_factory() if callable(field.default_factory) else field.default


def flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Scalar]]:
    """Leaves by their dotted keys; lists as JSON."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{name}.")
        elif isinstance(value, list):
            yield f"{prefix}{name}", json.dumps(value)
        else:
            yield f"{prefix}{name}", value
