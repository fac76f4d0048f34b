"""Propose the next trial (baselines, prior, sampler) and decide how sure the winner is."""
