"""Check what types cannot express: bounds, choices, whole numbers, unknown keys, relations of keys."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping
from typing import Any

from sweeps.config.keys import KEYS, Key, block_interval, goal_names, value_at
from sweeps.config.knob import Declaration
from sweeps.config.schema import ClusterConfig, SweepConfig
from sweeps.paths import CONF
from train_entry.contract import GOALS

GROUPS = sorted(path.name for path in CONF.iterdir() if path.is_dir())


def unknown_keys(container: Mapping[str, Any]) -> Iterator[str]:
    """Yield the keys that are not in the schema. `+key=value` adds such keys without a check by Hydra."""
    for key in _leaves(container, ""):
        if key not in KEYS and not key.startswith("space."):
            yield key


def _leaves(container: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for name, value in container.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and key not in KEYS:
            yield from _leaves(value, f"{key}.")
        else:
            yield key


def suggest(key: str) -> str:
    """Return a hint for a mistyped key: the keys it may mean, or the command that lists all keys."""
    known = [*KEYS, *GROUPS]
    near = difflib.get_close_matches(key, known, n=3, cutoff=0.9)
    near = near or difflib.get_close_matches(key, known, n=3, cutoff=0.6)
    return f"did you mean {' or '.join(near)}?" if near else "`python sweep.py --help` lists the keys"


def bad_values(config: SweepConfig) -> Iterator[tuple[str, str]]:
    """Yield (key, the problem with its value and what would do) for every key with a bad value."""
    for key in KEYS.values():
        if problem := bad_value(key, value_at(config, key.name)):
            yield key.name, problem
    yield from _relations(config)


def bad_value(key: Key, value: Any) -> str | None:
    """Return why a key cannot have this value; None if it can."""
    choices = key.declared.choices
    if value is None:
        return None
    if choices and value not in choices:
        return f"{value!r} is not one of {', '.join(choices)}"
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return _bad_number(key.declared, value)
    return None


def _bad_number(declared: Declaration, value: float) -> str | None:
    if not math.isfinite(value):
        return f"{value} is not a finite number"
    if declared.integral and value != int(value):
        return f"{value} is not a whole number"
    if declared.low is not None and value < declared.low:
        return f"{value:g} is too small; at least {declared.low:g}"
    if declared.above is not None and value <= declared.above:
        return f"{value:g} is too small; more than {declared.above:g}"
    if declared.high is not None and value > declared.high:
        return f"{value:g} is too large; at most {declared.high:g}"
    return None


def _relations(config: SweepConfig) -> Iterator[tuple[str, str]]:
    yield from _goals(config)
    if len(config.optimizer.betas) != 2 or not all(0 <= beta < 1 for beta in config.optimizer.betas):
        yield "optimizer.betas", f"{list(config.optimizer.betas)} is not a pair of numbers from 0 to below 1"
    if config.lr.warmup not in ("steps", "samples") and not config.lr.warmup.isdigit():
        yield "lr.warmup", f"{config.lr.warmup!r} is not steps, samples or a whole number of steps"
    if block_interval(config.activation_checkpointing) is None:
        yield (
            "activation_checkpointing",
            (f"{config.activation_checkpointing!r} is not none, full, or a whole number k: every k-th block"),
        )
    if config.lr.schedule != "constant" and config.lr.total_steps is None:
        yield "lr.total_steps", f"is not set; lr.schedule={config.lr.schedule} decays until that step"
    if config.model.family == "hf" and not config.model.path:
        yield "model.path", "is not set; model=hf needs model.path=DIR, a directory with config.json"
    if config.data.kind == "text" and not config.data.path:
        yield "data.path", "is not set; data=text needs data.path=FILE_OR_DIR"
    limit_gib = config.cluster.memory_limit_gib
    if limit_gib is not None and config.gate.headroom_gib >= limit_gib:
        yield (
            "gate.headroom_gib",
            f"{config.gate.headroom_gib:g} leaves nothing of cluster.memory_limit_gib={limit_gib:g}",
        )
    yield from _cluster_relations(config.cluster)
    if config.dry_run_to is not None and not config.dry_run:
        yield "dry_run_to", f"{config.dry_run_to!r} has an effect only with dry_run=true"
    if config.dry_run_to is not None and not config.dry_run_to.endswith((".csv", ".json")):
        yield "dry_run_to", f"{config.dry_run_to!r} ends in neither .csv nor .json"
    if not _is_name(config.model.name):
        yield "model.name", f"{config.model.name!r} is not a name; use letters, digits, '.', '_' and '-'"
    if config.study is not None and (
        not config.study or config.study[0] in ".-" or not _is_name(config.study)
    ):
        yield "study", f"{config.study!r} is not a name; use letters, digits, '.', '_' and '-'"


def _goals(config: SweepConfig) -> Iterator[tuple[str, str]]:
    names = goal_names(config.objective)
    unknown = [name for name in names if name not in GOALS and names != ("auto",)]
    if unknown or not names:
        yield "objective", f"{', '.join(unknown) or 'nothing'} is not a goal; take auto, {', '.join(GOALS)}"
    if len(set(names)) < len(names):
        yield "objective", f"{list(names)} names a goal twice"
    needing = [name for name in ("time_to_tokens", "cost") if name in names]
    if needing and config.token_budget is None:
        yield "token_budget", f"is not set; objective={needing[0]} needs the number of tokens to train"
    paid = [
        *(["objective=cost"] if "cost" in names else []),
        *(["limits.cost"] if config.limits.cost else []),
    ]
    if paid and config.cluster.price_per_gpu_hour is None:
        yield "cluster.price_per_gpu_hour", f"is not set; {paid[0]} needs it"
    if len(names) > 1 and config.search.pruner != "none":
        yield "search.pruner", f"{config.search.pruner!r}: Optuna prunes for a single objective only"
    if config.search.pruner != "none" and names[0] != "loss":
        yield "search.pruner", f"{config.search.pruner!r} prunes by the loss; set objective=loss, or none"


def _is_name(text: str) -> bool:
    return all(char.isalnum() or char in "._-" for char in text)


def _cluster_relations(cluster: ClusterConfig) -> Iterator[tuple[str, str]]:
    if cluster.kind == "local" and cluster.nodes > 1:
        yield (
            "cluster.nodes",
            f"{cluster.nodes} needs cluster=slurm or cluster=hostfile; cluster=local is this machine alone",
        )
    if bad := _bad_ports(cluster.ports):
        yield "cluster.ports", bad
    for key in ("srun_args", "sbatch_args", "ssh_args"):
        odd = [argument for argument in getattr(cluster, key) if not argument.startswith("-")]
        if odd:
            yield f"cluster.{key}", f"{odd[0]!r} is not an argument; write each as --name=value"

    if any(argument.partition("=")[0] == "--requeue" for argument in cluster.sbatch_args):
        yield (
            "cluster.sbatch_args",
            "'--requeue' would start a job again on the files that its first run left; leave it out: a "
            "preempted trial is launched again anyway",
        )


def _bad_ports(text: str) -> str | None:
    low, _, high = text.partition("-")
    if low.isdigit() and (high or low).isdigit() and 1024 <= int(low) <= int(high or low) <= 65535:
        return None
    return f"{text!r} is not a range of ports; give LOW-HIGH between 1024 and 65535"
