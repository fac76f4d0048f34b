"""Decide what to try and submit it. This package never imports torch or deepspeed: the jobs do."""
