"""Parse sweep overrides, in Hydra's own grammar, to dimensions. Check every value before any is sampled."""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, QuotedString, RangeSweep

from sweeps.config import validate
from sweeps.config.compose import Composer, one_line
from sweeps.config.keys import KEYS, scope_of
from sweeps.config.knob import Scope
from sweeps.errors import ConfigError
from sweeps.space.conditions import decision_rank, is_conditional
from sweeps.space.dimensions import Choices, Dimension, Interval, IsActive, Point, SearchSpace, powers_of_two
from train_entry.contract import Scalar

KNOWN_TAGS = frozenset({"log"})
MAX_CORNERS = 2000  # combinations of deciding knobs tried, to see if another knob is active in any


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """The content of a command line: the overrides that are fixed, and the space that varies."""

    composer: Composer  # holds the fixed overrides
    space: SearchSpace
    asked: frozenset[str]  # knobs that the command line itself varies; a space file adds others


def read_request(arguments: Sequence[str], composer: Composer) -> Request:
    """Split a command line into what is fixed and what varies, and check each value by composing it once.

    A sweep override defines or replaces its knob's dimension, a plain one pins it. The default space counts
    only if the command line neither sweeps nor chooses a space. Raise ConfigError with all problems at once.
    """
    overrides = _parse(arguments, composer)
    swept = [override for override in overrides if override.is_sweep_override()]
    fixed = [override for override in overrides if not override.is_sweep_override()]
    composer = composer.with_fixed([str(override.input_line) for override in fixed])
    _refuse_bad_keys(swept, composer)
    asked = {override.key_or_group: override for override in swept}
    pinned = {override.key_or_group for override in fixed}
    if both := sorted(pinned & set(asked)):
        raise ConfigError([f"{key}: both swept and set to one value; remove one of them" for key in both])
    if not swept or pinned & {"space", "experiment"} or any(key.startswith("space.") for key in pinned):
        for override in _from_space_files(composer):
            if override.key_or_group not in pinned:
                asked.setdefault(override.key_or_group, override)
    named = {override.key_or_group for override in swept}
    named |= {key.removeprefix("space.") for key in pinned if key.startswith("space.")}
    space = SearchSpace(dimensions=_dimensions(asked, composer))
    return Request(composer=composer, space=space, asked=frozenset(named))


def without_inactive(request: Request, is_active: IsActive) -> Request:
    """Return the request without dimensions that have no effect anywhere in its space.

    Raise ConfigError if the command line itself asks for one.
    """
    conditional = [dim.key for dim in request.space.dimensions if is_conditional(dim.key)]
    corners = _deciding_corners(request.space, is_active) if conditional else []
    idle = [key for key in conditional if not any(is_active(key, corner) for corner in corners)]
    if asked := [key for key in idle if key in request.asked]:
        raise ConfigError([_why_idle(key) for key in asked])
    kept = tuple(dim for dim in request.space.dimensions if dim.key not in idle)
    return dataclasses.replace(request, space=SearchSpace(dimensions=kept))


def _why_idle(key: str) -> str:
    condition = KEYS[key].active_when
    needed = condition.text if condition else "nothing"
    return f"{key}: changes nothing in this space: it has an effect only with {needed}"


def _deciding_corners(space: SearchSpace, is_active: IsActive) -> list[Point]:
    deciding = tuple(dim for dim in space.dimensions if math.isfinite(decision_rank(dim.key)))
    return SearchSpace(dimensions=deciding).ends.sample(MAX_CORNERS, random.Random(0), is_active)


def pinned_values(arguments: Sequence[str], composer: Composer) -> Point:
    """Return the knobs that a command line sets to one value each, without study-level keys."""
    return {
        override.key_or_group: _scalar(override.value())
        for override in _parse(arguments, composer)
        if not override.is_sweep_override()
        and not override.is_delete()
        and scope_of(override.key_or_group) is Scope.TRIAL
        and not isinstance(override.value(), dict)
    }


def _parse(lines: Sequence[str], composer: Composer) -> list[Override]:
    with one_line():
        return OverridesParser.create(config_loader=composer.loader).parse_overrides(list(lines))


def _from_space_files(composer: Composer) -> list[Override]:
    lines = [f"{key}={text}" for key, text in composer.space().items()]
    overrides = _parse(lines, composer)
    _refuse_bad_keys(overrides, composer)
    return overrides


def _refuse_bad_keys(overrides: Sequence[Override], composer: Composer) -> None:
    problems = [text for override in overrides if (text := _bad_key(override, composer))]
    if problems:
        raise ConfigError(problems)


