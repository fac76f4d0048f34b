"""Find the study that a command line means.

That is its name, and the settings that must stay the same for its trials to be comparable.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import json
import time
from collections.abc import Mapping, Sequence

from sweeps.config.keys import flat_default, goal_names, is_marked, key_of, scope_of
from sweeps.config.knob import Mark
from sweeps.config.schema import SweepConfig
from sweeps.errors import ConfigError
from sweeps.machine import Machine
from sweeps.space.dimensions import SearchSpace
from train_entry.contract import Goal, ModelShape, Scalar, StudyRecord

TIMED_PACKAGES = ("torch", "deepspeed", "transformers")


def study_record(
    config: SweepConfig,
    flat: Mapping[str, Scalar],
    space: SearchSpace,
    model: ModelShape,
    machine: Machine,
    overrides: Sequence[str],
) -> StudyRecord:
    """Return the record of what a sweep asks for.

    Without `study=` the name is derived, so that the same command resumes the study.
    """
    varied = {dimension.key for dimension in space.dimensions}
    # The actual number: with `ranks=null` another machine would continue the study with other plans.
    flat = {**flat, "ranks": config.ranks or machine.default_ranks}
    asked = {key: value for key, value in flat.items() if key not in varied and scope_of(key).is_asked}
    dimensions = {dimension.key: dimension.text for dimension in space.dimensions}
    limits = {key: value for key, value in flat.items() if key.startswith("limits.")}
    # Keys at their defaults are left out, so that a key that a later version adds does not change the name.
    said = {key: value for key, value in asked.items() if value != flat_default(key)}
    text = json.dumps([said, dimensions], sort_keys=True)
    derived = f"{model.name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    sought = goals(config, "ranks" in varied)
    return StudyRecord(
        name=config.study or derived,
        created_at=time.time(),
        goals=sought,
        asked=asked,
        dimensions=dimensions,
        limits=limits,
        versions=versions(machine),
        model=model,
        overrides=tuple(text for text in overrides if not is_marked(key_of(text), Mark.SECRET)),
    )


def asked_value(record: StudyRecord, key: str) -> Scalar:
    """Return what a study asks for a key. Where a key is newer than the study, it had its default."""
    value: Scalar = record.asked.get(key, flat_default(key))
    return value


def joined_record(known: StudyRecord, asked: StudyRecord) -> StudyRecord:
    """Return the record that a single trial asks for when it joins the study `known`.

    Model, data and batch are the single trial's, so that a difference shows; all else is the study's own.
    """
    shared = {
        key: asked.asked.get(key) if is_marked(key, Mark.COMPARABLE) else value
        for key, value in known.asked.items()
    }
    return dataclasses.replace(known, asked=shared, versions=asked.versions)


def comparable(asked: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Return the settings that even single trials must share to be gathered in one table."""
    return {key: value for key, value in asked.items() if is_marked(key, Mark.COMPARABLE)}


def collection_name(asked: StudyRecord) -> str:
    """Return the name of the study of single trials that can stand in one table with this one."""
    text = json.dumps([comparable(asked.asked), dict(asked.versions)], sort_keys=True)
    return f"{asked.model.name}-single-{hashlib.sha256(text.encode()).hexdigest()[:6]}"


def goals(config: SweepConfig, ranks_vary: bool) -> tuple[Goal, ...]:
    """Return the goals, the most important first. Raise ConfigError where only the user can choose."""
    names = goal_names(config.objective)
    if names == ("auto",):
        if ranks_vary:
            raise ConfigError(
                "ranks varies, so choose total or per-GPU throughput: "
                "objective may be tokens_per_s or tokens_per_s_per_gpu"
            )
        names = ("tokens_per_s_per_gpu",)
    price = config.cluster.price_per_gpu_hour
    return tuple(
        Goal(name=name, tokens=config.token_budget or 0.0, price_per_gpu_hour=price or 0.0) for name in names
    )


def versions(machine: Machine) -> dict[str, str]:
    """Return package versions and the device: they change timings though no knob does.

    Versions are read from metadata, since importing torch takes seconds.
    """
    return {name: importlib.metadata.version(name) for name in TIMED_PACKAGES} | {
        "device": machine.device_name
    }
