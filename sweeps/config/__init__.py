"""Turn YAML files and overrides into typed knobs. The only package that imports hydra and omegaconf."""