def _bad_key(override: Override, composer: Composer) -> str | None:
    key = override.key_or_group
    if override.type is not None and override.type.name != "CHANGE":
        return f"{override.input_line}: only existing knobs can vary; {validate.suggest(key)}"
    if scope_of(key) is not Scope.TRIAL:
        return f"{key}: {_why_fixed(scope_of(key))}"
    if key not in KEYS and key not in composer.groups():
        return f"{key}: no such knob; {validate.suggest(key)}"
    return None


def _why_fixed(scope: Scope) -> str:
    if scope.may_change:
        return "cannot vary; give it one value, which the next start of the study may change"
    return "fixed within a study; give it one value, and start another study for another value"


def _dimensions(asked: dict[str, Override], composer: Composer) -> tuple[Dimension, ...]:
    dimensions: list[Dimension] = []
    problems: list[str] = []
    for key, override in asked.items():
        try:
            dimension = _dimension(key, override, composer)
            problems += [
                problem
                for problem in _bad_values(dimension, composer)
                if problem.partition(":")[0] not in asked.keys() - {key}  # varies too: checked when planned
            ]
            dimensions.append(dimension)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return tuple(dimensions)


def _dimension(key: str, override: Override, composer: Composer) -> Dimension:
    text = str(override.input_line).partition("=")[2].strip()
    value = override.value()
    tags: set[str] = getattr(value, "tags", set())
    if unknown := set(tags) - KNOWN_TAGS:
        raise ConfigError(f"{key}={text}: tag {', '.join(sorted(unknown))} is unknown; the only tag is log")
    if isinstance(value, IntervalSweep):
        return Dimension(key=key, text=text, range=_interval(key, text, value, "log" in tags))
    if not override.is_sweep_override():
        return Dimension(key=key, text=text, range=Choices(values=(_scalar(value),)))
    values = tuple(_scalar(item) for item in _listed(override, composer))
    if not values:
        raise ConfigError(f"{key}={text}: matches nothing")
    return Dimension(key=key, text=text, range=Choices(values=tuple(dict.fromkeys(values))))


def _listed(override: Override, composer: Composer) -> list[Any]:
    value = override.value()
    if not getattr(value, "shuffle", False):
        return list(override.sweep_iterator())
    # Hydra's own shuffle has no seed, so a resumed study would get another order.
    items: list[Any] = list(value.range() if isinstance(value, RangeSweep) else getattr(value, "list", ()))
    random.Random(composer.compose().search.seed).shuffle(items)
    return items


def _interval(key: str, text: str, value: IntervalSweep, log: bool) -> Choices | Interval:
    low, high = value.start, value.end
    if low is None or high is None or low > high:
        raise ConfigError(f"{key}={text}: the interval is empty; write the smaller end first")
    if log and low <= 0:
        raise ConfigError(f"{key}={text}: a logarithmic interval must begin above 0")
    known = KEYS.get(key)
    if known is None or not known.is_number:
        raise ConfigError(f"{key}={text}: only a numeric knob can have an interval; list the choices instead")
    grid = known.declared.grid
    if grid == "pow2":
        powers = powers_of_two(low, high)
        if not powers:
            raise ConfigError(f"{key}={text}: contains no power of two, and {key} varies by powers of two")
        return Choices(values=powers)
    integral = known.is_integral or isinstance(low, int)
    if integral:
        low, high = math.ceil(low), math.floor(high)
        if low > high:
            raise ConfigError(f"{key}={text}: contains no whole number")
    return Interval(low=low, high=high, log=log, integral=integral, digits=2 if grid == "digits" else None)


def _bad_values(dimension: Dimension, composer: Composer) -> list[str]:
    """Compose every value once: Hydra itself does not check swept overrides before they are sampled."""
    found = dimension.range
    values = found.values if isinstance(found, Choices) else (found.snap(found.low), found.snap(found.high))
    if dimension.key in composer.groups():
        options = composer.options(dimension.key)
        unknown = [value for value in values if value not in options]
        if unknown:
            return [
                f"{dimension.key}={value}: no such choice; there are {', '.join(options)}"
                for value in unknown
            ]
    problems: list[str] = []
    for value in values:
        try:
            composer.compose({dimension.key: value})
        except ConfigError as error:
            problems += error.problems
    return problems


def _scalar(item: Any) -> Scalar:
    if isinstance(item, QuotedString):
        return item.text
    if isinstance(item, float):
        return float(f"{item:.12g}")  # range(0.1,0.5,0.1) yields 0.30000000000000004
    if isinstance(item, (list, dict)):
        return json.dumps(item)
    return item  # type: ignore[no-any-return]
