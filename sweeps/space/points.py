"""Turn points into typed configurations, and find active knobs, for one command line on one machine."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from sweeps.config.compose import Composer
from sweeps.config.conditions import DECIDING, Setting
from sweeps.config.keys import KEYS, value_at
from sweeps.config.schema import SweepConfig
from sweeps.config.validate import bad_values
from sweeps.errors import ConfigError
from sweeps.machine import Machine
from sweeps.space.conditions import is_active, is_conditional, setting_of
from train_entry.contract import Scalar

_DECIDING = frozenset(DECIDING.values())
Chosen = tuple[tuple[str, Scalar], ...]  # part of a point


class Settings:
    """Configurations of points. Composes only once per combination of groups, then sets a point's values.

    Composing a point takes milliseconds, and a space has thousands of points.
    """

    def __init__(self, composer: Composer, machine: Machine) -> None:
        self._composer = composer
        self._machine = machine
        self._base = lru_cache(maxsize=None)(self._compose_groups)
        self._value = lru_cache(maxsize=None, typed=True)(self._compose_value)
        self._setting = lru_cache(maxsize=None)(self._find_setting)

    def config(self, point: Mapping[str, Scalar]) -> SweepConfig:
        """Return the same configuration as composing the point. Raise ConfigError with a line per problem."""
        try:
            values = {key: self._value(key, value) for key, value in point.items() if key in KEYS}
            config = _with_values(self._base(_groups(point)), values)
        except ConfigError:  # a value that is wrong by itself may be right with the others
            return self._composer.compose(point)
        if any(bad_values(config)):
            return self._composer.compose(point)  # it says where each value came from
        return config

    def is_active(self, key: str, point: Mapping[str, Scalar]) -> bool:
        """True if a knob has an effect at this point, which needs to have only the deciding knobs."""
        if not is_conditional(key):
            return True
        deciding = tuple((name, value) for name, value in point.items() if name in _DECIDING)
        setting = self._setting(_groups(point), deciding)
        return setting is not None and is_active(key, setting)

    def _compose_groups(self, groups: Chosen) -> SweepConfig:
        return self._composer.compose(dict(groups))

    def _compose_value(self, key: str, value: Scalar) -> Any:
        """Return the value in the type of the schema: 50000000.0 for 50000000, a list for its text."""
        kind = KEYS[key].type.removesuffix(" | None")
        if type(value).__name__ == kind:
            return value
        if kind == "float" and type(value) is int:
            return float(value)
        return value_at(self._composer.compose({key: value}), key)

    def _find_setting(self, groups: Chosen, deciding: Chosen) -> Setting | None:
        try:
            config = self._base(groups)
        except ConfigError:
            return None
        config = _with_values(config, dict(deciding))  # unchecked: values that it needs may be set later
        return setting_of(config, self._machine)


def _groups(point: Mapping[str, Scalar]) -> Chosen:
    return tuple((key, value) for key, value in point.items() if key not in KEYS)


def _with_values(config: SweepConfig, values: Mapping[str, Any]) -> SweepConfig:
    """Return a copy with these keys set. It copies each section only once, since copying is slow."""
    sections: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    for key, value in values.items():
        section, _, name = key.rpartition(".")
        sections[section][name] = value
    top = sections.pop("", {})
    parts = {name: dataclasses.replace(getattr(config, name), **found) for name, found in sections.items()}
    return dataclasses.replace(config, **top, **parts)
