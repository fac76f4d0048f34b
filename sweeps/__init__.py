"""Decides what to try and submits it. Never imports torch or deepspeed: those run in the jobs."""
