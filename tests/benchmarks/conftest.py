"""The fixtures of the loop's own tests serve here too."""

from tests.sweeps.conftest import bench, composer, shape

__all__ = ["bench", "composer", "shape"]
