"""Convert records of earlier editions to the current format. Only this module knows their fields.

The first edition stored counts and flags about a trial's attempts (`attempts`, `lost`, `repeats`, `check`,
...) instead of the attempts themselves, and called baselines rungs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

Raw = Mapping[str, Any]

SAME = (
    *("number", "overrides", "values", "created_at", "plan", "fingerprint", "estimate", "reasons"),
    *("reused_from", "parent", "advice"),
)
RENAMED_KEYS = {"search.ladder": "search.baselines"}
LOST = "an earlier edition recorded this attempt and did not keep its outcome"


def is_first_edition(trial_json: str) -> bool:
    return "state" in json.loads(trial_json)


def upgraded_trial(raw: Raw) -> Raw:
    """Convert trial.json. The counted attempt gets all GPU-seconds; `read_trial` then divides them."""
    if "state" not in raw:
        return raw
    attempts = list(_attempts(raw))
    return {
        **{key: raw[key] for key in SAME if key in raw},
        "origin": "baseline" if raw["origin"] == "ladder" else raw["origin"],
        "baseline": raw.get("rung"),
        "is_single_gpu": raw.get("is_yardstick", False),
        "attempts": attempts,
        "closing": _closing(raw, attempts),
    }


def upgraded_study(raw: Raw) -> Raw:
    """Convert study.json."""
    overrides = [_renamed(text) for text in raw.get("overrides", ())]
    return {**raw, "overrides": overrides, "goals": raw.get("goals") or [{"name": raw["objective"]}]}


def upgraded_winner(raw: Raw) -> Raw:
    """Convert winner.json."""
    return {"baseline": raw.get("rung"), **raw}


def _renamed(override: str) -> str:
    key, equals, value = override.partition("=")
    name = key.lstrip("+")
    return f"{key.removesuffix(name)}{RENAMED_KEYS.get(name, name)}{equals}{value}"


def _closing(raw: Raw, attempts: list[dict[str, Any]]) -> Raw | None:
    """The closing of a trial that no attempt has closed; None for any other."""
    counts = any(attempt["kind"] in ("first", "retry") and not attempt["is_replaced"] for attempt in attempts)
    if raw["state"] in ("queued", "rejected") or counts:
        return None
    return {"at": raw.get("closed_at") or raw["created_at"], "outcome": raw.get("outcome")}


def _attempts(raw: Raw) -> Iterator[dict[str, Any]]:
    repeats = {repeat["attempt"]: repeat for repeat in raw.get("repeats", ())}
    counted = _counted(raw, repeats)
    blamed = raw.get("lost", 0)
    total = raw.get("attempts", 0)
    for number in range(1, total + 1):
        attempt: dict[str, Any] = {"number": number, "is_replaced": False, "gpu_s": 0.0}
        attempt |= {"slots": raw.get("slots", ()), "elapsed": raw.get("elapsed")} if number == total else {}
        if number in repeats:
            repeat = repeats[number]
            attempt |= {"kind": "repeat", "round": repeat["turn"]}
            attempt |= {key: repeat[key] for key in ("purpose", "outcome", "started_at", "ended_at")}
        elif number == raw.get("check_attempt"):
            attempt |= {"kind": "check", "outcome": raw.get("check")}
        elif number == counted:
            attempt |= {"outcome": raw.get("outcome"), "is_shared": raw.get("shared", False)}
            attempt |= {"started_at": raw["created_at"], "ended_at": raw.get("closed_at")}
        else:
            kind = "node_lost" if blamed > 0 else "cancelled"
            blamed -= 1
            attempt |= {"is_replaced": True, "outcome": {"type": "Failure", "kind": kind, "message": LOST}}
            if counted is not None and number > counted:  # a repeat or check without any record
                attempt["kind"] = "repeat"
        attempt.setdefault("kind", "first" if number == 1 else "retry")
        if number == (counted or total):
            attempt["gpu_s"] = raw.get("gpu_s", 0.0)
        yield attempt


def _counted(raw: Raw, repeats: Mapping[int, Raw]) -> int | None:
    """The number of the attempt that gave the outcome or is running; None if there is none."""
    if raw.get("measured_attempt") is not None:
        return int(raw["measured_attempt"])
    others = {*repeats, raw.get("check_attempt")}
    own = [number for number in range(1, raw.get("attempts", 0) + 1) if number not in others]
    is_open = raw["state"] == "running" or raw.get("outcome") is not None
    return max(own, default=None) if is_open else None
