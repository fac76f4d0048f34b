"""The keys of `search`, `measure`, `check`, `confirm`, `limits`, `gate` and `tracking`."""

from __future__ import annotations

from dataclasses import dataclass

from sweeps.config.knob import Mark, Scope, knob


@dataclass
class SearchConfig:
    sampler: str = knob(
        "tpe",
        "who proposes after the baselines and the prior",
        choices=("tpe", "random", "gp", "nsga2", "grid"),
    )
    seed: int = knob(0, "of the sampler", low=0)
    startup_trials: int = knob(8, "trials to learn from before the sampler proposes by itself", low=0)
    baselines: bool = knob(
        True, "begin with what one tries by hand: strategy after strategy, micro-batch doubled"
    )
    single_gpu: str = knob(
        "auto",
        "also measure one GPU alone, for the efficiency of scaling; auto: where the space is not small",
        choices=("auto", "always", "never"),
    )
    prior: int = knob(5, "proposals by estimated time, spread over strategies", low=0)
    dominance: bool = knob(True, "refuse what needs no less than a plan that already failed")
    repeat_duplicates: bool = knob(False, "measure a plan again when it is proposed again")
    pruner: str = knob(
        "none",
        "objective=loss: who ends trials that fall behind",
        choices=("none", "median", "percentile", "hyperband", "wilcoxon"),
    )


@dataclass
class MeasureConfig:
    warmup_steps: int = knob(3, "steps before timing", unit="steps", low=1)
    steps: int = knob(20, "timed steps, at most", unit="steps", low=2)
    precision: float = knob(
        0.005,
        "timing ends when the step time is known to this share of itself; 0: always all steps",
        low=0,
        high=1,
    )
    confidence: float = knob(0.95, "of the interval that precision and futility go by", low=0.5, high=0.999)
    min_steps: int = knob(4, "timed steps before timing may end", unit="steps", low=2)
    look_every: int = knob(2, "timed steps between two looks", unit="steps", low=1)
    futility: bool = knob(True, "end trials that are known to be slower than the best")
    split_steps: int = knob(2, "steps for the forward/backward/update split", unit="steps", low=0)
    update_norms: bool = knob(
        False, "record the norm of every update; costs a copy of the model", marks=Mark.BESIDE_PLANS
    )


@dataclass
class CheckConfig:
    best: int = knob(0, "how many of the fastest trials are trained longer; 0: none", low=0)
    tokens: float = knob(1e6, "tokens each of them sees", unit="tokens", low=1, integral=True)


@dataclass
class ConfirmConfig:
    best: int = knob(
        3, "of the fastest trials, and the best baseline, so many are measured again; 0: none", low=0
    )
    rounds: int = knob(3, "turns of the confirmation, at most", low=2)
    within: float = knob(0.05, "trials further behind the best are not confirmed", low=0, high=1)
    confidence: float = knob(0.95, "of the winner's interval", low=0.5, high=0.999)
    drift_every: int = knob(
        10,
        "measure the best baseline again after so many trials, to see drift; 0: never",
        unit="trials",
        low=0,
    )


@dataclass
class LimitsConfig:
    trials: int | None = knob(None, "launched trials in all; null: until the space is exhausted", low=1)
    hours: float | None = knob(
        None, "no launch after this time; counted over all starts", unit="hours", above=0
    )
    gpu_hours: float | None = knob(None, "no launch after so many GPU-hours", unit="GPU-hours", above=0)
    cost: float | None = knob(None, "no launch after so much money, at cluster.price_per_gpu_hour", above=0)
    failures: int = knob(
        5, "failures of one kind in a row that end the study; out of memory is none", unit="trials", low=1
    )
    patience: int | None = knob(
        None, "end after so many trials without an improvement beyond noise", unit="trials", low=1
    )
    improvement: float | None = knob(
        None,
        "end when no trial left is expected to improve on the best by this share; 0: go on",
        low=0,
        high=1,
    )
    retries: int = knob(
        1, "new attempts of a trial that was lost for no fault of its own", low=0, scope=Scope.START
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
        "time limit of its start-up, compiling operators included",
        unit="seconds",
        above=0,
        scope=Scope.START,
    )
    startup_silence_s: float = knob(
        900,
        "hung: no progress for this long before the first step",
        unit="seconds",
        above=0,
        scope=Scope.START,
    )
    step_silence_s: float = knob(
        300, "hung: no progress for this long after it", unit="seconds", above=0, scope=Scope.START
    )


@dataclass
class GateConfig:
    enabled: bool = knob(True, "launch no plan that cannot fit, by the estimate of its memory")
    quantile: float = knob(
        0.9, "a plan fits if the estimate is too low no more often than 1 - this", low=0.5, high=0.999
    )
    headroom_gib: float = knob(0.0, "memory of each GPU that a plan must leave free", unit="GiB", low=0)
    borderline: int = knob(
        2, "plans that may just fit and are launched all the same, to learn", unit="trials", low=0
    )
    earlier_studies: bool = knob(True, "learn also from other studies of the same model on the same machine")


@dataclass
class TrackingConfig:
    kind: str = knob("mlflow", "where results are shown", choices=("mlflow", "none"))
    uri: str | None = knob(None, "tracking URI; null: SQLite beside the studies")
