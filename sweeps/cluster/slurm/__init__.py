"""Slurm: each trial is a job of its own, or a step of an allocation that the study holds."""
