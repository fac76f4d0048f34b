"""Load tokens and distribute them to the ranks.

The samples of global step k are the same for every micro-batch size and every data degree, so that the losses
of different plans can be compared.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from train_entry.contract import DataSpec, ModelShape, Plan

Tokens = npt.NDArray[Any]  # one dimension; uint8 for bytes, else uint32

TEXT_SUFFIXES = (".txt", ".md", ".jsonl", ".py")
# Third-party packages, and tests, which some Linux distributions leave out of the standard library.
SKIPPED_IN_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
TOKENIZED_AT_ONCE_CHARS = 2**20
SYNTHETIC_TOKENS = 2**22  # repeated when all were seen, as text is


class Windows(Dataset[torch.Tensor]):
    """Consecutive windows of seq_len tokens, as many as fill whole global batches.

    The remaining tokens are never used: with them, an epoch's last batches would depend on how samples are
    split over ranks.
    """

    def __init__(self, tokens: Tokens, plan: Plan) -> None:
        windows = len(tokens) // plan.seq_len
        self._count = windows // plan.global_batch * plan.global_batch
        if self._count == 0:
            raise ValueError(
                f"the data has {len(tokens)} tokens; one global batch needs global_batch x seq_len = "
                f"{plan.global_batch} x {plan.seq_len} = {plan.tokens_per_step}: add text, "
                "or reduce global_batch or seq_len"
            )
        self._tokens = tokens[: self._count * plan.seq_len].reshape(self._count, plan.seq_len)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.from_numpy(self._tokens[index].astype(np.int64))


def micro_batches(windows: Windows, plan: Plan, data_rank: int) -> Iterator[torch.Tensor]:
    """Yield token ids of shape (micro_batch, seq_len) without end, in a new order for each epoch.

    The order is the same on all ranks.
    """
    # Data rank r of R takes the positions r, r + R, r + 2R ... of that order. In one step the ranks thus take
    # the next global_batch positions together, for any R.
    sampler: DistributedSampler[torch.Tensor] = DistributedSampler(
        windows, num_replicas=plan.data, rank=data_rank, shuffle=True, seed=plan.seed, drop_last=True
    )
    loader = DataLoader(windows, batch_size=plan.micro_batch, sampler=sampler, drop_last=True)
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def load_tokens(spec: DataSpec, model: ModelShape, seed: int, on_progress: Callable[[], None]) -> Tokens:
    """Load all tokens of a data set, and call `on_progress` after each tokenized part.

    Raise ValueError if the data is missing or of an unknown kind, or has ids outside the model's vocabulary.
    """
    if spec.kind == "synthetic":
        return np.random.default_rng(seed).integers(0, model.vocab, SYNTHETIC_TOKENS, dtype=np.uint32)
    text = _read(_files(spec), spec.max_bytes)
    if spec.tokenizer is None:
        tokens: Tokens = np.frombuffer(text, dtype=np.uint8)
    else:
        tokens = _tokenize(text, spec.tokenizer, on_progress)
    _check_vocabulary(tokens, model.vocab)
    return tokens


def _files(spec: DataSpec) -> Iterator[Path]:
    if spec.kind == "stdlib":
        return _walk(Path(sysconfig.get_paths()["stdlib"]), (".py",), SKIPPED_IN_STDLIB)
    if spec.kind != "text":
        raise ValueError(f"data.kind is {spec.kind}; it must be stdlib, text or synthetic")
    if spec.path is None:
        raise ValueError("data.kind is text: set data.path to a text file or a directory of text files")
    root = Path(spec.path)
    if not root.exists():
        raise ValueError(f"data.path {root} does not exist")
    return iter([root]) if root.is_file() else _walk(root, TEXT_SUFFIXES, set())


def _walk(root: Path, suffixes: tuple[str, ...], skipped: set[str]) -> Iterator[Path]:
    """Yield files in an order that is the same on every host, lazily since a tree can be large."""
    for directory, subdirectories, names in os.walk(root):
        subdirectories[:] = sorted(set(subdirectories) - skipped)
        yield from (Path(directory) / name for name in sorted(names) if name.endswith(suffixes))


def _read(files: Iterator[Path], max_bytes: int) -> bytes:
    parts: list[bytes] = []
    left = max_bytes
    for path in files:
        if left <= 0:
            break
        with path.open("rb") as file:
            parts.append(file.read(left))
        left -= len(parts[-1])
    return b"".join(parts)


def _tokenize(text: bytes, directory: str, on_progress: Callable[[], None]) -> Tokens:
    from transformers import AutoTokenizer  # the import takes seconds, and only some data needs it

    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    characters = text.decode("utf-8", errors="replace")
    parts: list[Tokens] = []
    for start in range(0, len(characters), TOKENIZED_AT_ONCE_CHARS):
        part = characters[start : start + TOKENIZED_AT_ONCE_CHARS]
        ids = tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"]
        parts.append(np.asarray(ids, dtype=np.uint32))
        on_progress()
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.uint32)


def _check_vocabulary(tokens: Tokens, vocab: int) -> None:
    highest = int(tokens.max(initial=0))
    if highest >= vocab:
        raise ValueError(
            f"the data has token ids up to {highest}, but the model's vocabulary has {vocab}: set "
            f"model.vocab={highest + 1} or more, or data.tokenizer to the model's own tokenizer"
        )
