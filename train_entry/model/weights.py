"""Give a model its weights, from its own initialization rules or a local directory, one tensor at a time.

transformers itself needs a whole model for both: `from_pretrained` loads one in each process, and the rules
write into parameters, which has no effect on parameters that ZeRO-3 has already sharded.
"""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from zipfile import is_zipfile

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key

from train_entry.model.sharding import Sharding

# A directory holds one of these. transformers takes the first that it finds in this order.
WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
# Old checkpoints hold values that are now computed from the configuration. transformers ignores them too.
COMPUTED = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")
NAMED = 3  # the number of tensors that a message names
# The seed for parameters that files may leave out. It is not the trial's: a model from files is the same for
# all seeds.
SEED_OF_REST = 0
# The errors that a damaged file raises, depending on its format and on where it ends: by type, or where the
# type is too general, by text.
DAMAGED = (SafetensorError, EOFError, LookupError, struct.error)
DAMAGED_TEXTS = (
    "UnpicklingError",  # the type that weights_only raises; this module does not import it
    "PytorchStreamReader",  # caffe2/serialize/inline_container.cc: a zip file without its end or its parts
    "unexpected EOF",  # torch/csrc/serialization.cpp: a truncated file of the old format
    "Invalid argument",  # a zip file that lacks its last bytes: torch then seeks before its beginning
)

swap: Callable[[torch.Tensor, torch.Tensor], None] = torch.utils.swap_tensors
Weights = Callable[[str], torch.Tensor]  # from a parameter's name to its values, in its whole shape
Tensors = Mapping[str, torch.Tensor]


def pour(weights: Weights, model: torch.nn.Module, sharding: Sharding, beat: Callable[[], None]) -> None:
    """Give every parameter its values, tied ones once. A rank holds one whole parameter at a time."""
    for name, parameter in model.named_parameters():
        with torch.no_grad(), sharding.whole(parameter) as is_source:
            if is_source:
                parameter.copy_(sharding.part(parameter, weights(name)))
        beat()


class NewWeights:
    """New weights by the model's own rules: the same for a seed, in any engine, sharding and order of calls.

    transformers has a rule for each module, which may also write into the modules below it. A twin of the
    model without storage shows which rules write a parameter; these rules are run for that parameter alone.
    """

    def __init__(self, twin: PreTrainedModel, seed: int, device: torch.device) -> None:
        """Take a twin of the model on the meta device, in fp32. Raise ValueError if its rules are unknown."""
        self._twin = twin
        self._seed = seed
        self._device = device
        self._rules = rules_by_parameter(twin)
        self._first_names = {parameter: name for name, parameter in twin.named_parameters()}

    def __call__(self, name: str) -> torch.Tensor:
        parameter = self._twin.get_parameter(name)
        values = torch.nn.Parameter(torch.empty_like(parameter, device=self._device))
        # A tied parameter's seed uses its first name: a pipeline stage may know it only by another one.
        torch.manual_seed(seed_of(self._seed, self._first_names[parameter]))
        swap(parameter, values)  # everywhere in the twin, tied modules included
        for rule in self._rules[parameter]:
            rule()
        swap(parameter, values)
        return values.detach()


def seed_of(seed: int, name: str) -> int:
    """Return a parameter's own seed, so that its values do not depend on earlier draws."""
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:8])


def rules_by_parameter(twin: PreTrainedModel) -> Mapping[torch.Tensor, list[Callable[[], None]]]:
    """Return for each parameter the calls that write it, in transformers' order: the last one decides.

    Raise ValueError if a parameter has none, or if that cannot be determined.
    """
    kind = f"a model of type {twin.config.model_type}"
    advice = "set model.path to a directory with its weights"
    rules: dict[torch.Tensor, list[Callable[[], None]]] = defaultdict(list)
    for module, rule in _rules_below(twin, twin):
        versions = [(parameter, parameter._version) for parameter in module.parameters()]
        with torch.no_grad():
            try:
                rule()
            except RuntimeError as error:  # the rule reads a tensor, and these have no values
                raise ValueError(f"{kind} cannot be initialized with new weights: {advice}") from error
        for parameter, version in versions:
            if parameter._version != version:  # torch counts writes, even to tensors without storage
                rules[parameter].append(rule)
    if without := [name for name, parameter in twin.named_parameters() if parameter not in rules]:
        raise ValueError(f"transformers has no rule to initialize {_some(without)} of {kind}: {advice}")
    return rules


