"""Find remedies with a study's planner."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping

import yaml

from sweeps.config.keys import flatten
from sweeps.paths import CONF
from sweeps.plan.resolve import Planned, Rejection
from sweeps.search.remedies import ChangedPlan, Changes, Expect, Grounds, PlanOf, advise, known
from train_entry.contract import Advice, Plan, Scalar, Trial, TrialSpec

PlanPoint = Callable[[Mapping[str, Scalar]], Planned]


def plan_of(plan: PlanPoint, values: Mapping[str, Scalar]) -> PlanOf:
    """Return a function that plans these knob values with changes."""

    def changed(before: Changes, more: Changes) -> ChangedPlan | None:
        candidates = (_candidate(plan, values, changes) for changes in _spellings(before, more))
        return next((found for found in candidates if found and _took(found.plan, more)), None)

    return changed


def advice_for(
    trial: Trial, spec: TrialSpec, plan: PlanPoint, expect: Expect, trials: Iterable[Trial]
) -> Advice | None:
    """Return what to try after a trial that ran out of memory; None for any other trial.

    `spec` is what the trial was launched with.
    """
    grounds = Grounds(
        device=spec.device,
        model=spec.model,
        plan_of=plan_of(plan, trial.values),
        expect=expect,
        tried=known(trials),
    )
    return advise(trial, grounds)


@functools.cache
def knobs_of(strategy: str) -> Changes:
    """Return the knobs that a preset of conf/strategy sets."""
    text = (CONF / "strategy" / f"{strategy}.yaml").read_text(encoding="utf-8")
    return dict(flatten(yaml.safe_load(text)))


def _candidate(plan: PlanPoint, values: Mapping[str, Scalar], changes: Changes) -> ChangedPlan | None:
    planned = plan({**values, **changes})
    if isinstance(planned.plan, Rejection) or planned.fingerprint is None:
        return None
    return ChangedPlan(
        plan=planned.plan,
        fingerprint=planned.fingerprint,
        changes=changes,
        overrides=planned.overrides,
    )


def _spellings(before: Changes, more: Changes) -> Iterator[Changes]:
    """Yield the changes with a preset by its name, then with the knobs of that preset.

    Knobs that the configuration sets itself override a preset, but not the changes.
    """
    yield {**before, **more}
    if "strategy" in more:
        others = {key: value for key, value in more.items() if key != "strategy"}
        yield {**before, **knobs_of(str(more["strategy"])), **others}


def _took(plan: Plan, changes: Changes) -> bool:
    return "strategy" not in changes or plan.strategy == changes["strategy"]
