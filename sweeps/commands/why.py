"""`python -m sweeps why`: tell what a study knows about one configuration: its result, or why it has none."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from sweeps.commands.machines import study_machine
from sweeps.config.compose import Composer, open_composer
from sweeps.config.keys import is_marked, key_of, scope_of
from sweeps.config.knob import Mark, Scope
from sweeps.config.schema import GateConfig
from sweeps.errors import ConfigError
from sweeps.estimate.estimator import Estimator, hardware_for
from sweeps.estimate.fit import require_room, room_of
from sweeps.plan.planner import Planner
from sweeps.plan.resolve import Planned, Rejection
from sweeps.show.estimates import FIT_WORDS, basis, biggest, limit_bytes
from sweeps.study.export import reproduce_command
from sweeps.study.ledger import Ledger
from sweeps.study.record import comparable
from train_entry.contract import (
    Estimate,
    Failure,
    FailureKind,
    Fit,
    Goal,
    Measurement,
    Plan,
    Ranking,
    State,
    StudyDir,
    StudyRecord,
    Trial,
    gib,
    typed,
)
from train_entry.contract.study.goal_text import goal_number, goal_text, goal_words

# If several trials have the same plan, the one whose state comes first here gives the answer.
PLACES = (
    State.MEASURED,
    State.INFEASIBLE,
    State.STOPPED,
    State.SUSPECT,
    State.FAILED,
    State.RUNNING,
    State.QUEUED,
    State.CANCELLED,
    State.REUSED,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Expectation:
    """Estimators before and after learning from the study."""

    cold: Estimator
    learned: Estimator
    basis: str  # how the learned estimates were made


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A study, and the configuration that the user asks about."""

    directory: StudyDir
    record: StudyRecord
    trials: Sequence[Trial]
    planned: Planned
    expectation: Expectation
    gate: GateConfig
    margin: tuple[str, ...]  # overrides that change only the verdict whether a plan fits

    @property
    def goal(self) -> Goal:
        return self.record.goal

    def value(self, found: Measurement | Estimate) -> float | None:
        """Return the goal's value; None if it is not known, such as the loss of an estimate."""
        return self.goal.value(found)

    def said(self, value: float | None) -> str:
        return f"no {goal_words(self.goal)} known" if value is None else goal_text(self.goal, value)

    def behind(self, value: float, best: float) -> str:
        """Return how much worse a value is than the best one: `25.0% below`."""
        return f"{abs(value / best - 1):.1%} {'below' if self.goal.is_maximized else 'above'}"

    def measured(self) -> list[tuple[float, Trial]]:
        """Return the trials that can win, with their drift-corrected values; the best first."""
        return Ranking(self.trials, self.goal).contenders


def why_lines(directory: StudyDir, record: StudyRecord, overrides: Sequence[str]) -> Iterator[str]:
    """Yield the answer. Raises ConfigError if the overrides make no configuration of this study."""
    trials = Ledger(directory).trials
    is_gpu = record.versions.get("device", "CPU") != "CPU"
    composer = composer_for(open_composer(lambda: is_gpu), record, overrides)
    config = composer.compose()
    machine, note = study_machine(record, trials, config)
    planned = Planner(composer, record.model, machine, record.name).plan({})
    asked = " ".join(map(shlex.quote, overrides)) or "as the study stands"
    if isinstance(planned.plan, Rejection):
        yield f"{asked}: rejected: it makes no legal plan"
        yield from _rejected(planned.plan)
        return
    room, hardware = room_of(config.cluster, config.gate, machine), hardware_for(machine)
    require_room(room, hardware)
    cold = Estimator(record.model, hardware, room, config.gate)
    learned = Estimator(record.model, hardware, room, config.gate)
    learned.learn(trials)
    made = basis(hardware, room, config.gate, learned.observations)
    expectation = Expectation(cold=cold, learned=learned, basis=made)
    case = Case(
        directory=directory,
        record=record,
        trials=trials,
        planned=planned,
        expectation=expectation,
        gate=config.gate,
        margin=tuple(text for text in overrides if is_marked(key_of(text), Mark.FIT_ONLY)),
    )
    yield f"{asked}: {_plan_text(planned.plan)}"
    if note:
        yield f"note:      {note}"
    yield from _answer(case, planned.plan)


