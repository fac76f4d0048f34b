"""The ways a configuration makes no legal plan. One function each; all that are broken are reported at once.

A rule gives its reason with the numbers, and what would be legal. It is checked before anything is launched,
so a broken rule costs 0 GPU-seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sweeps.config.schema import SweepConfig
from sweeps.machine import Machine
from train_entry.contract import ModelShape

BYTE_VALUES = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Draft:
    """What is known before a plan exists."""

    config: SweepConfig
    model: ModelShape
    machine: Machine
    ranks: int
    precision: str

    @property
    def data(self) -> int:
        return max(1, self.ranks // (self.config.tensor * self.config.pipeline))


Rule = Callable[[Draft], str | None]


def ranks_fit_the_cluster(draft: Draft) -> str | None:
    machine = draft.machine
    if draft.ranks <= machine.capacity:
        return None
    unit = "GPUs" if machine.device == "cuda" else "cores"
    return (
        f"ranks={draft.ranks} is more than the capacity of {machine.capacity} "
        f"({machine.nodes} x {machine.ranks_per_node} {unit}); ranks may be 1 to {machine.capacity}"
    )


def degrees_divide_ranks(draft: Draft) -> str | None:
    degree = draft.config.tensor * draft.config.pipeline
    if draft.ranks % degree == 0:
        return None
    return (
        f"tensor={draft.config.tensor} x pipeline={draft.config.pipeline} does not divide ranks={draft.ranks}"
    )


def batches_divide(draft: Draft) -> str | None:
    """The batch triad: global_batch = micro_batch x accumulation x data degree."""
    config, data = draft.config, draft.data
    if ranks_fit_the_cluster(draft) or degrees_divide_ranks(draft):
        return None  # there is no data degree to speak of
    if config.global_batch % (config.micro_batch * data) == 0:
        return None
    if config.global_batch % data:
        near = max(data, round(config.global_batch / data) * data)
        way_out = f"no micro_batch would do; global_batch must be a multiple of {data}, such as {near}"
    else:
        way_out = f"micro_batch may be {_listed(divisors(config.global_batch // data))}"
    return (
        f"global_batch={config.global_batch} is not a multiple of micro_batch={config.micro_batch} "
        f"x data degree {data}; {way_out}"
    )


def sequence_fits_the_model(draft: Draft) -> str | None:
    if draft.config.seq_len <= draft.model.positions:
        return None
    model = draft.model
    return f"seq_len={draft.config.seq_len} is longer than the {model.positions} positions of {model.name}"


def bytes_fit_the_vocabulary(draft: Draft) -> str | None:
    data = draft.config.data
    if data.kind == "synthetic" or data.tokenizer or draft.model.vocab >= BYTE_VALUES:
        return None
    return (
        f"a vocabulary of {draft.model.vocab} cannot hold {BYTE_VALUES} byte values; "
        f"set model.vocab to {BYTE_VALUES} or more, or data.tokenizer"
    )


def ddp_shards_nothing(draft: Draft) -> str | None:
    if draft.config.engine != "ddp" or draft.config.zero.stage == 0:
        return None
    return f"engine=ddp cannot shard, but zero.stage={draft.config.zero.stage}; engine=deepspeed can"


def fp16_needs_a_zero_stage(draft: Draft) -> str | None:
    """DeepSpeed 0.19 divides by a loss scale it never applied (its issue 8393): updates are far too small."""
    config = draft.config
    if config.engine != "deepspeed" or draft.precision != "fp16" or config.zero.stage > 0:
        return None
    return (
        "precision=fp16 with zero.stage=0 trains wrongly in DeepSpeed 0.19: it divides gradients by a loss "
        "scale that it never applied; zero.stage may be 1, 2 or 3"
    )


RULES: tuple[Rule, ...] = (
    ranks_fit_the_cluster,
    degrees_divide_ranks,
    batches_divide,
    sequence_fits_the_model,
    bytes_fit_the_vocabulary,
    ddp_shards_nothing,
    fp16_needs_a_zero_stage,
)


def divisors(number: int) -> list[int]:
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


def _listed(numbers: list[int]) -> str:
    shown = numbers if len(numbers) <= 12 else [*numbers[:11], numbers[-1]]
    return (
        ", ".join(str(number) for number in shown[:-1]) + f" or {shown[-1]}"
        if len(shown) > 1
        else str(shown[0])
    )
