"""Turn a point of the space into all that a trial needs: configuration, plan, identity, command."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Mapping

from sweeps.config.compose import Composer
from sweeps.config.keys import KEYS, goal_names, is_marked, key_of, scope_of, value_at
from sweeps.config.knob import Mark, Scope
from sweeps.config.schema import LimitsConfig, MeasureConfig, SweepConfig
from sweeps.errors import ConfigError
from sweeps.machine import Machine
from sweeps.plan.resolve import Planned, Rejection, data_spec, fingerprint, resolve
from sweeps.space.dimensions import SearchSpace
from sweeps.space.points import Settings
from train_entry.contract import (
    AttemptKind,
    Expected,
    MeasureSpec,
    ModelShape,
    Plan,
    Reason,
    Scalar,
    TimeLimits,
    Trial,
    TrialSpec,
    typed,
)

MAX_TRIED = 2000  # points tried before a launch, to see if any of them is legal


class Planner:
    """Turns points into plans and trials into job specifications, for one study."""

    def __init__(self, composer: Composer, model: ModelShape, machine: Machine, study: str) -> None:
        self._composer = composer
        self._model = model
        self._machine = machine
        self._study = study
        self._settings = Settings(composer, machine)

    def is_active(self, key: str, point: Mapping[str, Scalar]) -> bool:
        """True if a knob has an effect at this point."""
        return self._settings.is_active(key, point)

    def plan(self, point: Mapping[str, Scalar]) -> Planned:
        overrides = self._overrides(point)
        try:
            config = self._settings.config(point)
        except ConfigError as error:
            return Planned(plan=Rejection(reasons=_reasons(error)), fingerprint=None, overrides=overrides)
        plan = resolve(config, self._model, self._machine)
        identity = None if isinstance(plan, Rejection) else fingerprint(plan, self._model, data_spec(config))
        return Planned(plan=plan, fingerprint=identity, overrides=overrides)

    def default(self, key: str, point: Mapping[str, Scalar]) -> Scalar:
        """Return a knob's value at this point if nothing sets it; None for a group, which has no value."""
        if key not in KEYS:
            return None
        try:
            value: Scalar = value_at(self._settings.config(point), key)
        except ConfigError:
            return None
        return value

    def require_legal(self, space: SearchSpace) -> None:
        """Raise ConfigError with every distinct reason if no point tried makes a legal plan."""
        reasons: dict[str, None] = {}
        for point in space.ends.sample(MAX_TRIED, random.Random(0), self.is_active):
            plan = self.plan(point).plan
            if not isinstance(plan, Rejection):
                return
            reasons |= dict.fromkeys(plan.lines)
        raise ConfigError(list(reasons))

    def spec(self, trial: Trial, attempt: int, kind: AttemptKind) -> TrialSpec:
        """Return the job specification of an attempt."""
        if trial.plan is None:
            raise ValueError(f"trial {trial.number} has no plan")
        config = self._composer.compose()  # all of a specification but the plan is fixed within a study
        measure = _measure(config.measure)
        if kind is AttemptKind.CHECK or "loss" in goal_names(config.objective):
            measure = _check(measure, config, trial.plan)
        return TrialSpec(
            study=self._study,
            trial=trial.number,
            attempt=attempt,
            kind=kind,
            device=self._machine.device,
            plan=trial.plan,
            model=self._model,
            data=data_spec(config),
            measure=measure,
            limits=_time_limits(config.limits),
            expected=_expected(trial, measure),
        )

    def _overrides(self, point: Mapping[str, Scalar]) -> tuple[str, ...]:
        """Return the command of one trial, without secrets and keys that only say how a study searches."""
        fixed = [
            override
            for override in self._composer.fixed
            if _is_of_a_trial(key_of(override)) and not any(_sets(override, key) for key in point)
        ]
        return (*fixed, *(f"{key}={typed(value)}" for key, value in point.items()))


def _reasons(error: ConfigError) -> tuple[Reason, ...]:
    return tuple(Reason(rule="configuration", text=problem) for problem in error.problems)


def _is_of_a_trial(key: str) -> bool:
    return scope_of(key) not in (Scope.IDENTITY, Scope.SEARCH) and not is_marked(key, Mark.SECRET)


def _sets(override: str, key: str) -> bool:
    name = key_of(override)
    return name == key or name.startswith(f"{key}.")


def _measure(measure: MeasureConfig) -> MeasureSpec:
    return MeasureSpec(
        warmup_steps=measure.warmup_steps,
        steps=measure.steps,
        split_steps=measure.split_steps,
        update_norms=measure.update_norms,
        precision=measure.precision,
        confidence=measure.confidence,
        min_steps=min(measure.min_steps, measure.steps),
        look_every=measure.look_every,
    )


def _check(measure: MeasureSpec, config: SweepConfig, plan: Plan) -> MeasureSpec:
    """Return the measurement with as many steps as the check's tokens take."""
    steps = math.ceil(config.check.tokens / plan.tokens_per_step) - measure.warmup_steps
    return dataclasses.replace(measure, steps=max(2, steps), split_steps=0, precision=0.0)


def _time_limits(limits: LimitsConfig) -> TimeLimits:
    return TimeLimits(
        attempt_s=limits.attempt_s,
        startup_silence_s=limits.startup_silence_s,
        step_silence_s=limits.step_silence_s,
        startup_s=limits.startup_s,
    )


def _expected(trial: Trial, measure: MeasureSpec) -> Expected | None:
    if trial.estimate is None:
        return None
    steps = measure.warmup_steps + measure.steps + measure.split_steps
    return Expected(steps_s=steps * trial.estimate.step_s, host_bytes=trial.estimate.host_bytes)
