"""The notes below the table: why trials have no numbers, what to try next, how to run the best. Pure."""

from __future__ import annotations

import shlex
from collections import Counter

from rich.text import Text

from analysis.calibration.compare import off_line
from analysis.load import Study
from analysis.machine import machine_lines
from analysis.ranking import in_order, pareto, winner
from analysis.row import TrialRow
from analysis.text import advised, one_line
from train_entry.contract import Estimate, State, counted, short
from train_entry.contract.study.goal_text import goal_text, goal_words

MAX_NOTES = 20  # unless everything is asked for
MAX_ADVICE = 3
MAX_REFUSED = 3  # of those that lack the same
MAX_FRONT = 10


def notes(study: Study, *, everything: bool = False) -> list[Text]:
    """Return warnings, the Pareto front, the machine, rejections, failures, advice and the best command.

    `everything` lifts the limits on how many lines of a kind are shown.
    """
    failed, infeasible = _failures(study, State.FAILED), _failures(study, State.INFEASIBLE)
    lines = [*failed, *_rejections(study), *infeasible]
    left_out = 0 if everything else max(0, len(lines) - MAX_NOTES)
    lines = lines[: len(lines) - left_out]
    if left_out:
        lines.append(f"... and {left_out} more such lines: --all shows them")
    lines += _refusals(study, everything)
    lines += _advice(study, everything)
    lines += _comparisons(study)
    lines += off_line(study)
    first = winner(study)
    if first is not None:
        command = f"python sweep.py {shlex.join(first.overrides)}"
        lines.append(f"best configuration, trial {first.number:04d}: {command}")
    warnings = [f"warning: {text}" for text in study.warnings]
    above = [*_front(study, everything), *machine_lines(study, everything=everything)]
    return [Text(line) for line in (*warnings, *above, *lines)]


def _front(study: Study, everything: bool) -> list[str]:
    """List the trials on the Pareto front, in the order of the table."""
    numbers = pareto(study)
    if not numbers:
        return []
    on_front = [row for row in in_order(study) if row.number in numbers]
    shown = on_front if everything else on_front[:MAX_FRONT]
    size = counted(len(on_front), "trial")
    lines = [f"Pareto front of {', '.join(map(goal_words, study.goals))}: {size}"]
    lines += (f"  {row.name}{_knobs(row)}: {_sought(study, row)}" for row in shown)
    return [*lines, *([f"  {more} more: --all shows them"] if (more := len(on_front) - len(shown)) else [])]


def _knobs(row: TrialRow) -> str:
    return "".join(f" {knob}={short(value)}" for knob, value in row.values.items() if knob != "strategy")


def _sought(study: Study, row: TrialRow) -> str:
    pairs = zip(study.goals, row.sought, strict=True)
    return ", ".join(goal_text(goal, value) for goal, value in pairs if value is not None)


def _comparisons(study: Study) -> list[str]:
    """Name the trials whose losses lag behind for a reason that is not in their plans."""
    late = [f"{row.number:04d}" for row in study.rows if row.starts_late and row.loss is not None]
    others = any(row.loss is not None and not row.starts_late for row in study.rows)
    if not late or not others:
        return []
    what = "in bf16 without ZeRO, DeepSpeed's first update is about a quarter too small"
    trials = f"trial{'s' if len(late) > 1 else ''} {', '.join(late)}"
    return [f"the loss of {trials} (zero0) is behind: {what}"]


def _rejections(study: Study) -> list[str]:
    counts = Counter(reason.text for row in study.rows for reason in row.reasons)
    return [f"rejected ({count}): {one_line(reason)}" for reason, count in counts.most_common()]


def _failures(study: Study, state: State) -> list[str]:
    failures = [
        (row.number, row.failure)
        for row in study.rows
        if row.failure and row.state is state and not row.is_refused
    ]
    return [
        f"{state} trial {number:04d}: {failure.kind}: {one_line(failure.message)}"
        for number, failure in failures
    ]


def _refusals(study: Study, everything: bool) -> list[str]:
    """List plans that were not launched, by the resource that they exceed; those closest to fitting first."""
    refused = [row for row in study.rows if row.is_refused]
    if not refused:
        return []
    groups: dict[str, list[TrialRow]] = {}
    for row in refused:
        groups.setdefault(_lacking(row.estimate), []).append(row)
    lines = [f"not launched: {counted(len(refused), 'plan')} estimated not to fit"]
    for what, rows in sorted(groups.items(), key=lambda group: -len(group[1])):
        shown = sorted(rows, key=_excess)[: None if everything else MAX_REFUSED]
        lines += (f"  {what}: {row.name}: {_why(row)}" for row in shown)
        if more := len(rows) - len(shown):
            lines.append(f"  {what}: {more} more that need even more: --all shows them")
    return lines


def _lacking(estimate: Estimate | None) -> str:
    """Name the resource that the plan exceeds, from the estimate's numbers and not from its text."""
    if estimate is None:
        return "memory"
    device = "memory" if estimate.reservable_bytes is None else "GPU memory"
    lacks_device = estimate.needed_bytes > estimate.limit_bytes
    lacks_host = estimate.host_limit_bytes is not None and estimate.host_bytes > estimate.host_limit_bytes
    lacking = [*([device] if lacks_device else []), *(["host memory"] if lacks_host else [])]
    return " and ".join(lacking) or "NVMe"


def _excess(row: TrialRow) -> float:
    return row.estimate.excess if row.estimate else 0.0


def _why(row: TrialRow) -> str:
    message = row.failure.message if row.failure else ""
    return one_line((row.estimate.why if row.estimate else "") or message.removeprefix("not launched: "))


def _advice(study: Study, everything: bool) -> list[str]:
    """List what to try after trials that ran out of memory."""
    asking = _asking(study)
    shown = asking if everything else asking[:MAX_ADVICE]
    lines = [f"after trial {row.number:04d} ({_cause(row)}), try {_advised(row)}" for row in shown]
    left_out = len(asking) - len(shown)
    more = f"... and {left_out} more" if left_out else "what it costs and how to run it"
    return [*lines, f"{more}: python -m sweeps advise {study.directory.path} TRIAL"] if lines else []


def _asking(study: Study) -> list[TrialRow]:
    """Return the trials whose advice is new: no trial has run it, and no earlier trial gives it."""
    known = {frozenset(row.overrides) for row in study.rows}
    asking: dict[frozenset[str], TrialRow] = {}
    for row in study.rows:
        if row.advice and (plan := frozenset(row.advice.overrides)) not in known:
            asking.setdefault(plan, row)
    return list(asking.values())


def _cause(row: TrialRow) -> str:
    return row.failure.kind.value if row.failure else row.state.value


def _advised(row: TrialRow) -> str:
    return advised(row.advice) if row.advice else ""
