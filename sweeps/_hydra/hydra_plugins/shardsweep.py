"""Where Hydra looks for sweepers: `-m` ends up here, and goes on in sweep.py at once.

Hydra 1.3 accepts a sweeper class only from the namespace `hydra_plugins`, found on sys.path. This directory
is put there by sweep.py; without an __init__.py, so that other plugins' directories join the namespace.
"""

from __future__ import annotations

from hydra.core.config_store import ConfigStore
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

ConfigStore.instance().store(
    group="hydra/sweeper", name="shardsweep", node={"_target_": "hydra_plugins.shardsweep.ShardsweepSweeper"}
)


class ShardsweepSweeper(Sweeper):
    """Hands the command line over. Hydra's launchers are a blocking batch, so none is used."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self._loader = hydra_context.config_loader

    def sweep(self, arguments: list[str]) -> None:
        # The script is __main__; importing it under its name would run a second copy with its own state.
        import __main__

        __main__.run_sweep(arguments, self._loader)
