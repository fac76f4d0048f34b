"""Decide which knobs have an effect in a configuration. Pure.

A knob without effect is no dimension there, and its value in the plan is the default. So two configurations
that would run the same job have the same plan, whatever values they give to knobs that nothing reads.
"""

from __future__ import annotations

import math

from sweeps.config.conditions import DECIDING, NEVER, Setting
from sweeps.config.keys import KEYS, value_at, with_value
from sweeps.config.schema import SweepConfig
from sweeps.machine import Machine


def setting_of(config: SweepConfig, machine: Machine) -> Setting:
    """Return the values of a configuration on a machine that decide which knobs have an effect."""
    decided = {name: value_at(config, key) for name, key in DECIDING.items()}
    decided["precision"] = machine.precision(config.precision)
    return Setting(**decided, device=machine.device, ranks_per_node=machine.ranks_per_node)


def is_active(key: str, at: Setting) -> bool:
    """True if a knob has an effect in this setting. A group of conf/ always has one."""
    condition = KEYS[key].active_when if key in KEYS else None
    return condition is None or condition.holds(at)


def is_conditional(key: str) -> bool:
    """True if a knob has no effect in some settings."""
    return key in KEYS and KEYS[key].active_when is not None


def decision_rank(key: str) -> float:
    """Return when a space sets a knob: groups of conf/ first, then deciding knobs in order, others at inf."""
    if key not in KEYS:
        return 0
    return _RANKS.get(key, math.inf)


def without_inactive_knobs(config: SweepConfig, at: Setting) -> SweepConfig:
    """Return the configuration with every knob that has no effect set to its default."""
    for key in _RESETTABLE:
        if not is_active(key.name, at) and value_at(config, key.name) != key.default:
            config = with_value(config, key.name, key.default)
    return config


_RANKS = {key: 1 + rank for rank, key in enumerate(DECIDING.values())}
# A knob that is never active keeps its value, since the exported DeepSpeed file has it for use elsewhere.
_RESETTABLE = [key for key in KEYS.values() if key.active_when not in (None, NEVER)]
