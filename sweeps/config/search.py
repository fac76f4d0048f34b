"""The keys of `search`, `measure`, `check`, `confirm`, `limits`, `gate`, `tracking`. Part of the schema."""

from __future__ import annotations

from dataclasses import dataclass

from sweeps.config.knob import Mark, Scope, knob


@dataclass
class SearchConfig:
    sampler: str = knob(
        "tpe",
        "sampler that proposes trials after the baselines and the prior",
        choices=("tpe", "random", "gp", "nsga2", "grid"),
    )
    seed: int = knob(0, "seed of the sampler", low=0)
    startup_trials: int = knob(8, "trials that the sampler needs before it models the objective", low=0)
    baselines: bool = knob(
        True, "begin as one would by hand: strategy after strategy, doubling the micro-batch"
    )
    single_gpu: str = knob(
        "auto",
        "also measure one GPU alone, for scaling efficiency; auto: unless the space is small",
        choices=("auto", "always", "never"),
    )
    prior: int = knob(5, "proposals with the best estimated time, spread over strategies", low=0)
    dominance: bool = knob(True, "refuse plans that need at least as much memory as a plan that failed")
    repeat_duplicates: bool = knob(False, "measure a plan again when it is proposed again")
    pruner: str = knob(
        "none",
        "objective=loss: Optuna's pruner, which ends trials that fall behind",
        choices=("none", "median", "percentile", "hyperband", "wilcoxon"),
    )


@dataclass
class MeasureConfig:
    warmup_steps: int = knob(3, "steps before timing begins", unit="steps", low=1)
    steps: int = knob(20, "timed steps, at most", unit="steps", low=2)
    precision: float = knob(
        0.005,
        "timing ends when the step time is known to this relative precision; 0: time all steps",
        low=0,
        high=1,
    )
    confidence: float = knob(
        0.95, "confidence of the interval for precision and futility", low=0.5, high=0.999
    )
    min_steps: int = knob(4, "fewest timed steps", unit="steps", low=2)
    look_every: int = knob(2, "timed steps between two looks at the precision reached", unit="steps", low=1)
    futility: bool = knob(True, "end a trial once it is known to be slower than the best")
    split_steps: int = knob(2, "steps that time forward, backward and update separately", unit="steps", low=0)
    update_norms: bool = knob(
        False, "record the norm of every update; costs a copy of the model", marks=Mark.BESIDE_PLANS
    )


@dataclass
class CheckConfig:
    best: int = knob(0, "number of the fastest trials to train longer; 0: none", low=0)
    tokens: float = knob(1e6, "tokens that each of them trains on", unit="tokens", low=1, integral=True)


@dataclass
class ConfirmConfig:
    best: int = knob(
        3, "number of trials to measure again: the fastest, and the best baseline; 0: none", low=0
    )
    rounds: int = knob(3, "most rounds of the confirmation", low=2)
    within: float = knob(
        0.05, "trials further behind the best than this share are not confirmed", low=0, high=1
    )
    confidence: float = knob(0.95, "confidence of the winner's interval", low=0.5, high=0.999)
    drift_every: int = knob(
        10,
        "measure the best baseline again after every so many trials, to see drift; 0: never",
        unit="trials",
        low=0,
    )


@dataclass
class LimitsConfig:
    trials: int | None = knob(None, "launched trials in all; null: until the space is exhausted", low=1)
    hours: float | None = knob(
        None, "no launch after this time, counted over all starts", unit="hours", above=0
    )
    gpu_hours: float | None = knob(None, "no launch after this many GPU-hours", unit="GPU-hours", above=0)
    cost: float | None = knob(None, "no launch after this cost, at cluster.price_per_gpu_hour", above=0)
    failures: int = knob(
        5,
        "this many failures of one kind in a row end the study; out of memory does not count",
        unit="trials",
        low=1,
    )
    patience: int | None = knob(
        None, "end after this many trials without an improvement beyond noise", unit="trials", low=1
    )
    improvement: float | None = knob(
        None,
        "end when no remaining trial is expected to improve on the best by this share; 0: go on",
        low=0,
        high=1,
    )
    retries: int = knob(
        1,
        "new attempts of a trial whose attempt was lost through no fault of its plan",
        low=0,
        scope=Scope.START,
    )
    attempt_s: float = knob(
        1800,
        "time limit of an attempt, counted from the end of its start-up",
        unit="seconds",
        above=0,
        scope=Scope.START,
    )
    startup_s: float = knob(
        1800,
        "time limit of an attempt's start-up, including the compilation of operators",
        unit="seconds",
        above=0,
        scope=Scope.START,
    )
    startup_silence_s: float = knob(
        900,
        "an attempt without progress for this long before its first step ends counts as hung",
        unit="seconds",
        above=0,
        scope=Scope.START,
    )
    step_silence_s: float = knob(
        300, "the same, after its first step", unit="seconds", above=0, scope=Scope.START
    )


@dataclass
class GateConfig:
    enabled: bool = knob(True, "launch no plan whose estimated memory cannot fit")
    quantile: float = knob(
        0.9,
        "probability with which a plan must fit, by the estimate and its error, to be launched",
        low=0.5,
        high=0.999,
    )
    headroom_gib: float = knob(0.0, "memory of each GPU that a plan must leave free", unit="GiB", low=0)
    borderline: int = knob(
        2, "plans that may just fit: launch this many all the same, to learn from them", unit="trials", low=0
    )
    earlier_studies: bool = knob(True, "also learn from other studies of the same model on the same machine")


@dataclass
class TrackingConfig:
    kind: str = knob("mlflow", "where results are shown", choices=("mlflow", "none"))
    uri: str | None = knob(None, "tracking URI; null: SQLite beside the studies")
