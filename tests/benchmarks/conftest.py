"""Fixtures shared with other tests, and one Slurm for all benchmarks that need it."""

from tests.slurm.conftest import line, slurm
from tests.sweeps.conftest import bench, composer, shape

__all__ = ["bench", "composer", "line", "shape", "slurm"]
