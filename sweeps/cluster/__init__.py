"""Clusters: the places where trials run. No other package imports submitit.

`base` defines what a cluster can do; `local`, `slurm` and `hostfile` are the backends. `node` is the code
that runs on every node, whatever the backend.
"""
