"""Choose the next plan after a trial that ran out of memory, by what its study has tried and expects."""

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
    """A legal plan for a trial's configuration with changes."""

    plan: Plan
    fingerprint: str
    changes: Changes
    overrides: tuple[str, ...]  # the trial's overrides with the changes applied


# Takes the changes made before and those of a remedy on top. None: no legal plan, or no effect.
PlanOf = Callable[[Changes, Changes], ChangedPlan | None]


Expect = Callable[[Plan], Estimate]  # returns what a plan needs, and whether it fits


@dataclass(frozen=True, kw_only=True, slots=True)
class Grounds:
    """The basis of advice: a study's machine, model and plans, its estimates and its trials."""

    device: str  # cuda or cpu
    model: ModelShape
    plan_of: PlanOf
    expect: Expect
    tried: Mapping[str, Trial]  # by fingerprint, see `known`


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """A remedy that may be tried, that was tried already, or that is not expected to fit."""

    remedy: Remedy
    why: str  # one line, with what it saves
    candidate: ChangedPlan  # `changes` are all changes to the trial that failed
    expected: Estimate
    tried: Trial | None

    @property
    def is_open(self) -> bool:
        """True if it has not been tried and may fit."""
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
        """Return how it failed; if it was not tried, how it is expected to fail."""
        if self.tried is None:
            return too_small(self.expected, device)
        kind = _kind(self.tried)
        return frozenset({kind} if kind else ())


def known(trials: Iterable[Trial]) -> dict[str, Trial]:
    """Return the trials that tell about their plan, by fingerprint.

    Of several trials of a plan, one that tells whether it fits goes before one that failed otherwise.
    """
    told = [trial for trial in trials if trial.fingerprint and _tells(trial)]
    told.sort(key=lambda trial: trial.state is not State.FAILED)
    return {trial.fingerprint: trial for trial in told if trial.fingerprint}


def under_way(trials: Iterable[Trial]) -> dict[str, Trial]:
    """Return the queued and running trials, by fingerprint."""
    open_ = (State.QUEUED, State.RUNNING)
    return {trial.fingerprint: trial for trial in trials if trial.fingerprint and trial.state in open_}


def advise(trial: Trial, grounds: Grounds) -> Advice | None:
    """Return the first remedy that is legal, not yet tried, and may fit.

    None: there is none; `nothing_left` says why.
    """
    return next((option.advice for option in options(trial, grounds) if option.is_open), None)


def options(trial: Trial, grounds: Grounds) -> Iterator[Option]:
    """Yield remedies in order, up to the first that is open.

    A remedy that ran out of the same memory, or is expected to, stays applied, since less would not do: the
    next comes on top. A remedy that fits, or that fails otherwise, is left out again.
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
    """Return why there is no advice, given the options that were found."""
    if _kind(trial) not in (FailureKind.GPU_OOM, FailureKind.HOST_OOM):
        return "it did not run out of memory"
    if (
        _kind(trial) is FailureKind.HOST_OOM
        and device == "cuda"
        and trial.plan
        and not trial.plan.offload.devices
    ):
        return (
            "this plan offloads nothing to host memory: use fewer ranks on this host or a smaller "
            "data.max_bytes, or end another process that takes host memory"
        )
    is_all_tried = all(option.tried for option in found)
    why = (
        "every remedy that saves memory has been tried"
        if is_all_tried
        else "no remaining remedy is expected to fit"
    )
    return f"{why}: use a larger GPU, more ranks or a smaller model"


def _tells(trial: Trial) -> bool:
    """True if the trial says something about its plan. A lost node or peer says nothing."""
    if trial.state is State.FAILED and isinstance(trial.outcome, Failure):
        return VERDICTS[trial.outcome.kind] is not Verdict.RETRY
    return trial.state in (State.MEASURED, State.INFEASIBLE)


def _kind(trial: Trial) -> FailureKind | None:
    return trial.outcome.kind if isinstance(trial.outcome, Failure) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Base:
    """The plan that the next remedy changes."""

    kind: FailureKind  # how the trial failed
    plan: Plan
    changes: Changes
    expected: Estimate


def _option(remedy: Remedy, base: _Base, grounds: Grounds, seen: Container[str | None]) -> Option | None:
    """Return the first of a remedy's steps that saves memory, or that was seen to fit."""
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
