"""Programs that make a machine ready: the environment, torch, DeepSpeed operators."""
