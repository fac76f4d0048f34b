"""What is tried next: the baselines, the prior, the sampler; and how sure the winner is. Pure."""
