"""The next plan to try after a trial that ran out of memory, given what its study has tried and expects."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass

from sweeps.search.remedies.base import Changes, Remedy
from sweeps.search.remedies.order import remedies_for
from sweeps.search.remedies.saving import is_worthwhile, saved_bytes, saving_text, too_small
from sweeps.search.verdicts import VERDICTS, Verdict
from train_entry.contract import (
    Advice,
    Estimate,
    Failure,
    FailureKind,
    Fit,
    Measurement,
    ModelShape,
    Plan,
    Scalar,
    State,
    Trial,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChangedPlan:
    """A legal plan for changes of a trial's configuration."""

    plan: Plan
    fingerprint: str
    changes: Changes
    overrides: tuple[str, ...]  # of the trial, the changes applied


# Of changes made before, and a remedy's on top. None: no legal plan, or a remedy without effect.
PlanOf = Callable[[Changes, Changes], ChangedPlan | None]


Expect = Callable[[Plan], Estimate]  # what a plan needs, and whether it fits


@dataclass(frozen=True, kw_only=True, slots=True)
class Grounds:
    """What advice rests on: a study's machine, model and plans, what it expects of them and has tried."""

    device: str  # cuda or cpu
    model: ModelShape
    plan_of: PlanOf
    expect: Expect
    tried: Mapping[str, Trial]  # by fingerprint, see `known`


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """A remedy that may be tried, that the study has tried already, or that would not do."""

    remedy: Remedy
    why: str  # one line, with what it saves
    candidate: ChangedPlan  # its changes: all of them, from the trial that failed
    expected: Estimate
    tried: Trial | None

    @property
    def is_open(self) -> bool:
        """Whether to try it: nobody has, and it may fit."""
        return self.tried is None and self.expected.fit is not Fit.TOO_LARGE

    @property
    def advice(self) -> Advice:
        return Advice(
            remedy=self.remedy.name,
            changes=self.candidate.changes,
            why=self.why,
            overrides=self.candidate.overrides,
        )

    def ends(self, device: str) -> frozenset[FailureKind]:
        """How it failed; where it was not tried, how it is expected to."""
        if self.tried is None:
            return too_small(self.expected, device)
        kind = _kind(self.tried)
        return frozenset({kind} if kind else ())


def known(trials: Iterable[Trial]) -> dict[str, Trial]:
    """Trials that tell of their plan, by fingerprint; whether it fits counts more than another failure."""
    told = [trial for trial in trials if trial.fingerprint and _tells(trial)]
    told.sort(key=lambda trial: trial.state is not State.FAILED)
    return {trial.fingerprint: trial for trial in told if trial.fingerprint}


def under_way(trials: Iterable[Trial]) -> dict[str, Trial]:
    """Trials that are yet to tell of their plan, by fingerprint."""
    open_ = (State.QUEUED, State.RUNNING)
    return {trial.fingerprint: trial for trial in trials if trial.fingerprint and trial.state in open_}


def advise(trial: Trial, grounds: Grounds) -> Advice | None:
    """The first remedy that is legal, not yet tried, and may fit; None: there is none, see `nothing_left`."""
    return next((option.advice for option in options(trial, grounds) if option.is_open), None)


def options(trial: Trial, grounds: Grounds) -> Iterator[Option]:
    """Remedies in order, up to the first that is open.

    One that ran out of the same memory stays applied, since less would not do: the next comes on top. So
    does one that is expected to. One that fits, or that fails otherwise, is left out again.
    """
    kind, plan, changes = _kind(trial), trial.plan, dict[str, Scalar]()
    if kind is None or plan is None:
        return
    remedies = remedies_for(kind, grounds.device)
    seen = {trial.fingerprint}
    at = 0
    while at < len(remedies):
        base = _Base(kind=kind, plan=plan, changes=changes, expected=grounds.expect(plan))
        option = _option(remedies[at], base, grounds, seen)
        at += 1
        if option is None:
            continue
        seen.add(option.candidate.fingerprint)
        yield option
        if option.is_open:
            return
        if option.ends(grounds.device) == {kind}:
            plan, changes, at = option.candidate.plan, dict(option.candidate.changes), 0


def nothing_left(trial: Trial, device: str, found: Iterable[Option] = ()) -> str:
    """Why there is no advice, where these were found."""
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
    is_all_tried = all(option.tried for option in found)
    why = (
        "every remedy that saves memory has been tried"
        if is_all_tried
        else "no remedy that is left is expected to fit"
    )
    return f"{why}: a larger card, more ranks, a smaller model"


def _tells(trial: Trial) -> bool:
    """A lost node or peer says nothing about the plan."""
    if trial.state is State.FAILED and isinstance(trial.outcome, Failure):
        return VERDICTS[trial.outcome.kind] is not Verdict.RETRY
    return trial.state in (State.MEASURED, State.INFEASIBLE)


def _kind(trial: Trial) -> FailureKind | None:
    return trial.outcome.kind if isinstance(trial.outcome, Failure) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Base:
    """What the next remedy comes on top of."""

    kind: FailureKind  # of the trial that failed
    plan: Plan
    changes: Changes
    expected: Estimate


def _option(remedy: Remedy, base: _Base, grounds: Grounds, seen: Container[str | None]) -> Option | None:
    """The first of its steps that saves memory; one that was seen to fit does."""
    for step in remedy(base.plan, grounds.model):
        candidate = grounds.plan_of(base.changes, step.changes)
        if candidate is None or candidate.fingerprint in seen:
            continue
        expected, tried = grounds.expect(candidate.plan), grounds.tried.get(candidate.fingerprint)
        saved = saved_bytes(base.kind, base.expected, expected)
        if is_worthwhile(remedy, saved, base.expected) or (tried and isinstance(tried.outcome, Measurement)):
            why = f"{saving_text(base.kind, saved)}: {step.how}"
            return Option(remedy=remedy, why=why, candidate=candidate, expected=expected, tried=tried)
    return None
