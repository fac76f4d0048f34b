"""Convert records to JSON and back. Enumerations and tuples come back as such."""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, TypeVar

T = TypeVar("T")

# A field may hold one of these types, so JSON records the type's name beside its fields.
_TAGGED = ("Measurement", "RankMeasurement", "Failure")


class ContractError(ValueError):
    """A file does not hold the record that it should hold."""


def dump(record: object, indent: int | None = 2) -> str:
    """Return a record of the contract as JSON text."""
    return json.dumps(_encode(record), indent=indent)


def load(cls: type[T], text: str) -> T:
    """Return the record in a JSON text; ContractError if it holds none.

    Unknown fields are ignored: a newer version may have written them.
    """
    try:
        decoded: T = _decode(cls, json.loads(text))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ContractError(f"not a {getattr(cls, '__name__', cls)}: {error}") from error
    return decoded


def _encode(value: object) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: _encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
        name = type(value).__name__
        return {"type": name, **fields} if name in _TAGGED else fields
    if isinstance(value, Mapping):
        return {key: _encode(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_encode(item) for item in value]
    return value


def _decode(cls: Any, raw: Any) -> Any:
    if dataclasses.is_dataclass(cls) and isinstance(cls, type):
        if hasattr(cls, "upgraded"):  # an earlier edition may have written it
            raw = cls.upgraded(raw)
        hints = _type_hints(cls)
        known = {
            f.name: _decode(hints[f.name], raw[f.name]) for f in dataclasses.fields(cls) if f.name in raw
        }
        return cls(**known)
    origin = typing.get_origin(cls)
    if origin in (types.UnionType, typing.Union):
        return _decode_union(typing.get_args(cls), raw)
    if origin is tuple:
        return tuple(_decode(typing.get_args(cls)[0], item) for item in raw)
    if origin is Mapping:
        return {key: _decode(typing.get_args(cls)[1], item) for key, item in raw.items()}
    if isinstance(cls, type) and issubclass(cls, StrEnum):
        return cls(raw)
    return float(raw) if cls is float else raw


@functools.cache  # resolving annotations takes ten times as long as decoding a line of metrics
def _type_hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _decode_union(members: tuple[Any, ...], raw: Any) -> Any:
    if raw is None and type(None) in members:
        return None
    classes = [member for member in members if dataclasses.is_dataclass(member)]
    if len(classes) > 1:
        return _decode(
            next(member for member in classes if getattr(member, "__name__", "") == raw["type"]), raw
        )
    others = [member for member in members if member is not type(None)]
    return _decode(others[0], raw) if len(others) == 1 else raw
