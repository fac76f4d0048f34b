"""A key of the configuration: everything there is to say of it, said once, where it is declared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, Flag, auto
from typing import Any

from sweeps.config.conditions import Condition


class Scope(Enum):
    """How long a key keeps its value."""

    TRIAL = "trial"  # it may vary from trial to trial
    STUDY = "study"  # fixed within a study: another value makes another study
    IDENTITY = "identity"  # names the study, and is on record apart from what is asked of it
    SEARCH = "search"  # how a study searches: the next start may change it, and no single trial needs it
    START = "start"  # how jobs are run: the next start may change it

    @property
    def is_asked(self) -> bool:
        """Whether its value is part of what a study asks."""
        return self in (Scope.TRIAL, Scope.STUDY)

    @property
    def may_change(self) -> bool:
        """Whether the next start of a study may have another value."""
        return self in (Scope.SEARCH, Scope.START)


class Mark(Flag):
    """What else the product asks of a key."""

    NONE = 0
    COMPARABLE = auto()  # trials in one table share its value, those of a user's own included
    SECRET = auto()  # it may hold a password, and is never shown or recorded
    BY_HAND = auto()  # one tries its values by hand: the baselines vary it
    FIT_ONLY = auto()  # it changes no plan, only whether a plan is said to fit
    BESIDE_PLANS = auto()  # it changes memory or step time, and is part of no plan


@dataclass(frozen=True, kw_only=True, slots=True)
class DeepSpeedKey:
    """Where DeepSpeed's configuration file has a knob."""

    path: str  # dotted: `zero_optimization.stage`
    plan: str = ""  # the plan's field, dotted, where it is not called as the key
    stages: tuple[int, ...] = (0, 1, 2, 3)  # of ZeRO, at which it is written
    is_optional: bool = False  # written only where it differs from its default


@dataclass(frozen=True, kw_only=True, slots=True)
class Declaration:
    """What `knob` says of a key beside its name, type and default."""

    help: str
    unit: str = ""
    low: float | None = None
    above: float | None = None  # the value is larger than this
    high: float | None = None
    choices: tuple[str, ...] = ()
    integral: bool = False  # a whole number, of type float since people write it as 5e7
    grid: str = ""  # sampled values snap to powers of two (`pow2`) or to two `digits`
    scope: Scope | None = None  # None: that of its section
    marks: Mark | None = None
    active_when: Condition | None = None  # None: always
    deepspeed: DeepSpeedKey | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """What `section` says of all keys below it that say nothing else."""

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
