"""The Hydra sweeper: Hydra calls it for `-m`, and it hands over to sweep.py at once.

Hydra 1.3 accepts a sweeper class only from the namespace `hydra_plugins` on sys.path. sweep.py adds the
directory above this one to sys.path. There is no __init__.py here, so that other plugins' directories can
join the namespace.
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
    """A sweeper that hands the command line over. It uses no Hydra launcher: those run blocking batches."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self._loader = hydra_context.config_loader

    def sweep(self, arguments: list[str]) -> None:
        # sweep.py is __main__; importing it under its name would run a second copy with its own state.
        import __main__

        __main__.run_sweep(arguments, self._loader)