def _rules_below(
    module: torch.nn.Module, model: PreTrainedModel
) -> Iterator[tuple[torch.nn.Module, Callable[[], None]]]:
    """Yield each module with its rule, children first, in the order of PreTrainedModel.initialize_weights.

    A module's rule is that of the nearest model around it.
    """
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

    def read(self, unmapped: Callable[[Path], Tensors]) -> torch.Tensor:
        """Return the tensor on the CPU, in pages of the mapped file.

        Ranks of a host share these pages, and they are freed with the tensor.
        """
        if self.file.suffix == ".safetensors":
            with _naming(self.file), safe_open(self.file, framework="pt") as file:
                tensor: torch.Tensor = file.get_tensor(self.key)
            return tensor
        unpickle = _unpickled if is_zipfile(self.file) else unmapped
        return unpickle(self.file)[self.key]


class SavedWeights:
    """The weights in a local directory. Each tensor is read when it is needed."""

    def __init__(self, directory: Path, model: PreTrainedModel) -> None:
        """Read the directory. Raise ValueError, on all ranks, if files and model hold different tensors."""
        wanted = model.state_dict(keep_vars=True)
        found, unexpected = _found(directory, model, wanted)
        self._stored = _with_tied(found, wanted)
        missing = _missed(model, [name for name in wanted if name not in self._stored])
        _refuse_others(directory, self._stored, wanted, missing, unexpected)
        self._new = self._new_weights(model)
        # Files from before torch 1.6 cannot be mapped: the last one that was read stays in memory.
        self._unmapped = lru_cache(maxsize=1)(_unpickled)

    def __call__(self, name: str) -> torch.Tensor:
        if name in self._stored:
            return self._stored[name].read(self._unmapped)
        return self._new[name](name)

    def _new_weights(self, model: PreTrainedModel) -> Mapping[str, Weights]:
        """Make the source of parameters that the files leave out: at the start, so that all ranks raise."""
        names = [name for name, _ in model.named_parameters() if name not in self._stored]
        if not names:
            return {}
        with torch.device("meta"):
            twin = type(model)(model.config)
        return dict.fromkeys(names, NewWeights(twin, SEED_OF_REST, torch.device("cpu")))

    def fill_buffers(self, model: torch.nn.Module) -> None:
        """Copy saved values into the model's buffers, on every rank: they are small and never sharded."""
        for name, buffer in model.named_buffers():
            if name in self._stored:
                buffer.copy_(self(name))


def has_weights(directory: Path) -> bool:
    """True if the directory holds weights to fine-tune. Raise ValueError for weights under other names."""
    if any((directory / name).is_file() for name in WEIGHT_FILES):
        return True
    others = sorted(path.name for pattern in ("*.safetensors", "*.bin") for path in directory.glob(pattern))
    if others:
        raise ValueError(f"{directory} holds {_some(others)}, but none of {', '.join(WEIGHT_FILES)}")
    return False


def weight_files(directory: Path) -> list[Path]:
    """Return the files that hold the weights. Raise ValueError if one is missing."""
    first = next(directory / name for name in WEIGHT_FILES if (directory / name).is_file())
    if first.suffix != ".json":
        return [first]
    names = sorted(set(json.loads(first.read_text())["weight_map"].values()))
    if absent := [name for name in names if not (directory / name).is_file()]:
        raise ValueError(f"{first} names {_some(absent)}, which the directory does not hold")
    return [directory / name for name in names]


