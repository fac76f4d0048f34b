"""Where the weights of a model come from: its own rules, or a local directory. One tensor at a time.

transformers needs a whole model for either: `from_pretrained` in each process, and rules that write into
parameters which ZeRO-3 has cut up by then, where they have no effect.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import PreTrainedModel

from train_entry.engine import Sharding

# A directory holds one of these; transformers takes the first that it finds in this order.
WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
# Old checkpoints hold what is now computed from the configuration; transformers passes over it too.
COMPUTED = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")
NAMED = 3  # tensors that a message names; more would not help

swap: Callable[[torch.Tensor, torch.Tensor], None] = torch.utils.swap_tensors
Weights = Callable[[str], torch.Tensor]  # values by a parameter's name, of its whole shape


def pour(weights: Weights, model: torch.nn.Module, sharding: Sharding, beat: Callable[[], None]) -> None:
    """Give every parameter its values, tied ones once. Beside its shard a rank holds one at a time."""
    for name, parameter in model.named_parameters():
        with torch.no_grad(), sharding.whole(parameter) as is_source:
            if is_source:
                parameter.copy_(weights(name))
        beat()


class NewWeights:
    """What the model's own rules give: the same for a seed, whatever engine, sharding or order asks for it.

    transformers has a rule for each module, which may write into those below it too. A twin of the model
    without storage shows which rules write a parameter; they are run for that parameter alone.
    """

    def __init__(self, twin: PreTrainedModel, seed: int, device: torch.device) -> None:
        """`twin` is on the meta device and in fp32. Raises ValueError where its rules cannot be known."""
        self._twin = twin
        self._seed = seed
        self._device = device
        self._rules = rules_by_parameter(twin)

    def __call__(self, name: str) -> torch.Tensor:
        parameter = self._twin.get_parameter(name)
        values = torch.nn.Parameter(torch.empty_like(parameter, device=self._device))
        torch.manual_seed(seed_of(self._seed, name))
        swap(parameter, values)  # wherever the twin refers to it, tied modules included
        for rule in self._rules[parameter]:
            rule()
        swap(parameter, values)
        return values.detach()


def seed_of(seed: int, name: str) -> int:
    """A seed of its own for each parameter, so that none depends on what was drawn before it."""
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8])


def rules_by_parameter(twin: PreTrainedModel) -> Mapping[torch.Tensor, list[Callable[[], None]]]:
    """For each parameter the calls that write it, in transformers' order: the last one decides.

    Raises ValueError where there is none, or where it cannot be told.
    """
    kind = f"a model of type {twin.config.model_type}"
    advice = "set model.path to a directory with its weights"
    rules: dict[torch.Tensor, list[Callable[[], None]]] = defaultdict(list)
    for module, rule in _rules_below(twin, twin):
        versions = [(parameter, parameter._version) for parameter in module.parameters()]
        with torch.no_grad():
            try:
                rule()
            except RuntimeError as error:  # it reads a tensor, which here has no values
                raise ValueError(f"{kind} cannot be given new weights here: {advice}") from error
        for parameter, version in versions:
            if parameter._version != version:  # torch counts writes, also those to tensors without storage
                rules[parameter].append(rule)
    if without := [name for name, parameter in twin.named_parameters() if parameter not in rules]:
        raise ValueError(f"transformers has no rule for new weights of {_some(without)} in {kind}: {advice}")
    return rules


def _rules_below(
    module: torch.nn.Module, model: PreTrainedModel
) -> Iterator[tuple[torch.nn.Module, Callable[[], None]]]:
    """Children first, each by the rules of the nearest model: PreTrainedModel.initialize_weights."""
    nearest = module if isinstance(module, PreTrainedModel) else model
    for child in module.children():
        yield from _rules_below(child, nearest)
    yield module, partial(nearest._init_weights, module)


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file."""

    file: Path
    key: str
    shape: tuple[int, ...]

    def read(self) -> torch.Tensor:
        """On the CPU, in pages of the mapped file: other ranks share them, and they go with the tensor."""
        if self.file.suffix == ".safetensors":
            with safe_open(self.file, framework="pt") as file:
                tensor: torch.Tensor = file.get_tensor(self.key)
            return tensor
        return _unpickled(self.file)[self.key]


