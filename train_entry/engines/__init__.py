"""The engines that train a model over its ranks: torch DDP, DeepSpeed ZeRO, DeepSpeed pipelines."""
