"""Cut a transformers model into pipeline stages, each with its own blocks, embedding or head only."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from train_entry.contract import Coordinates, Plan
from train_entry.model import split


@dataclass(frozen=True, kw_only=True, slots=True)
class Anatomy:
    """The names of a family's parts, below its base model."""

    embedding: str  # turns token ids into vectors
    positions: tuple[str, ...]  # modules that embed positions
    blocks: str
    norm: str


ANATOMIES = {
    "llama": Anatomy(embedding="embed_tokens", positions=(), blocks="layers", norm="norm"),
    "gpt2": Anatomy(embedding="wte", positions=("wpe",), blocks="h", norm="ln_f"),
}


class Absent(torch.nn.Module):
    """A placeholder for a part that another stage has. It returns its input."""

    def forward(self, hidden: torch.Tensor, *unused: Any, **unused_by_name: Any) -> torch.Tensor:
        return hidden


class NoPositions(torch.nn.Module):
    """A placeholder for the embedding of positions, which the first stage adds. It returns zero."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        return torch.zeros((), dtype=self._dtype, device=positions.device)


class Staged:
    """The parameters of one stage only, however large the model is. Implements sharding.Sharding."""

    def __init__(self, plan: Plan, place: Coordinates, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self._plan = plan
        self._at = place
        self._device = device

    def construct(self) -> AbstractContextManager[object]:
        return torch.device("meta")  # allocates nothing

    def place(self, model: PreTrainedModel) -> None:
        cut_out(model, self._plan, self._at.stage)
        if self._plan.tensor > 1:
            split.shrink(model, self._plan.tensor)
        model.to_empty(device=self._device)
        mark_shared_embedding(model)
        if self._plan.tensor > 1:
            split.mark(model)
        with torch.no_grad():
            for module in model.modules():
                if next(module.buffers(recurse=False), None) is not None:
                    model._init_weights(module)  # transformers' own rule, for rotary frequencies

    def part(self, parameter: torch.nn.Parameter, values: torch.Tensor) -> torch.Tensor:
        return split.part_of(parameter, values, self._at.tensor)

    def whole(self, parameter: torch.nn.Parameter) -> AbstractContextManager[bool]:
        return contextlib.nullcontext(True)


def cut_out(model: PreTrainedModel, plan: Plan, stage: int) -> None:
    """Remove from a model the parts of all other stages. The remaining parameters keep their names.

    Raise ValueError for a family whose parts are not known.
    """
    anatomy = anatomy_of(model)
    base = model.base_model
    blocks = getattr(base, anatomy.blocks)
    own = plan.blocks(stage, len(blocks))
    for index in range(len(blocks)):
        if index not in own:
            blocks[index] = Absent()
    if stage > 0:
        setattr(base, anatomy.embedding, Absent())
        for name in anatomy.positions:
            setattr(base, name, NoPositions(model.dtype))
    if stage < plan.pipeline - 1:
        setattr(base, anatomy.norm, Absent())
        model.lm_head = Absent()


def mark_shared_embedding(model: PreTrainedModel) -> None:
    """Mark a tied embedding, which is also the head: the first and the last stage both hold it."""
    if model.config.tie_word_embeddings:
        for module in (getattr(model.base_model, anatomy_of(model).embedding), model.lm_head):
            for parameter in module.parameters():
                parameter.is_at_both_ends = True


def anatomy_of(model: PreTrainedModel) -> Anatomy:
    family = model.config.model_type
    if family not in ANATOMIES:
        raise ValueError(
            f"a model of type {family} cannot be cut into pipeline stages: only {' and '.join(ANATOMIES)} can"
        )
    return ANATOMIES[family]


class Stage(torch.nn.Module):
    """One stage's part of the forward pass. It takes token ids or vectors and returns vectors or logits."""

    def __init__(self, model: Any) -> None:
        """Take a model that `cut_out` has reduced to one stage."""
        super().__init__()
        anatomy = anatomy_of(model)
        self.model = model
        self.shares_embedding: bool = model.config.tie_word_embeddings
        self._embedding = getattr(model.base_model, anatomy.embedding)
        self._is_first = not isinstance(self._embedding, Absent)
        self._is_last = not isinstance(model.lm_head, Absent)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        name = "input_ids" if self._is_first else "inputs_embeds"
        hidden: torch.Tensor = self.model.base_model(**{name: inputs}).last_hidden_state
        return self.model.lm_head(hidden) if self._is_last else hidden

    def loss(self, logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Return the model's own next-token loss."""
        loss: torch.Tensor = self.model.loss_function(
            logits=logits, labels=tokens, vocab_size=self.model.config.vocab_size
        )
        return loss

    def embedding_or_head(self) -> torch.nn.Module:
        """The module with the tied weight: the embedding in the first stage, the head in the last."""
        module: torch.nn.Module = self._embedding if self._is_first else self.model.lm_head
        return module
