"""Write a dry run for other programs: CSV or JSON, one row per legal plan, in bytes and seconds."""

from __future__ import annotations

import csv
import io
import json
import os
import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path

from sweeps.errors import ConfigError
from sweeps.plan.warnings import cautions
from sweeps.show.dry_run import LegalPoint, Listing
from sweeps.show.estimates import limit_bytes
from train_entry.contract import Scalar, write_atomic

SUFFIXES = (".csv", ".json")


def require_target(path: Path) -> None:
    """Raise ConfigError if the list cannot be written to this path. Called before it is computed."""
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"dry_run_to={path}: give a file that ends in {' or '.join(SUFFIXES)}")
    folder = path.absolute().parent
    if path.is_dir():
        raise ConfigError(f"dry_run_to={path}: is a directory; give a file in it")
    if not folder.is_dir():
        raise ConfigError(f"dry_run_to={path}: there is no folder {folder}; make it, or give another")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"dry_run_to={path}: the folder {folder} cannot be written; give another")


def write_listing(listing: Listing, path: Path) -> None:
    """Write the whole listing in the format of the suffix. Replaces an existing file."""
    require_target(path)
    write_atomic(path, _csv(listing) if path.suffix == ".csv" else _json(listing))


def _csv(listing: Listing) -> str:
    rows = _rows(listing)
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=_names(rows), lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: _raw(value) for name, value in row.items()} for row in rows)
    return text.getvalue()


def _json(listing: Listing) -> str:
    document = {
        "objective": listing.goal.name,
        "estimates": listing.basis,
        "looked_at": listing.looked_at,
        "points": listing.points,  # null: infinitely many
        "seed": listing.seed,
        "legal": len(listing.legal),
        "distinct": listing.distinct,
        "rejected": listing.looked_at - len(listing.legal),
        "plans": _rows(listing),
        "rejections": [
            {
                "rule": broken.example.rule,
                "count": broken.count,
                "example": broken.example.text,
                "source": broken.example.source,
            }
            for broken in listing.broken
        ],
        "cautions": [
            {"name": wasteful.example.name, "count": wasteful.count, "example": wasteful.example.text}
            for wasteful in listing.wasteful
        ],
    }
    return json.dumps(document, indent=1) + "\n"


def _rows(listing: Listing) -> list[dict[str, Scalar]]:
    components = _union(found.estimate.components for found in listing.legal)
    parts = _union(found.estimate.parts for found in listing.legal)
    return [
        {
            **_head(found),
            **{knob: found.point.get(knob) for knob in listing.knobs if knob != "strategy"},
            **_figures(found),
            **{
                f"component_{_word(name)}_bytes": found.estimate.components.get(name, 0)
                for name in components
            },
            **{f"part_{_word(name)}_s": found.estimate.parts.get(name, 0.0) for name in parts},
            "overrides": shlex.join(found.overrides),
        }
        for found in listing.legal
    ]


def _head(found: LegalPoint) -> dict[str, Scalar]:
    return {
        "number": found.number,
        "verdict": found.estimate.fit.value,
        "why": found.estimate.why,
        "strategy": found.plan.strategy,
    }


def _figures(found: LegalPoint) -> dict[str, Scalar]:
    estimate = found.estimate
    return {
        "grad_accum": found.plan.grad_accum,
        "tokens_per_s": estimate.tokens_per_s,
        "tokens_per_s_per_gpu": estimate.tokens_per_s_per_gpu,
        "step_s": estimate.step_s,
        "peak_bytes": estimate.peak_bytes,
        "needed_bytes": estimate.needed_bytes,
        "limit_bytes": limit_bytes(estimate),
        "reservable_bytes": estimate.reservable_bytes,
        "host_bytes": estimate.host_bytes,
        "host_limit_bytes": estimate.host_limit_bytes,
        "nvme_bytes": estimate.nvme_bytes,
        "phase": estimate.phase,
        "observations": estimate.observations,
        "same_as": found.same_as,
        "cautions": " ".join(caution.name for caution in cautions(found.plan)),
    }


def _union(mappings: Iterable[Mapping[str, float]]) -> list[str]:
    """Return all names, in the order in which they first appear."""
    return list(dict.fromkeys(name for mapping in mappings for name in mapping))


def _names(rows: list[dict[str, Scalar]]) -> list[str]:
    return list(rows[0]) if rows else ["number", "verdict", "why", "strategy", "overrides"]


def _word(name: str) -> str:
    return name.replace(" ", "_")


def _raw(value: Scalar) -> Scalar:
    """Return the value as a CSV cell: true and false as in JSON; None becomes blank."""
    return str(value).lower() if isinstance(value, bool) else value
