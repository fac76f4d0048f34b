"""Measurements of a running trial: step times, memory, and the state of the GPU."""
