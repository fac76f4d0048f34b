"""Print the shape of a transformers model on disk as JSON: `python -m train_entry.model.shape DIR`.

The orchestrator runs this in a separate process, since it must not import torch itself.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

from train_entry.contract import ModelShape, dump


def shape_of(directory: Path) -> ModelShape:
    """Read config.json and count the parameters, without allocating them.

    Raise ValueError or OSError if the directory holds no causal language model that transformers knows.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from train_entry.model.build import count_parameters, local_config  # imports torch: seconds

    config = local_config(directory)
    text = config.get_text_config()  # the language part of a multi-modal model; otherwise config itself
    hidden = _first(text, "hidden_size", "n_embd")
    heads = _first(text, "num_attention_heads", "n_head")
    return ModelShape(
        name=directory.resolve().name,
        family=config.model_type,
        parameters=count_parameters(config),
        layers=_first(text, "num_hidden_layers", "n_layer"),
        hidden=hidden,
        heads=heads,
        kv_heads=_first(text, "num_key_value_heads", default=heads),
        ffn=_first(text, "intermediate_size", "n_inner", default=4 * hidden),
        vocab=_first(text, "vocab_size"),
        positions=_first(text, "max_position_embeddings", "n_positions"),
        tied_embeddings=bool(config.tie_word_embeddings),
        has_biases=any(getattr(text, name, False) for name in ("attention_bias", "mlp_bias")),
        path=str(directory.resolve()),
    )


def _first(config: Any, *names: str, default: int | None = None) -> int:
    """Return the first attribute that is set: model families use different names for the same value."""
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return int(value)
    if default is None:
        raise ValueError(f"config.json of a {config.model_type} has none of {', '.join(names)}")
    return default


def main(arguments: list[str]) -> int:
    """Print the shape. On an error print one line on stderr and return status 2."""
    if len(arguments) != 1:
        print("usage: python -m train_entry.model.shape DIR", file=sys.stderr)
        return 2
    try:
        with contextlib.redirect_stdout(sys.stderr):  # libraries may print, but stdout must hold only JSON
            shape = shape_of(Path(arguments[0]))
    except (ValueError, OSError, KeyError) as error:
        first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        print(f"{arguments[0]}: {first_line}", file=sys.stderr)
        return 2
    print(dump(shape))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