def composer_for(composer: Composer, record: StudyRecord, overrides: Sequence[str]) -> Composer:
    """Return a composer with these overrides and the study's own, without the knobs that it varied.

    Raises ConfigError for a key that is fixed within the study.
    """
    if fixed_keys := [key for text in overrides if _is_fixed(key := key_of(text))]:
        raise ConfigError([f"{key}: fixed within study {record.name}; leave it out" for key in fixed_keys])
    said = list(record.overrides) or [
        f"{key}={typed(value)}"
        for key, value in comparable(record.asked).items()
        if key.partition(".")[0] not in ("model", "data")
    ]
    if "ranks" in record.asked and "ranks" not in map(key_of, said):  # as many ranks as the study had
        said.append(f"ranks={record.asked['ranks']}")
    taken = {key_of(text) for text in overrides} | set(record.dimensions)
    kept = [text for text in said if key_of(text) not in taken]
    return composer.with_fixed([*kept, *overrides])


def _is_fixed(key: str) -> bool:
    """True unless the key is a knob, or changes only the verdict whether a plan fits."""
    return scope_of(key) is not Scope.TRIAL and not is_marked(key, Mark.FIT_ONLY)


def _plan_text(plan: Plan) -> str:
    return (
        f"{plan.strategy} on {plan.ranks} rank{'s' * (plan.ranks > 1)}, micro_batch={plan.micro_batch}, "
        f"accumulation {plan.grad_accum}"
    )


def _rejected(rejection: Rejection) -> Iterator[str]:
    for reason in rejection.reasons:
        yield f"rule:      {reason.rule}: {reason.text}"
        if reason.source:
            yield f"source:    {reason.source}"


def _answer(case: Case, plan: Plan) -> Iterator[str]:
    same = [trial for trial in case.trials if _is_same(trial, case.planned)]
    same.sort(key=lambda trial: (PLACES.index(trial.state), trial.number))
    if not same:
        yield from _untried(case, plan)
        return
    trial, *others = same
    match trial.outcome:
        case Measurement() as seen if trial.state is State.MEASURED:
            yield from _measured(case, trial, seen)
        case Measurement() as seen:
            yield f"answer:    {_name(trial)} is {trial.state}: {case.said(case.value(seen))}"
            yield from _shared(trial)
        case Failure() as failure:
            yield from _failed(case, plan, trial, failure)
        case None:
            yield f"answer:    {_name(trial)} is {trial.state}: no result yet"
            yield from _expected(case, plan)
    if trial.outcome is not None:
        yield from _now(case, plan, trial)
    if trial.is_refused:  # as a single trial it is launched whatever the gate says
        yield _command(case)
    yield from _others(others)


def _is_same(trial: Trial, planned: Planned) -> bool:
    """True if the trial has this plan. Fingerprints hold paths, which may differ on another machine."""
    return trial.plan is not None and (trial.fingerprint == planned.fingerprint or trial.plan == planned.plan)


def _name(trial: Trial) -> str:
    return f"trial {trial.number:04d}"


def _others(others: Iterable[Trial]) -> Iterator[str]:
    for trial in others:
        if trial.state is State.REUSED and trial.reused_from is not None:
            yield f"reused:    {_name(trial)} would run the same job, and shares its result"
        else:
            yield f"also:      {_name(trial)}, the same plan, is {trial.state}"


def _shared(trial: Trial) -> Iterator[str]:
    if trial.state is State.REUSED and trial.reused_from is not None:
        yield f"reused:    it would run the same job as trial {trial.reused_from:04d}, and shares its result"


def _measured(case: Case, trial: Trial, seen: Measurement) -> Iterator[str]:
    yield (
        f"answer:    measured as {_name(trial)}: {case.said(case.value(seen))}, "
        f"{seen.step_s * 1e3:,.0f} ms a step, peak {gib(seen.peak_bytes)} GiB"
    )
    ranked = case.measured()
    place = next((at for at, (_, one) in enumerate(ranked) if one is trial), None)
    if trial.is_single_gpu:
        yield "place:     none: a single-GPU baseline, which cannot win"
    elif place is None:
        yield f"place:     none: its {goal_words(case.goal)} is not a finite number"
    elif place == 0:
        yield f"place:     1 of {len(ranked)} measured: the best"
    else:
        (value, _), (best, winner) = ranked[place], ranked[0]
        yield (
            f"place:     {place + 1} of {len(ranked)} measured: {case.behind(value, best)} the best, "
            f"{_name(winner)} ({case.said(best)})"
        )
    if trial.is_shared:
        yield "note:      another trial ran on the same node at the same time; this trial may be faster alone"
    if trial.estimate:
        yield f"estimate:  {_figures(case, trial.estimate)}, made before it ran"


