"""From YAML files and overrides to typed knobs. The only package that imports hydra and omegaconf."""
