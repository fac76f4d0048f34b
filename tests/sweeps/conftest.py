"""Shared fixtures of the orchestrator's tests: a model, a machine, and Hydra on the real conf/."""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from hydra import initialize_config_dir
from hydra.core.config_loader import ConfigLoader
from hydra.core.global_hydra import GlobalHydra
from hydra.types import RunMode
from omegaconf import DictConfig

from sweeps.config.compose import Composer, register_resolvers, register_schema
from sweeps.machine import Machine
from tests.support.examples import a_model
from tests.support.paths import ROOT
from train_entry.contract import ModelShape


@pytest.fixture(scope="session")
def mlflow_uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One database for all tests, since creating one takes seconds; each test uses its own experiment."""
    return f"sqlite:///{tmp_path_factory.mktemp('with space')}/mlflow.db"


@pytest.fixture
def shape() -> ModelShape:
    return a_model()


@pytest.fixture
def machine() -> Machine:
    """Four cores, no GPU."""
    return Machine(device="cpu", nodes=1, ranks_per_node=4, cores=4)


class RememberingLoader:
    """Hydra's loader with a cache for all tests: composing the same overrides again takes 0.2 s."""

    def __init__(self, loader: ConfigLoader) -> None:
        self._loader = loader
        self._composed: dict[tuple[str, ...], DictConfig] = {}
        self._groups: list[str] = []

    def load_configuration(self, name: str, overrides: list[str], run_mode: RunMode) -> DictConfig:
        key = tuple(overrides)
        if key not in self._composed:
            self._composed[key] = self._loader.load_configuration(name, overrides, run_mode)
        return copy.deepcopy(self._composed[key])

    def list_groups(self, parent_name: str) -> list[str]:
        self._groups = self._groups or self._loader.list_groups(parent_name)
        return self._groups

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def composer_on(directory: Path) -> Composer:
    """Return a composer on a directory of YAML files, as on a machine without GPUs."""
    plugins = str(ROOT / "sweeps" / "_hydra")
    if plugins not in sys.path:
        sys.path.append(plugins)
    register_schema()
    register_resolvers(lambda: False)
    with initialize_config_dir(str(directory), job_name="sweep", version_base="1.3"):
        return Composer(cast(ConfigLoader, RememberingLoader(GlobalHydra.instance().config_loader())))


@pytest.fixture(scope="session")
def composer() -> Composer:
    """A composer on the real conf/ without overrides."""
    return composer_on(ROOT / "conf")


@pytest.fixture(scope="session")
def compose_in() -> Callable[[Path], Composer]:
    """A function that returns a composer on another directory of YAML files."""
    return composer_on


@pytest.fixture
def bench(composer: Composer, shape: ModelShape, tmp_path: Path) -> Callable[..., Any]:
    """A function that makes a `Bench` from scripts by plan."""
    from tests.support.studies import make_bench  # optuna takes a second to import

    return functools.partial(make_bench, composer, shape, tmp_path / "mine")
