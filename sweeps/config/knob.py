"""Declarations of keys: everything about a key of the configuration is stated once, in its declaration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, Flag, auto
from typing import Any

from sweeps.config.conditions import Condition


class Scope(Enum):
    """The span over which a key keeps its value."""

    TRIAL = "trial"  # it may vary from trial to trial
    STUDY = "study"  # fixed within a study: another value makes another study
    IDENTITY = "identity"  # identifies the study; recorded apart from what the study asks
    SEARCH = "search"  # how a study searches: the next start may change it, and single trials do not use it
    START = "start"  # how jobs run: the next start may change it

    @property
    def is_asked(self) -> bool:
        """True if the value is part of what a study asks."""
        return self in (Scope.TRIAL, Scope.STUDY)

    @property
    def may_change(self) -> bool:
        """True if the next start of a study may use another value."""
        return self in (Scope.SEARCH, Scope.START)


class Mark(Flag):
    """Further properties of a key."""

    NONE = 0
    COMPARABLE = auto()  # all trials in one table share its value, a user's single trials too
    SECRET = auto()  # it may hold a password, and is never shown or recorded
    BY_HAND = auto()  # people try its values by hand, so the baselines vary it
    FIT_ONLY = auto()  # it changes no plan, only the verdict whether a plan fits
    BESIDE_PLANS = auto()  # it changes memory or step time, but is not part of a plan


@dataclass(frozen=True, kw_only=True, slots=True)
class DeepSpeedKey:
    """The place of a knob in DeepSpeed's configuration file."""

    path: str  # dotted: `zero_optimization.stage`
    plan: str = ""  # the plan's field, dotted, if its name differs from the key
    stages: tuple[int, ...] = (0, 1, 2, 3)  # the ZeRO stages for which it is written
    is_optional: bool = False  # written only if it differs from its default


@dataclass(frozen=True, kw_only=True, slots=True)
class Declaration:
    """The properties of a key besides its name, type and default."""

    help: str
    unit: str = ""
    low: float | None = None
    above: float | None = None  # the value is larger than this
    high: float | None = None
    choices: tuple[str, ...] = ()
    integral: bool = False  # a whole number, of type float because people write it as 5e7
    grid: str = ""  # sampled values snap to powers of two (`pow2`) or to two `digits`
    scope: Scope | None = None  # None: the section's
    marks: Mark | None = None  # None: the section's
    active_when: Condition | None = None  # None: always
    deepspeed: DeepSpeedKey | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """The defaults that a section sets for its keys."""

    scope: Scope = Scope.TRIAL
    marks: Mark = Mark.NONE


def knob(
    default: Any,
    help: str,
    *,
    unit: str = "",
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] = (),
    integral: bool = False,
    grid: str = "",
    scope: Scope | None = None,
    marks: Mark | None = None,
    active_when: Condition | None = None,
    deepspeed: DeepSpeedKey | None = None,
) -> Any:
    """Declare a key with its default; see Declaration for the rest."""
    declared = Declaration(
        help=help,
        unit=unit,
        low=low,
        above=above,
        high=high,
        choices=choices,
        integral=integral,
        grid=grid,
        scope=scope,
        marks=marks,
        active_when=active_when,
        deepspeed=deepspeed,
    )
    return _field(default, {"declared": declared})


def section(schema: type, *, scope: Scope = Scope.TRIAL, marks: Mark = Mark.NONE) -> Any:
    """Declare a group of keys."""
    return field(default_factory=schema, metadata={"section": Section(scope=scope, marks=marks)})


def _field(default: Any, metadata: Mapping[str, Any]) -> Any:
    if isinstance(default, (list, dict)) or callable(default):
        factory = default if callable(default) else lambda: type(default)(default)
        return field(default_factory=factory, metadata=metadata)
    return field(default=default, metadata=metadata)
