"""Compose one typed configuration from overrides. Each error becomes one line that says where it is."""

from __future__ import annotations

import copy
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import yaml
from hydra import initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import ConfigCompositionException, HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from sweeps.config import validate
from sweeps.config.keys import KEYS, flatten, key_of
from sweeps.config.schema import SweepConfig
from sweeps.errors import ConfigError
from sweeps.paths import CONF, HYDRA_PLUGINS
from train_entry.contract import Scalar

CONFIG_NAME = "sweep"
CONFIG_ERRORS = (HydraException, OmegaConfBaseException, yaml.YAMLError)


def register_schema() -> None:
    """Register the schema with Hydra; conf/sweep.yaml names it first in its defaults list."""
    ConfigStore.instance().store(name="schema", node=SweepConfig)


def register_resolvers(has_gpu: Callable[[], bool]) -> None:
    """Define `${by_machine:A,B}`: A on a machine without GPUs, B on a machine with GPUs."""
    OmegaConf.register_new_resolver(
        "by_machine", lambda cpu, gpu: gpu if has_gpu() else cpu, use_cache=True, replace=True
    )


def open_composer(has_gpu: Callable[[], bool], directory: Path = CONF) -> Composer:
    """Return a composer on conf/, for a program that hydra.main did not start."""
    if (plugins := str(HYDRA_PLUGINS)) not in sys.path:
        sys.path.append(plugins)  # conf/sweep.yaml names our sweeper
    register_schema()
    register_resolvers(has_gpu)
    with initialize_config_dir(str(directory), job_name="sweep", version_base="1.3"):
        return Composer(GlobalHydra.instance().config_loader())


class Composer:
    """A wrapper of Hydra's loader that composes one configuration at a time."""

    def __init__(self, loader: ConfigLoader, fixed: Sequence[str] = ()) -> None:
        self.loader = loader
        self.fixed = tuple(fixed)
        self._composed = lru_cache(maxsize=256)(self._load)

    def with_fixed(self, fixed: Sequence[str]) -> Composer:
        return Composer(self.loader, fixed)

    def groups(self) -> frozenset[str]:
        """Return the keys whose values are files of conf/: model, strategy, ..."""
        return frozenset(self.loader.list_groups(""))

    def options(self, group: str) -> list[str]:
        return self.loader.get_group_options(group)

    def compose(self, values: Mapping[str, Scalar] | None = None) -> SweepConfig:
        """Return the configuration for the fixed overrides and these knob values.

        Hydra composes once for each combination of groups (60 to 90 ms); the other knobs are then set on
        the result. Raises ConfigError with a line for each problem.
        """
        values = values or {}
        groups = self.groups()
        chosen = tuple(f"{key}={value}" for key, value in values.items() if key in groups)
        config = copy.deepcopy(self._composed(chosen))
        for key, value in values.items():
            if key not in groups:
                self._set(config, key, value)
        return self._typed(config, values)

    def flat(self, values: Mapping[str, Scalar] | None = None) -> dict[str, Scalar]:
        """Return the configuration by dotted keys."""
        self.compose(values)
        config = OmegaConf.to_container(self._composed(()), resolve=True)
        return dict(flatten(cast(dict[str, Any], config), ""))

    def space(self) -> dict[str, str]:
        """Return the ranges of the chosen space files, by key."""
        # A file has dotted keys, but `+space.zero.x=...` on a command line makes nested ones.
        return {key: str(text) for key, text in flatten(self.compose().space, "")}

    def origin(self, key: str) -> str | None:
        """Return the override, or the file, that set a key last; None if nothing set it."""
        for override in reversed(self.fixed):
            if key_of(override) == key:
                return f"override {override!r}"
        defaults = self.loader.compute_defaults_list(CONFIG_NAME, list(self.fixed), RunMode.RUN)
        for entry in reversed(defaults.defaults):
            if path := self._file_setting(entry, key):
                return path
        return None

    def _file_setting(self, entry: Any, key: str) -> str | None:
        package = f"{entry.package}." if entry.package else ""  # empty: the file sets keys at the top
        if not key.startswith(package):
            return None
        for source in self.loader.get_sources():
            if source.is_config(entry.config_path) and source.scheme() == "file":
                loaded = source.load_config(entry.config_path).config
                if OmegaConf.select(loaded, key.removeprefix(package)) is not None:
                    return f"conf/{entry.config_path}.yaml"
        return None

    def _load(self, chosen: tuple[str, ...]) -> DictConfig:
        with one_line():
            config = self.loader.load_configuration(
                CONFIG_NAME, overrides=[*self.fixed, *chosen], run_mode=RunMode.RUN
            )
        OmegaConf.set_struct(config, False)
        config.pop("hydra", None)
        container = cast(dict[str, Any], OmegaConf.to_container(config))
        if unknown := list(validate.unknown_keys(container)):
            raise ConfigError([f"{key}: no such key; {validate.suggest(key)}" for key in unknown])
        return config

    def _set(self, config: DictConfig, key: str, value: Scalar) -> None:
        if key not in KEYS:
            raise ConfigError(f"{key}: no such knob; {validate.suggest(key)}")
        parsed = json.loads(value) if isinstance(value, str) and value[:1] in ("[", "{") else value
        with one_line(f"{key}={value}"):
            OmegaConf.update(config, key, parsed)

    def _typed(self, config: DictConfig, values: Mapping[str, Scalar]) -> SweepConfig:
        with one_line():
            typed = cast(SweepConfig, OmegaConf.to_object(config))
        lines = []
        for key, problem in validate.bad_values(typed):
            origin = f"{key}={values[key]}" if key in values else self.origin(key)
            lines.append(f"{key}: {problem}" + (f" ({origin})" if origin else ""))
        if lines:
            raise ConfigError(lines)
        return typed


