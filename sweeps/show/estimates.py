"""Express estimates in words and numbers, for dry runs and the commands memory, advise and why. Pure."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from sweeps.config.schema import GateConfig
from sweeps.estimate.fit import Room
from sweeps.estimate.hardware import Hardware
from train_entry.contract import Estimate, Fit, gib

FIT_WORDS = {Fit.FITS: "fits", Fit.BORDERLINE: "borderline", Fit.TOO_LARGE: "too large"}
# The components of an estimate by group; a component in no group belongs to `other`.
GROUPS = {
    "weights": ("weights", "second weights", "gathered weights", "cast weights"),
    "optimizer": ("master weights", "moments", "optimizer temporaries"),
    "gradients": (
        "gradients",
        "accumulated gradients",
        "gradients for the step",
        "gradient copies",
        "gradients of the part",
    ),
    "activations": ("activations", "block inputs", "backward", "pipeline buffers"),
    "logits": ("logits",),
    "buffers": ("buckets", "offload buffer", "reduction copy", "workspace"),
}
OTHER = "other"
_GROUP_OF = {name: group for group, names in GROUPS.items() for name in names}


def by_group(components: Mapping[str, int]) -> dict[str, int]:
    """Return bytes by group, components of no group as `other`; groups of 0 bytes are absent."""
    found = dict.fromkeys([*GROUPS, OTHER], 0)
    for name, count in components.items():
        found[_GROUP_OF.get(name, OTHER)] += count
    return {group: count for group, count in found.items() if count}


def biggest(components: Mapping[str, int]) -> str:
    """Return components in GiB, the largest first, without 0.00: `activations 12.10, optimizer 5.01`."""
    ordered = sorted(components.items(), key=lambda part: -part[1])
    shown = [part for part in ordered if gib(part[1]) != "0.00"] or ordered[:1]
    return ", ".join(f"{name} {gib(count)}" for name, count in shown)


def limit_bytes(estimate: Estimate) -> int | None:
    """Return the bytes that a rank may use; None if unknown."""
    return estimate.limit_bytes if estimate.limit_bytes < sys.maxsize else None


def shortfall(estimate: Estimate) -> str:
    """Return in brief which memory is too small; empty if everything fits."""
    parts = estimate.why.split("; ") if estimate.why else []
    over_bytes = estimate.needed_bytes - estimate.limit_bytes
    if over_bytes > 0 and parts:  # the gate names the device's memory first
        parts[0] = f"{gib(over_bytes)} GiB over the limit ({estimate.phase})"
    return "; ".join(parts)


def speed(tokens_per_s: float) -> str:
    return f"{tokens_per_s:,.0f}" if tokens_per_s >= 100 else f"{tokens_per_s:.3g}"


def basis(hardware: Hardware, room: Room, gate: GateConfig, observations: int) -> str:
    """Return one line: how the estimates were made, and the limit they are compared with."""
    return "; ".join((_learned(observations), _card(hardware), _limit(room), _margin(gate)))


def _learned(observations: int) -> str:
    if not observations:
        return "from formulas alone, nothing measured yet"
    return f"learned from {observations} trial{'s' * (observations > 1)}"


def _card(hardware: Hardware) -> str:
    if hardware.is_cpu:
        return "CPU: typical figures per core"
    if hardware.is_known:
        return f"{hardware.name}: figures from its data sheet"
    return f"{hardware.name} is not known here: figures of a similar GPU"


def _limit(room: Room) -> str:
    if room.is_host:
        if room.host_bytes is None:
            return "no limit: the host's memory is not known"
        return f"limit {gib(room.host_bytes)} GiB per node, the host memory that its ranks share"
    limit = f"limit {gib(room.device_bytes - room.headroom_bytes)} GiB per rank ({room.what})"
    return f"{limit}, {'including' if room.counts_context else 'excluding'} CUDA's context"


def _margin(gate: GateConfig) -> str:
    share = f"{gate.quantile:.1%}".replace(".0%", "%")
    return f"needed: peak + fragmentation + a safety margin that suffices in {share} of cases"