def _found(directory: Path, model: PreTrainedModel, wanted: Tensors) -> tuple[dict[str, Stored], list[str]]:
    """Return the stored tensors by the model's names, and the keys that the model does not know."""
    passed_over = _any_of([*COMPUTED, *(model._keys_to_ignore_on_load_unexpected or ())])
    name_of = _names(model, wanted)
    found: dict[str, Stored] = {}
    unexpected, converted = [], []
    contents = [stored for file in weight_files(directory) for stored in _contents(file)]
    for stored in sorted(contents, key=lambda stored: stored.key):  # some renamings depend on an earlier one
        name, is_converted = name_of(stored.key)
        if name not in wanted:
            unexpected += [] if passed_over.search(name) else [stored.key]
        elif is_converted:
            converted.append(stored.key)
        else:
            found[name] = stored
    if converted:
        raise ValueError(
            f"{directory} stores other tensors than a model of type {model.config.model_type} trains: "
            f"{_some(converted)} would have to be converted, which is not supported; "
            "save the model with save_pretrained(save_original_format=False)"
        )
    return found, unexpected


def _names(model: PreTrainedModel, wanted: Tensors) -> Callable[[str], tuple[str, bool]]:
    """Return a function from a file's key to the model's name, and whether transformers converts the tensor.

    The name is found as in transformers' convert_and_load_state_dict_in_model: the key is renamed, and gets
    or loses the base model's prefix to fit the model.
    """
    conversions = get_model_conversion_mapping(model)
    renamings = [conversion for conversion in conversions if isinstance(conversion, WeightRenaming)]
    converters = [conversion for conversion in conversions if not isinstance(conversion, WeightRenaming)]

    def name_of(key: str) -> tuple[str, bool]:
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, wanted)
        if name not in wanted and key in wanted:
            return key, False
        return name, pattern is not None

    return name_of


def _contents(file: Path) -> list[Stored]:
    if file.suffix == ".safetensors":
        with _naming(file), safe_open(file, framework="pt") as opened:
            return [Stored(file, key, tuple(opened.get_slice(key).get_shape())) for key in opened.keys()]
    return [Stored(file, key, tuple(tensor.shape)) for key, tensor in _unpickled(file).items()]


def _unpickled(file: Path) -> Tensors:
    """Load a pickled file of tensors and plain containers. With weights_only no code in the file is run."""
    with _naming(file):
        tensors: Tensors = torch.load(file, map_location="cpu", mmap=is_zipfile(file), weights_only=True)
    return tensors


@contextmanager
def _naming(file: Path) -> Iterator[None]:
    """Turn an error about damaged content into a ValueError that names the file."""
    try:
        yield
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        if isinstance(error, DAMAGED) or any(text in said for text in DAMAGED_TEXTS):
            raise ValueError(
                f"{file} cannot be read ({type(error).__name__}): it is truncated or damaged, or holds more "
                "than tensors; copy or save it again"
            ) from error
        raise


def _missed(model: PreTrainedModel, absent: list[str]) -> list[str]:
    """Return the absent tensors that transformers would report as missing. The others need no values."""
    not_missed = _any_of(model._keys_to_ignore_on_load_missing or ())
    return [name for name in absent if not not_missed.search(name)]


def _any_of(patterns: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(f"({pattern})" for pattern in patterns) or "(?!)")  # (?!) matches nothing


def _with_tied(found: Mapping[str, Stored], wanted: Tensors) -> dict[str, Stored]:
    """Map all names of a tied parameter to one stored tensor. Files hold it under one name or under all."""
    by_tensor = {id(wanted[name]): stored for name, stored in found.items()}
    return {name: by_tensor[id(tensor)] for name, tensor in wanted.items() if id(tensor) in by_tensor}


def _refuse_others(
    directory: Path, stored: Mapping[str, Stored], wanted: Tensors, missing: list[str], unexpected: list[str]
) -> None:
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
    """The first few names, and the number of the others."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
