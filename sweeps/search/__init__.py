"""What is tried next: the ladder, the prior, the sampler; and how sure the winner is. Pure."""