@contextmanager
def one_line(prefix: str = "") -> Iterator[None]:
    """Turn errors of Hydra, OmegaConf and the YAML parser into a ConfigError of one line."""
    try:
        yield
    except CONFIG_ERRORS as error:
        raise ConfigError(describe(error, prefix)) from error


def describe(error: BaseException, prefix: str = "") -> str:
    """Describe an error of the configuration libraries, and its causes, in one line."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"{mark.name}, line {mark.line + 1}: {error.problem or 'not valid YAML'}"
    if missing := _unknown_choice(error):
        return missing
    texts = [prefix] if prefix else []
    cause: BaseException | None = error
    while cause is not None:
        texts.append(describe(cause) if isinstance(cause, yaml.YAMLError) else _first_line(cause))
        cause = cause.__cause__
    unique = [text for at, text in enumerate(texts) if text and text not in " ".join(texts[:at])]
    return ": ".join(unique) + _way_out(error)


def _unknown_choice(error: BaseException) -> str | None:
    """Return `strategy=zero9: no such choice; there are ...`; Hydra itself seldom lists the choices."""
    named = re.search(r"Could not (?:find|load) '([^']+)/([^'/]+)'", str(error))
    if not isinstance(error, ConfigCompositionException) or not named:
        return None
    others = sorted(path.stem for path in (CONF / named[1]).glob("*.yaml"))
    return f"{named[1]}={named[2]}: no such choice; there are {', '.join(others)}" if others else None


def _first_line(error: BaseException) -> str:
    """Return the first line of an error, and the next one if it names the key."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines[1:2] if line.startswith("Key '")]
    return ": ".join(line.rstrip(".:") for line in [*lines[:1], *named])


def _way_out(error: BaseException) -> str:
    """Return a hint at what would work, for errors whose first line gives none; else an empty text."""
    if "Ambiguous value for argument" in str(error):
        return "; to try several values: python sweep.py -m ..."
    text = "\n".join(str(found) for found in (error, error.__cause__) if found)
    if "Key '" in text and "full_key:" in text:
        return "; " + validate.suggest(text.split("full_key:", 1)[1].split()[0])
    return ""
