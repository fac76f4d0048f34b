"""Programs that prepare a machine: the environment, torch, DeepSpeed's operators."""
