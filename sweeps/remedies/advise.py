"""The next plan to try after a trial that ran out of memory, given what its study has tried."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from sweeps.remedies.base import Changes, Remedy, Step
from sweeps.remedies.order import remedies_for
from sweeps.verdicts import VERDICTS, Verdict
from train_entry.contract import Advice, Failure, FailureKind, ModelShape, Plan, Scalar, State, Trial


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A legal plan for changes of a trial's configuration."""

    plan: Plan
    fingerprint: str
    changes: Changes
    overrides: tuple[str, ...]  # of the trial, the changes applied


# Of changes made before, and a remedy's on top. None: no legal plan, or a remedy without effect.
PlanOf = Callable[[Changes, Changes], Candidate | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """A remedy that may be tried, or that the study has tried already."""

    remedy: Remedy
    step: Step
    candidate: Candidate  # its changes: all of them, from the trial that failed
    tried: Trial | None

    @property
    def advice(self) -> Advice:
        return Advice(
            remedy=self.remedy.name,
            changes=self.candidate.changes,
            why=self.step.why,
            overrides=self.candidate.overrides,
        )


def known(trials: Iterable[Trial]) -> dict[str, Trial]:
    """Trials that tell of their plan, by fingerprint; whether it fits counts more than another failure."""
    told = [trial for trial in trials if trial.fingerprint and _tells(trial)]
    told.sort(key=lambda trial: trial.state is not State.FAILED)
    return {trial.fingerprint: trial for trial in told if trial.fingerprint}


def under_way(trials: Iterable[Trial]) -> dict[str, Trial]:
    """Trials that are yet to tell of their plan, by fingerprint."""
    open_ = (State.QUEUED, State.RUNNING)
    return {trial.fingerprint: trial for trial in trials if trial.fingerprint and trial.state in open_}


def advise(
    trial: Trial, device: str, model: ModelShape, plan_of: PlanOf, tried: Mapping[str, Trial]
) -> Advice | None:
    """The first remedy that is legal and not yet tried; None where there is none, see `nothing_left`."""
    found = options(trial, device, model, plan_of, tried)
    return next((option.advice for option in found if option.tried is None), None)


def options(
    trial: Trial, device: str, model: ModelShape, plan_of: PlanOf, tried: Mapping[str, Trial]
) -> Iterator[Option]:
    """Remedies in order, up to the first that the study has not tried.

    One that ran out of the same memory stays applied, since less would not do: the next comes on top. One
    that fits, or that failed otherwise, is left out again.
    """
    kind, plan, changes = _kind(trial), trial.plan, dict[str, Scalar]()
    remedies = remedies_for(kind, device) if kind and plan else ()
    seen = {trial.fingerprint}
    at = 0
    while at < len(remedies) and plan is not None:
        option = _option(remedies[at], plan, model, changes, plan_of, tried)
        at += 1
        if option is None or option.candidate.fingerprint in seen:
            continue
        seen.add(option.candidate.fingerprint)
        yield option
        if option.tried is None:
            return
        if _kind(option.tried) is kind:
            plan, changes, at = option.candidate.plan, dict(option.candidate.changes), 0


def nothing_left(trial: Trial, device: str) -> str:
    """Why there is no advice."""
    if _kind(trial) not in (FailureKind.GPU_OOM, FailureKind.HOST_OOM):
        return "it did not run out of memory"
    if (
        _kind(trial) is FailureKind.HOST_OOM
        and device == "cuda"
        and trial.plan
        and not trial.plan.offload.devices
    ):
        return (
            "nothing of this plan is offloaded to host memory: fewer ranks on this host, a smaller "
            "data.max_bytes, or end another process that grew"
        )
    return "every remedy has been tried: a larger card, more ranks, a smaller model"


def _tells(trial: Trial) -> bool:
    """A lost node or peer says nothing about the plan."""
    if trial.state is State.FAILED and isinstance(trial.outcome, Failure):
        return VERDICTS[trial.outcome.kind] is not Verdict.RETRY
    return trial.state in (State.MEASURED, State.INFEASIBLE)


def _kind(trial: Trial) -> FailureKind | None:
    return trial.outcome.kind if isinstance(trial.outcome, Failure) else None


def _option(
    remedy: Remedy,
    plan: Plan,
    model: ModelShape,
    changes: Changes,
    plan_of: PlanOf,
    tried: Mapping[str, Trial],
) -> Option | None:
    step = remedy(plan, model)
    candidate = plan_of(changes, step.changes) if step else None
    if step is None or candidate is None:
        return None
    return Option(remedy=remedy, step=step, candidate=candidate, tried=tried.get(candidate.fingerprint))
