"""`python -m sweeps advise`: explain why a trial ran out of memory, and propose what to try next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from sweeps.commands.machines import study_machine
from sweeps.config.compose import open_composer
from sweeps.errors import ConfigError, SweepError
from sweeps.estimate.estimator import Estimator, hardware_for
from sweeps.estimate.fit import room_of
from sweeps.machine import Machine
from sweeps.plan.planner import Planner
from sweeps.search.advice import plan_of
from sweeps.search.remedies import ALL, Grounds, Option, known, nothing_left, options, under_way
from sweeps.show.estimates import FIT_WORDS, limit_bytes
from sweeps.study.export import reproduce_command
from sweeps.study.ledger import Ledger
from train_entry.contract import (
    Advice,
    Failure,
    FailureKind,
    Measurement,
    State,
    StepMetrics,
    StudyDir,
    StudyRecord,
    Trial,
    counted,
    gib,
    read_lines,
)

MEMORY = (FailureKind.GPU_OOM, FailureKind.HOST_OOM)


def advice_lines(directory: StudyDir, record: StudyRecord, number: int) -> Iterator[str]:
    """Yield the lines that explain a failed trial. Raises ConfigError if there is no such trial."""
    ledger = Ledger(directory)
    numbers = [trial.number for trial in ledger.trials]
    if number not in numbers:
        raise ConfigError(f"{directory.path}: no trial {number}; {_there_are(numbers)}")
    trial = ledger[number]
    yield f"trial {number:04d}, {_knobs(trial)}: {trial.state}"
    match trial.outcome:
        case Failure() as failure:
            yield from _failed(directory, trial, failure)
            if failure.kind in MEMORY:
                yield from _next(directory, record, ledger, trial)
        case Measurement():
            yield "it was measured: there is nothing to fix"
        case None:
            yield from (f"rejected: {reason.text}" for reason in trial.reasons)
            yield from ("it has no result yet",) if trial.state is not State.REJECTED else ()


def _there_are(numbers: Sequence[int]) -> str:
    if len(numbers) < 2:
        return f"there is only {numbers[0]}" if numbers else "it has none yet"
    return f"there are {min(numbers)} to {max(numbers)}"


def _knobs(trial: Trial) -> str:
    strategy = trial.plan.strategy if trial.plan else ""
    others = (f"{key}={value}" for key, value in trial.values.items() if key != "strategy")
    return " ".join((strategy, *others)).strip()


def _failed(directory: StudyDir, trial: Trial, failure: Failure) -> Iterator[str]:
    yield f"why:      {failure.kind}: {failure.kind.explanation}"
    yield f"          {failure.message}"
    if failure.kind is FailureKind.INFEASIBLE:
        yield "it was not launched; docs/failures.md, at `infeasible`, says what to do"
        return
    assert trial.shown is not None, "only a launched trial fails otherwise"
    attempt = directory.trial(trial.number).attempt(trial.shown.number)
    steps = len(list(read_lines(attempt.metrics, StepMetrics)))
    where = [] if failure.rank is None else [f"rank {failure.rank}"]
    where += [] if failure.phase is None else [f"in phase {failure.phase}"]
    where.append(f"after {counted(steps, 'step')}")
    yield f"where:    {', '.join(where)}"
    if failure.kind not in MEMORY:
        yield f"it did not run out of memory; docs/failures.md, at `{failure.kind}`, says what to do"


def _next(directory: StudyDir, record: StudyRecord, ledger: Ledger, trial: Trial) -> Iterator[str]:
    """Yield advice that considers what the study has tried since, or the stored advice if that fails."""
    try:
        machine, note, grounds = _grounds(record, ledger.trials, trial)
    except SweepError as error:
        yield from _stored(directory, trial, str(error).splitlines()[0])
        return
    unchanged = grounds.plan_of({}, {})
    if unchanged is None or unchanged.fingerprint != trial.fingerprint:
        yield from _stored(directory, trial, f"here ({machine.device_name}) its overrides make another plan")
        return
    if note:
        yield f"note:     {note}"
    found = list(options(trial, grounds))
    for option in found:
        if not option.is_open:
            yield _passed(option)
    if found and found[-1].is_open:
        same = under_way(ledger.trials).get(found[-1].candidate.fingerprint)
        yield from _advice(directory, found[-1].advice, same, found[-1])
    elif any(_fits(option) for option in found):
        yield "next:     nothing is left to try; see above what fits"
    else:
        yield f"next:     {nothing_left(trial, machine.device, found)}"


def _grounds(record: StudyRecord, trials: Sequence[Trial], trial: Trial) -> tuple[Machine, str, Grounds]:
    """Compose the trial from its own overrides, with estimates that have learned from the study.

    Returns the machine, a note on it (empty if it is this one), and the grounds for advice.
    """
    is_gpu = record.versions.get("device", "CPU") != "CPU"
    composer = open_composer(lambda: is_gpu).with_fixed(trial.overrides)
    config = composer.compose()
    machine, note = study_machine(record, trials, config)
    room = room_of(config.cluster, config.gate, machine)
    estimator = Estimator(record.model, hardware_for(machine), room, config.gate)
    estimator.learn(trials)
    grounds = Grounds(
        device=machine.device,
        model=record.model,
        plan_of=plan_of(Planner(composer, record.model, machine, record.name).plan, {}),
        expect=estimator.estimate,
        tried=known(trials),
    )
    return machine, note, grounds


def _stored(directory: StudyDir, trial: Trial, why: str) -> Iterator[str]:
    yield f"note:     stored advice, since it cannot be recomputed: {why}"
    if trial.advice is None:
        yield "next:     no advice is on record"
    else:
        yield from _advice(directory, trial.advice)


def _advice(
    directory: StudyDir, advice: Advice, same: Trial | None = None, option: Option | None = None
) -> Iterator[str]:
    """Yield the advice. `same` is a trial that already tries it, `option` the remedy with its estimate."""
    yield f"next:     {_changes(advice)}"
    yield f"because:  {advice.why}"
    if option is not None:
        yield f"expected: {_expected(option)}"
    if remedy := ALL.get(advice.remedy):
        yield f"it does:  {remedy.explanation}"
        yield f"it costs: {remedy.cost}"
    if same is not None:
        yield f"now:      trial {same.number:04d} is {same.state} with this plan: wait, or resume the study"
        return
    place = [f"study={directory.path.name}"]  # so that both trials are in one table
    if (studies := directory.path.absolute().parent) != Path("studies").absolute():
        place.append(f"studies_dir={studies}")
    yield f"try it:   {reproduce_command([*advice.overrides, *place])}"


def _changes(advice: Advice) -> str:
    return " ".join(text for text in advice.overrides if text.partition("=")[0] in advice.changes)


def _expected(option: Option) -> str:
    """Return the verdict on the option's plan, and the memory that it needs."""
    said = option.expected
    needs = f"peak {gib(said.peak_bytes)} GiB ({said.phase}), needed {gib(said.needed_bytes)}"
    text = f"{FIT_WORDS[said.fit]}: {needs}{_of(limit_bytes(said))} GiB a rank"
    if option.candidate.plan.offload.devices:
        text += f"; {gib(said.host_bytes)}{_of(said.host_limit_bytes)} GiB of the node's host memory"
    return text


def _of(limit: int | None) -> str:
    return "" if limit is None else f" of {gib(limit)}"


def _passed(option: Option) -> str:
    """Return the result of a remedy that was tried, or why the remedy is not worth a launch."""
    changes, trial = _changes(option.advice), option.tried
    if trial is None:
        return f"skipped:  {changes}: {option.expected.why}"
    if isinstance(trial.outcome, Measurement):
        speed = f"{trial.outcome.tokens_per_s_per_gpu:,.0f} tokens/s/GPU"
        return f"tried:    {changes}: trial {trial.number:04d} fits, {speed}"
    kind = trial.outcome.kind if isinstance(trial.outcome, Failure) else trial.state
    return f"tried:    {changes}: trial {trial.number:04d} ended with {kind}"


def _fits(option: Option) -> bool:
    return option.tried is not None and isinstance(option.tried.outcome, Measurement)
