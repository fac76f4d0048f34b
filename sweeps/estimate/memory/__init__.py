"""Estimate the memory of a plan before it runs: bytes by component, phase and pipeline stage. Pure."""