def _failed(case: Case, plan: Plan, trial: Trial, failure: Failure) -> Iterator[str]:
    if trial.is_refused:
        yield f"answer:    {_name(trial)} is {trial.state}: {failure.kind.explanation}"
        if trial.estimate is None or not trial.estimate.why:
            yield f"message:   {failure.message}"
    else:
        yield f"answer:    {_name(trial)} is {trial.state}: {failure.kind}: {failure.kind.explanation}"
        yield f"message:   {failure.message}"
    yield from _shared(trial)
    if trial.state is State.INFEASIBLE:
        yield from _memory(trial.estimate or case.expectation.learned.estimate(plan))
    if failure.kind in (FailureKind.GPU_OOM, FailureKind.HOST_OOM):
        yield f"next:      python -m sweeps advise {shlex.quote(str(case.directory.path))} {trial.number}"


def _now(case: Case, plan: Plan, trial: Trial) -> Iterator[str]:
    """Yield today's verdict, if it differs for a refused plan or if the overrides change the margin."""
    then, now = trial.estimate, case.expectation.learned.estimate(plan)
    is_revised = trial.is_refused and then is not None and then.fit is not now.fit
    if not is_revised and not case.margin:
        return
    yield f"now:       {FIT_WORDS[now.fit]}: {_need(now)}"
    yield f"estimates: {case.expectation.basis}"
    is_of_the_gate = all(key_of(text).partition(".")[0] == "gate" for text in case.margin)
    if trial.is_refused and is_of_the_gate and (now.fit is not Fit.TOO_LARGE or not case.gate.enabled):
        said = " ".join(["the study's next start", *(["with"] if case.margin else []), *case.margin])
        is_counted = case.gate.enabled and now.fit is Fit.BORDERLINE
        yield f"next:      {said} launches it{', unless gate.borderline is used up' * is_counted}"


def _need(estimate: Estimate) -> str:
    limit = limit_bytes(estimate)
    of = f" of {gib(limit)} GiB" if limit is not None else ""
    peak = f"peak {gib(estimate.peak_bytes)} GiB ({estimate.phase})"
    return f"{peak}, needed {gib(estimate.needed_bytes)} GiB{of}"


def _memory(estimate: Estimate) -> Iterator[str]:
    yield f"memory:    {_need(estimate)}"
    yield f"parts:     {biggest(estimate.components)} GiB"
    if estimate.why:
        yield f"too much:  {estimate.why}"


def _untried(case: Case, plan: Plan) -> Iterator[str]:
    reasons = list(_dominated(case, plan))
    if reasons:
        yield "answer:    dominated: not tried, and not expected to win"
        yield from (f"because:   {reason}" for reason in reasons)
    else:
        yield "answer:    not tried yet"
    yield from _expected(case, plan)
    yield _command(case)


def _command(case: Case) -> str:
    place = [f"study={case.directory.path.name}"]  # so that all trials are in one table
    if (studies := case.directory.path.absolute().parent) != Path("studies").absolute():
        place.append(f"studies_dir={studies}")
    return f"try it:    {reproduce_command([*case.planned.overrides, *place])}"


def _dominated(case: Case, plan: Plan) -> Iterator[str]:
    """Yield why the plan is not expected to win, by estimates that have learned from the study."""
    estimate = case.expectation.learned.estimate(plan)
    failed = [
        (case.expectation.learned.estimate(trial.plan), trial)
        for trial in case.trials
        if trial.plan is not None and _ran_out(trial)
    ]
    beyond = [each for each in failed if each[0].needed_bytes <= estimate.needed_bytes]
    if beyond:
        least, trial = min(beyond, key=lambda each: each[0].needed_bytes)
        yield (
            f"it needs {gib(estimate.needed_bytes)} GiB; {_name(trial)} needs only "
            f"{gib(least.needed_bytes)} GiB and ran out of memory (both estimated)"
        )
    ranked = case.measured()
    value = case.value(estimate)
    if ranked and value is not None and case.goal.score(value) < case.goal.score(ranked[0][0]):
        best, trial = ranked[0]
        yield (
            f"it is estimated at {case.said(value)}, {case.behind(value, best)} "
            f"{_name(trial)}, which was measured at {goal_number(case.goal, best)}"
        )


def _ran_out(trial: Trial) -> bool:
    return isinstance(trial.outcome, Failure) and trial.outcome.kind is FailureKind.GPU_OOM


def _expected(case: Case, plan: Plan) -> Iterator[str]:
    learned = case.expectation.learned
    yield f"formulas:  {_figures(case, case.expectation.cold.estimate(plan))}"
    estimate = learned.estimate(plan)
    if learned.observations:
        yield f"learned:   {_figures(case, estimate)}"
    yield from _memory(estimate)
    yield f"estimates: {case.expectation.basis}"


def _figures(case: Case, estimate: Estimate) -> str:
    return (
        f"{FIT_WORDS[estimate.fit]}, {case.said(case.value(estimate))}, "
        f"{estimate.step_s * 1e3:,.0f} ms a step, peak {gib(estimate.peak_bytes)} GiB"
    )
