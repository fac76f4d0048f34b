"""The next plan to try after a trial that ran out of memory, given what its study has tried."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from sweeps.remedies.base import Changes, Remedy, Step
from sweeps.remedies.order import remedies_for
from train_entry.contract import Advice, Failure, FailureKind, ModelShape, Plan, Scalar, State, Trial

# What the presets of conf/strategy set, for a configuration that sets these knobs itself, which then win.
KNOBS_OF: Mapping[str, Changes] = {
    "zero1": {"engine": "deepspeed", "zero.stage": 1},
    "zero2": {"engine": "deepspeed", "zero.stage": 2},
    "zero3": {"engine": "deepspeed", "zero.stage": 3, "zero.overlap_comm": True},
    "zero2_offload": {"engine": "deepspeed", "zero.stage": 2, "zero.offload_optimizer": "cpu"},
    "zero3_offload": {
        "engine": "deepspeed",
        "zero.stage": 3,
        "zero.offload_optimizer": "cpu",
        "zero.offload_param": "cpu",
    },
    "zero3_nvme": {
        "engine": "deepspeed",
        "zero.stage": 3,
        "zero.offload_optimizer": "nvme",
        "zero.offload_param": "nvme",
    },
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A legal plan for changes of a trial's configuration."""

    plan: Plan
    fingerprint: str
    overrides: tuple[str, ...]  # of the trial, the changes applied


PlanOf = Callable[[Changes], Candidate | None]  # None: those changes make no legal plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """A remedy that may be tried, or that the study has tried already."""

    remedy: Remedy
    step: Step
    changes: Changes  # all of them, from the trial that failed
    candidate: Candidate
    tried: Trial | None

    @property
    def advice(self) -> Advice:
        return Advice(
            remedy=self.remedy.name,
            changes=self.changes,
            why=self.step.why,
            overrides=self.candidate.overrides,
        )


def known(trials: Iterable[Trial]) -> dict[str, Trial]:
    """Trials that tell whether their plan fits, by fingerprint."""
    told = (State.MEASURED, State.INFEASIBLE)
    return {trial.fingerprint: trial for trial in trials if trial.fingerprint and trial.state in told}


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
    that fits, or that ran out of other memory, is left out again.
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
            plan, changes, at = option.candidate.plan, dict(option.changes), 0


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
    if step is None:
        return None
    for spelled in _spellings(changes, step.changes):
        candidate = plan_of(spelled)
        if candidate is not None and _took(candidate.plan, step.changes):
            trial = tried.get(candidate.fingerprint)
            return Option(remedy=remedy, step=step, changes=spelled, candidate=candidate, tried=trial)
    return None


def _spellings(changes: Changes, more: Changes) -> Iterator[Changes]:
    yield {**changes, **more}
    if "strategy" in more:
        others = {key: value for key, value in more.items() if key != "strategy"}
        yield {**changes, **KNOBS_OF[str(more["strategy"])], **others}


def _took(plan: Plan, changes: Changes) -> bool:
    """Whether a preset had its effect: knobs that the configuration sets beside it win."""
    return "strategy" not in changes or plan.strategy == changes["strategy"]
