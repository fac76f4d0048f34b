"""Which study a command line means: its name, and what must stay the same for its trials to compare."""

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
    """What a sweep asks. Without `study=` the name is derived, so that the same command resumes."""
    varied = {dimension.key for dimension in space.dimensions}
    # The number itself: with `ranks=null` another machine would otherwise go on with other plans.
    flat = {**flat, "ranks": config.ranks or machine.default_ranks}
    asked = {key: value for key, value in flat.items() if key not in varied and scope_of(key).is_asked}
    dimensions = {dimension.key: dimension.text for dimension in space.dimensions}
    limits = {key: value for key, value in flat.items() if key.startswith("limits.")}
    # Without what stands at its default: a key that a later version adds then leaves the name as it is.
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
    """What a study asks of a key. One that is younger than the study had its default's effect."""
    value: Scalar = record.asked.get(key, flat_default(key))
    return value


def joined_record(known: StudyRecord, asked: StudyRecord) -> StudyRecord:
    """What a single trial asks of the study it joins: the same model, data and batch; all else is its own."""
    shared = {
        key: asked.asked.get(key) if is_marked(key, Mark.COMPARABLE) else value
        for key, value in known.asked.items()
    }
    return dataclasses.replace(known, asked=shared, versions=asked.versions)


def comparable(asked: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """The part that even trials of one's own, gathered in one table, must share."""
    return {key: value for key, value in asked.items() if is_marked(key, Mark.COMPARABLE)}


def collection_name(asked: StudyRecord) -> str:
    """The study of single trials that can stand in one table with this one."""
    text = json.dumps([comparable(asked.asked), dict(asked.versions)], sort_keys=True)
    return f"{asked.model.name}-single-{hashlib.sha256(text.encode()).hexdigest()[:6]}"


def goals(config: SweepConfig, ranks_vary: bool) -> tuple[Goal, ...]:
    """What is sought, the most important first. Raises ConfigError where only the user can say which."""
    names = goal_names(config.objective)
    if names == ("auto",):
        if ranks_vary:
            raise ConfigError(
                "ranks varies: say whether total or per-GPU throughput counts; "
                "objective may be tokens_per_s or tokens_per_s_per_gpu"
            )
        names = ("tokens_per_s_per_gpu",)
    price = config.cluster.price_per_gpu_hour
    return tuple(
        Goal(name=name, tokens=config.token_budget or 0.0, price_per_gpu_hour=price or 0.0) for name in names
    )


def versions(machine: Machine) -> dict[str, str]:
    """What changes a timing though no knob does. Read from metadata: importing torch takes seconds."""
    return {name: importlib.metadata.version(name) for name in TIMED_PACKAGES} | {
        "device": machine.device_name
    }