class SavedWeights:
    """The weights in a local directory, those of each tensor read when they are asked for."""

    def __init__(self, directory: Path, model: PreTrainedModel) -> None:
        """Raises ValueError, on all ranks alike, where files and model do not hold the same tensors."""
        wanted = model.state_dict(keep_vars=True)
        found, unexpected = _found(directory, model, wanted)
        self._stored = _with_tied(found, wanted)
        _refuse_others(directory, self._stored, wanted, unexpected)

    def __call__(self, name: str) -> torch.Tensor:
        return self._stored[name].read()

    def fill_buffers(self, model: torch.nn.Module) -> None:
        """Every rank for itself: they are small, and never sharded."""
        for name, buffer in model.named_buffers():
            if name in self._stored:
                buffer.copy_(self(name))


def has_weights(directory: Path) -> bool:
    """Whether there is something to fine-tune. Raises ValueError for weights under other names."""
    if any((directory / name).is_file() for name in WEIGHT_FILES):
        return True
    others = sorted(path.name for pattern in ("*.safetensors", "*.bin") for path in directory.glob(pattern))
    if others:
        raise ValueError(f"{directory} holds {_some(others)}, and none of {', '.join(WEIGHT_FILES)}")
    return False


def weight_files(directory: Path) -> list[Path]:
    """The files that hold the weights. Raises ValueError where one is missing."""
    first = next(directory / name for name in WEIGHT_FILES if (directory / name).is_file())
    if first.suffix != ".json":
        return [first]
    names = sorted(set(json.loads(first.read_text())["weight_map"].values()))
    if absent := [name for name in names if not (directory / name).is_file()]:
        raise ValueError(f"{first} names {_some(absent)}, which its directory lacks")
    return [directory / name for name in names]


def _found(
    directory: Path, model: PreTrainedModel, wanted: Mapping[str, torch.Tensor]
) -> tuple[dict[str, Stored], list[str]]:
    """What the files hold: by the model's names, and what has none there."""
    passed_over = re.compile("|".join([*COMPUTED, *(model._keys_to_ignore_on_load_unexpected or ())]))
    found: dict[str, Stored] = {}
    unexpected = []
    for stored in (stored for file in weight_files(directory) for stored in _contents(file)):
        # A checkpoint of the base model alone, as GPT-2's, lacks the prefix.
        prefixed = f"{model.base_model_prefix}.{stored.key}"
        name = stored.key if stored.key in wanted else prefixed
        if name in wanted:
            found[name] = stored
        elif not passed_over.search(stored.key):
            unexpected.append(stored.key)
    return found, unexpected


def _contents(file: Path) -> list[Stored]:
    if file.suffix == ".safetensors":
        with safe_open(file, framework="pt") as opened:
            return [Stored(file, key, tuple(opened.get_slice(key).get_shape())) for key in opened.keys()]
    return [Stored(file, key, tuple(tensor.shape)) for key, tensor in _unpickled(file).items()]


def _unpickled(file: Path) -> Mapping[str, torch.Tensor]:
    """Tensors and plain containers only: weights_only runs no code of the file's."""
    tensors: Mapping[str, torch.Tensor] = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    return tensors


def _with_tied(found: Mapping[str, Stored], wanted: Mapping[str, torch.Tensor]) -> dict[str, Stored]:
    """All names of a tied parameter lead to one stored tensor; files hold it under one name or each."""
    by_tensor = {id(wanted[name]): stored for name, stored in found.items()}
    return {name: by_tensor[id(tensor)] for name, tensor in wanted.items() if id(tensor) in by_tensor}


def _refuse_others(
    directory: Path, stored: Mapping[str, Stored], wanted: Mapping[str, torch.Tensor], unexpected: list[str]
) -> None:
    missing = [name for name in wanted if name not in stored]
    shapes = {name: tuple(getattr(tensor, "ds_shape", tensor.shape)) for name, tensor in wanted.items()}
    others = [
        f"{name} {place.shape} instead of {shapes[name]}"
        for name, place in stored.items()
        if place.shape != shapes[name]
    ]
    kinds = {"missing": missing, "unknown to the model": unexpected, "of another shape": others}
    if reasons := [f"{kind}: {_some(names)}" for kind, names in kinds.items() if names]:
        raise ValueError(f"the weights in {directory} do not fit its config.json; {'; '.join(reasons)}")


def _some(names: list[str]) -> str:
    """The first few, and how many more."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
