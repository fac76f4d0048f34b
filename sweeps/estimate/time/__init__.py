"""Estimate the step time of a plan before it runs: seconds by part. Pure."""
