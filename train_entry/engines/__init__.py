"""The ways to run a model over its ranks: torch DDP, DeepSpeed ZeRO, DeepSpeed pipelines."""
