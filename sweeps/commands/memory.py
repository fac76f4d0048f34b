"""`python -m sweeps memory`: print a model's memory by strategy and number of GPUs; needs no study."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

from sweeps.cluster.node.devices import find_gpus, require_memory_limits
from sweeps.commands.machines import GPUS_PER_NODE, chosen_gpu, machine_with
from sweeps.config.compose import Composer, open_composer
from sweeps.config.models import model_shape
from sweeps.config.schema import SweepConfig
from sweeps.errors import ConfigError
from sweeps.estimate.estimator import hardware_for
from sweeps.estimate.fit import Judgement, Room, judge, require_room, room_of
from sweeps.estimate.memory.account import Memory
from sweeps.estimate.memory.model import COLD, memory_of
from sweeps.estimate.memory.states import MASTER_BYTES, MOMENT_BYTES, moments_of
from sweeps.machine import Gpu, Machine
from sweeps.plan.resolve import Rejection, resolve
from sweeps.plan.rules.base import choices
from sweeps.show.dry_run_view import headed
from sweeps.show.estimates import FIT_WORDS, GROUPS, basis
from sweeps.space.points import Settings
from train_entry.contract import GIB, Fit, ModelShape, Offload, Plan, Precision, Reason, Scalar, gib

STRATEGIES = (
    "ddp",
    "zero1",
    "zero2",
    "zero3",
    "zero2_offload",
    "zero3_offload",
    "tp_zero1",
    "pp_zero1",
    "hybrid_3d",
)
RANKS = (1, 2, 4, 8, 16, 32, 64)
GIGA = 1e9
ACTIVATIONS = (*GROUPS["activations"], *GROUPS["logits"])
HEADS = (
    "strategy",
    "GPUs",
    "plain:\nweights",
    "plain:\ngradients",
    "plain:\noptimizer",
    "plain:\nstates",
    "estimated:\nactivations",
    "estimated:\npeak",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Account:
    """Model states on one GPU, in bytes, counted as in the ZeRO paper (section 3.1)."""

    weights: float
    gradients: float
    optimizer: float

    @property
    def states(self) -> float:
        return self.weights + self.gradients + self.optimizer


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One row: a strategy on a number of GPUs."""

    preset: str
    plan: Plan
    plain: Account
    memory: Memory
    verdict: Judgement


