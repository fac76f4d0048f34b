"""Directories of this checkout."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONF = ROOT / "conf"
HYDRA_PLUGINS = ROOT / "sweeps" / "_hydra"  # holds the namespace package in which Hydra looks for sweepers
