"""Fixtures of tests that serve here too; one Slurm for all benchmarks that want it."""

from tests.slurm.conftest import line, slurm
from tests.sweeps.conftest import bench, composer, shape

__all__ = ["bench", "composer", "line", "shape", "slurm"]
