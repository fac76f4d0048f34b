"""Estimate a plan before it runs: memory by component, step time by part, and their uncertainty. Pure."""
