"""Where trials run. The only package that imports submitit.

`base` says what a cluster can do; `local` is this machine. `supervisor` runs beside each rank.
"""
