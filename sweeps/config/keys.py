"""All keys by dotted name: the declaration of each, and functions to read and set its value. Pure."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass
from typing import Any

from sweeps.config.conditions import Condition
from sweeps.config.knob import Declaration, DeepSpeedKey, Mark, Scope, Section
from sweeps.config.schema import SweepConfig
from train_entry.contract import Scalar

# Groups of conf/ that are not sections of the schema: they set keys of several sections.
GROUPS = {
    "strategy": Section(scope=Scope.TRIAL, marks=Mark.BY_HAND),
    "experiment": Section(scope=Scope.STUDY),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """One leaf of the schema."""

    name: str  # dotted
    type: str  # as annotated: `int | None`
    default: Any
    declared: Declaration
    scope: Scope
    marks: Mark

    @property
    def is_number(self) -> bool:
        return self.type in ("int", "float", "int | None", "float | None")

    @property
    def is_integral(self) -> bool:
        return self.type.startswith("int") or self.declared.integral

    @property
    def active_when(self) -> Condition | None:
        return self.declared.active_when

    @property
    def deepspeed(self) -> DeepSpeedKey | None:
        return self.declared.deepspeed


def _keys(schema: type, prefix: str = "", inherited: Section | None = None) -> Iterator[Key]:
    known = inherited or Section()
    for field in dataclasses.fields(schema):
        if "section" in field.metadata:
            assert isinstance(field.default_factory, type)
            yield from _keys(field.default_factory, f"{prefix}{field.name}.", field.metadata["section"])
            continue
        declared: Declaration = field.metadata["declared"]
        yield Key(
            name=prefix + field.name,
            type=str(field.type),
            default=field.default if field.default_factory is MISSING else field.default_factory(),
            declared=declared,
            scope=declared.scope or known.scope,
            marks=known.marks if declared.marks is None else declared.marks,
        )


KEYS = {key.name: key for key in _keys(SweepConfig)}
SECTIONS: dict[str, Section] = GROUPS | {
    field.name: field.metadata["section"]
    for field in dataclasses.fields(SweepConfig)
    if "section" in field.metadata
}


def scope_of(name: str) -> Scope:
    """Return the scope of a key, of a section, of a group of conf/, or of anything below `space`."""
    return _declared(name).scope


def is_marked(name: str, mark: Mark) -> bool:
    """True if a key, a section or a group of conf/ has this mark."""
    return mark in _declared(name).marks


def _declared(name: str) -> Key | Section:
    top = name.partition(".")[0]
    return KEYS.get(name) or KEYS.get(top) or SECTIONS.get(top) or Section()


def key_of(override: str) -> str:
    """Return the key that a command-line override sets."""
    return override.lstrip("+~").partition("=")[0]


def block_interval(text: str) -> int | None:
    """Return k if every k-th block recomputes its activations: 1 for full, 0 for none; None if invalid."""
    named = {"none": 0, "full": 1}
    if text in named:
        return named[text]
    return int(text) if text.isdigit() and int(text) > 0 else None


def goal_names(objective: Any) -> tuple[str, ...]:
    """Return the goals of an objective, which is one name or a list of names, the most important first."""
    return tuple(map(str, objective)) if isinstance(objective, (list, tuple)) else (str(objective),)


def value_at(config: SweepConfig, key: str) -> Any:
    value: Any = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def with_value(config: SweepConfig, key: str, value: Any) -> SweepConfig:
    """Return a copy with one key set."""
    section, _, name = key.rpartition(".")
    if not section:
        return dataclasses.replace(config, **{name: value})
    part = dataclasses.replace(getattr(config, section), **{name: value})
    return dataclasses.replace(config, **{section: part})


def flat_default(key: str) -> Scalar:
    """Return a key's default as in a flattened configuration, lists as JSON; None if there is no such key."""
    default: Any = KEYS[key].default if key in KEYS else None
    text: Scalar = json.dumps(default) if isinstance(default, list) else default
    return text


def flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Scalar]]:
    """Yield every leaf with its dotted key; lists as JSON."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{name}.")
        elif isinstance(value, list):
            yield f"{prefix}{name}", json.dumps(value)
        else:
            yield f"{prefix}{name}", value