def memory_lines(overrides: Sequence[str], card: str | None, memory_gib: float | None) -> Iterator[str]:
    """Yield the lines of the report. Raises ConfigError if the overrides make no legal plan."""
    composer = open_composer(lambda: bool(find_gpus())).with_fixed(overrides)
    config = composer.compose()
    if config.cluster.device == "cpu":
        raise ConfigError("cluster.device=cpu: this table is about GPUs, and needs none here; leave it out")
    model = model_shape(config.model)
    gpu, why = chosen_gpu(card, memory_gib)
    per_node = config.cluster.gpus_per_node or GPUS_PER_NODE
    machine = machine_with(gpu, per_node, -(-max(RANKS) // per_node), config.cluster.nvme_path)
    require_memory_limits(config.cluster, config.gate, machine.gpus)
    room = room_of(config.cluster, config.gate, machine)
    require_room(room, hardware_for(machine))
    entries, refused = _entries(composer, config, model, machine, room)
    if not entries:
        raise ConfigError(list(dict.fromkeys(text for texts in refused.values() for text in texts)))
    yield from _head(model, config, entries[0].plan)
    yield f"GPU: {_card(gpu, per_node)} ({why})"
    yield ""
    yield from _table(entries, room)
    yield ""
    yield f"fewest GPUs that fit: {_fewest(entries)}"
    yield from (f"left out: {preset}: {text}" for preset, texts in refused.items() for text in texts)
    yield f"estimates: {basis(hardware_for(machine), room, config.gate, 0)}"
    yield from _notes(entries, config)


def plain_account(plan: Plan, parameters: int) -> Account:
    """Return the model states on one GPU: sharded states divided evenly, offloaded states left out."""
    count = parameters / (plan.tensor * plan.pipeline)
    weight, gradient, optimizer = bytes_a_parameter(plan)
    stage, data = plan.zero.stage, plan.data
    is_moved = plan.offload.optimizer is not Offload.NONE
    return Account(
        weights=0.0
        if plan.offload.param is not Offload.NONE
        else weight * count / (data if stage == 3 else 1),
        gradients=0.0 if is_moved else gradient * count / (data if stage >= 2 else 1),
        optimizer=0.0 if is_moved else optimizer * count / (data if stage >= 1 else 1),
    )


def bytes_a_parameter(plan: Plan) -> tuple[int, int, int]:
    """Return bytes per parameter of weights, gradients and optimizer: 2, 2, 12 for Adam in half precision."""
    moments = MOMENT_BYTES * moments_of(plan)
    return (4, 4, moments) if plan.precision is Precision.FP32 else (2, 2, MASTER_BYTES + moments)


def _entries(
    composer: Composer, config: SweepConfig, model: ModelShape, machine: Machine, room: Room
) -> tuple[list[Entry], dict[str, list[str]]]:
    """Return the entries of all legal plans, and the reasons for each preset without a legal plan."""
    settings = Settings(composer, machine)
    hardware = hardware_for(machine)
    entries: list[Entry] = []
    refused: dict[str, list[str]] = {}
    for preset in _presets(composer):
        reasons: dict[int, tuple[Reason, ...]] = {}
        before = len(entries)
        for ranks in [config.ranks] if config.ranks else RANKS:
            plan = resolve(_settled(settings, _point(preset, ranks)), model, machine)
            if isinstance(plan, Rejection):
                reasons[ranks] = plan.reasons
                continue
            memory = memory_of(plan, model, hardware)
            verdict = judge(memory, COLD, room, config.gate.quantile)
            plain = plain_account(plan, model.parameters)
            entries.append(
                Entry(preset=preset or plan.strategy, plan=plan, plain=plain, memory=memory, verdict=verdict)
            )
        if len(entries) == before:
            refused[preset or "the strategy"] = _by_rule(reasons)
    return entries, refused


def _by_rule(reasons: Mapping[int, Sequence[Reason]]) -> list[str]:
    """Return one line for each broken rule.

    A rule's texts differ only in the number of GPUs, so the line is the text for the most GPUs. Rules broken
    at every number of GPUs come first; the lines of the others name the numbers at which they are broken.
    """
    texts: dict[str, str] = {}
    broken_at: dict[str, list[int]] = {}
    for ranks, found in reasons.items():
        for reason in found:
            texts[reason.rule] = reason.text
            broken_at.setdefault(reason.rule, []).append(ranks)
    ordered = sorted(texts, key=lambda rule: -len(broken_at[rule]))
    return [texts[rule] + _where(broken_at[rule], len(reasons)) for rule in ordered]


def _where(broken_at: Sequence[int], tried: int) -> str:
    if len(broken_at) == tried:
        return ""
    return f" (on {choices([*broken_at])} GPU{'s' * (list(broken_at) != [1])})"


def _presets(composer: Composer) -> Sequence[str]:
    """Return the presets to show; an empty name stands for a strategy chosen on the command line."""
    is_named = any(override.startswith("strategy=") for override in composer.fixed)
    return ("",) if is_named else STRATEGIES


def _point(preset: str, ranks: int) -> dict[str, Scalar]:
    return {**({"strategy": preset} if preset else {}), "ranks": ranks}


def _settled(settings: Settings, point: dict[str, Scalar]) -> SweepConfig:
    """Return the configuration of a point, its global batch rounded up to one that the ranks divide."""
    config = settings.config(point)
    ranks, degree = config.ranks or 1, config.tensor * config.pipeline
    unit = config.micro_batch * (ranks // degree)
    if ranks % degree or config.global_batch % unit == 0:
        return config
    return settings.config({**point, "global_batch": -(-config.global_batch // unit) * unit})


def _head(model: ModelShape, config: SweepConfig, plan: Plan) -> Iterator[str]:
    yield (
        f"{model.name}: {model.parameters:,} parameters; {plan.precision}, micro_batch={config.micro_batch}, "
        f"seq_len={config.seq_len}, activation_checkpointing={config.activation_checkpointing}"
    )
    each = bytes_a_parameter(plan)
    yield (
        f"plain account: {sum(each)} bytes a parameter = {each[0]} weights + {each[1]} gradients + {each[2]} "
        "optimizer states (ZeRO paper, section 3.1)"
    )
    names = ("weights", "gradients", "optimizer")
    parts = [f"{name} {_both(size * model.parameters)}" for name, size in zip(names, each, strict=True)]
    yield f"one copy of the model: {' + '.join(parts)} = {_both(sum(each) * model.parameters)}"


def _both(count: float) -> str:
    return f"{_decimals(count / GIGA)} GB ({_decimals(count / GIB)} GiB)"


def _decimals(number: float) -> str:
    """Format with two decimals even for large numbers, so that the reader can add them up."""
    return f"{number:,.2f}" if number >= 1 else f"{number:.3g}"


def _card(gpu: Gpu, per_node: int) -> str:
    return f"{gpu.name}, {gib(gpu.memory_bytes)} GiB, {per_node} a node"


def _table(entries: Sequence[Entry], room: Room) -> list[str]:
    limit = gib(room.device_bytes - room.headroom_bytes)
    heads = (*HEADS, f"needed\nof {limit}", "verdict", "host:\na node")
    rows: list[tuple[str, ...]] = []
    for _, group in itertools.groupby(entries, key=attrgetter("preset")):
        rows += [*(_cells(entry) for entry in group), ("",) * len(heads)]
    lefts = [head in ("strategy", "verdict") for head in heads]
    return ["GiB on the fullest GPU", *headed(heads, rows[:-1], lefts)]


def _cells(entry: Entry) -> tuple[str, ...]:
    plain, memory, verdict = entry.plain, entry.memory, entry.verdict
    return (
        entry.plan.strategy,
        str(entry.plan.ranks),
        gib(plain.weights),
        gib(plain.gradients),
        gib(plain.optimizer),
        gib(plain.states),
        gib(_activations(memory)),
        gib(memory.peak_bytes),
        gib(verdict.needed_bytes),
        FIT_WORDS[verdict.fit],
        gib(memory.host_bytes),
    )


def _activations(memory: Memory) -> int:
    """Return the most bytes of activations, logits included, in any phase, also if another phase peaks."""
    return max(
        sum(phase.bytes_of(name) for name in ACTIVATIONS) for stage in memory.stages for phase in stage.phases
    )


def _fewest(entries: Sequence[Entry]) -> str:
    fewest: dict[str, str] = {}
    for entry in entries:
        fewest.setdefault(entry.plan.strategy, "none")
        if entry.verdict.fit is Fit.FITS and fewest[entry.plan.strategy] == "none":
            fewest[entry.plan.strategy] = str(entry.plan.ranks)
    return ", ".join(f"{strategy} {ranks}" for strategy, ranks in fewest.items())


def _notes(entries: Sequence[Entry], config: SweepConfig) -> Iterator[str]:
    yield (
        "plain: model states alone, without activations, buckets and gathered layers; peak: the worst phase "
        "of a step, not the sum of the columns before it"
    )
    raised = sorted({entry.plan.global_batch for entry in entries} - {config.global_batch})
    if raised:
        yield (
            f"global_batch={config.global_batch} is no multiple of micro_batch x data degree everywhere; "
            f"there it is {raised[0]} to {raised[-1]}"
        )
