"""Puts remedies to a study's planner."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from sweeps.plan import Rejection
from sweeps.planner import Planned
from sweeps.remedies import Candidate, PlanOf, advise, known
from train_entry.contract import Advice, ModelShape, Scalar, Trial


def plan_of(plan: Callable[[Mapping[str, Scalar]], Planned], values: Mapping[str, Scalar]) -> PlanOf:
    """The legal plan of these knob values, with changes."""

    def changed(changes: Mapping[str, Scalar]) -> Candidate | None:
        planned = plan({**values, **changes})
        if isinstance(planned.plan, Rejection) or planned.fingerprint is None:
            return None
        return Candidate(plan=planned.plan, fingerprint=planned.fingerprint, overrides=planned.overrides)

    return changed


def advice_for(
    trial: Trial,
    device: str,
    model: ModelShape,
    plan: Callable[[Mapping[str, Scalar]], Planned],
    trials: Iterable[Trial],
) -> Advice | None:
    """What to try after a trial that ran out of memory; None for any other."""
    return advise(trial, device, model, plan_of(plan, trial.values), known(trials))
