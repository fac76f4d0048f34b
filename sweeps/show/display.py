"""Show a study while it runs: a live table on a terminal, one line per event elsewhere."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import NamedTuple, Protocol, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from train_entry.contract import (
    Advice,
    Failure,
    FailureKind,
    Goal,
    Measurement,
    MemoryKind,
    Origin,
    Phase,
    Ranking,
    State,
    StudyRecord,
    Trial,
    counted,
    gib,
    short,
)
from train_entry.contract.study.goal_text import goal_text

SHOWN_TRIALS = 15
SHOWN_REFUSED = 2  # most refused plans of one update that get a line each in a log
WAITING = "waiting to start"
LONG_WAIT_S = 10.0  # the end of a wait this long is worth a line in a log
_LINES_BESIDE_TRIALS = 5  # header, rule, a blank line and the status below, the cursor
_NONE_YET = Goal(name="tokens_per_s_per_gpu")  # until a display is started
_SHOWN_ANYWAY = ("tokens_per_s_per_gpu", "peak_bytes", "loss")  # goals that every trial's line shows


class Reached(NamedTuple):
    """The progress of a running trial, from its heartbeat."""

    phase: Phase
    step: int
    of_steps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyProgress:
    """The progress of a study. Limits are totals over all its starts; None: no such limit."""

    launched: int  # trials, running ones included
    elapsed_s: float
    limit_trials: int | None = None
    limit_s: float | None = None
    parallel: int = 1  # trials at once
    running: Mapping[int, Reached] = field(default_factory=dict)  # trial number to its heartbeat
    waiting: frozenset[int] = frozenset()  # trials that were submitted but have not begun, as in a queue


class Display(Protocol):
    """A view of a study that the loop keeps up to date. Every method may be called at any time."""

    def start(self, study: StudyRecord) -> None: ...
    def update(self, trials: Sequence[Trial], progress: StudyProgress) -> None: ...
    def message(self, text: str) -> None: ...
    def stop(self) -> None: ...


def make_display(stream: TextIO) -> Display:
    """Return a live table if the stream is a terminal that can show one, else a plain log."""
    if stream.isatty() and os.environ.get("TERM") not in ("dumb", "unknown"):
        return LiveDisplay(Console(file=stream, highlight=False))
    return PlainDisplay(stream)


class LiveDisplay:
    """A table that is redrawn in place, and removed at the end: the ranked table follows it."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, refresh_per_second=4, transient=True)
        self._goal = _NONE_YET

    def start(self, study: StudyRecord) -> None:
        self._goal = study.goal
        self.message(_headline(study))
        self._live.start()

    def update(self, trials: Sequence[Trial], progress: StudyProgress) -> None:
        self._live.update(self.frame(trials, progress))

    def message(self, text: str) -> None:
        self._console.print(Text(_printable(text)))  # above the table, where it stays

    def stop(self) -> None:
        self._live.stop()

    def frame(self, trials: Sequence[Trial], progress: StudyProgress) -> Group:
        """Return the table, cut to the height of the terminal, and a status line."""
        ranking = Ranking(trials, self._goal)
        best = ranking.best
        room = max(1, min(SHOWN_TRIALS, self._console.height - _LINES_BESIDE_TRIALS))
        status = Text(_status(trials, progress, ranking), no_wrap=True, overflow="ellipsis")
        return Group(_live_table(_worth_showing(trials, best, room), progress, best), status)


class PlainDisplay:
    """A log with one line per change of a trial's state, and no control characters."""

    def __init__(self, stream: TextIO, now_s: Callable[[], float] = time.time) -> None:
        self._stream = stream
        self._now_s = now_s
        self._started_at = 0.0
        self._elapsed_s = 0.0
        self._goal = _NONE_YET
        self._states: dict[int, State] = {}
        self._waiting: dict[int, float] = {}  # trial number to the time at which its wait began

    def start(self, study: StudyRecord) -> None:
        self._goal = study.goal
        self._started_at = self._now_s()
        self.message(_headline(study))

    def update(self, trials: Sequence[Trial], progress: StudyProgress) -> None:
        self._elapsed_s = progress.elapsed_s
        ranking = Ranking(trials, self._goal)
        changed = [trial for trial in trials if self._states.get(trial.number) is not trial.state]
        self._states.update((trial.number, trial.state) for trial in changed)
        earlier = [trial for trial in changed if self._is_history(trial)]
        if earlier:
            ended = counted(len(earlier), "trial")
            self.message(f"resumed: {ended} had already ended; {_best_so_far(ranking)}")
        new = [trial for trial in changed if trial not in earlier]
        refused = [trial for trial in new if _is_refused(trial)]
        if len(refused) > SHOWN_REFUSED:
            self.message(_refusals(refused))
            new = [trial for trial in new if not _is_refused(trial)]
        for trial in new:
            event = _event(trial, self._goal, trial is ranking.best)
            self.message(f"trial {trial.number:04d} {_knobs(trial)}{_from(trial)}: {event}")
        self._tell_begun(trials, progress.waiting)

    def _tell_begun(self, trials: Sequence[Trial], waiting: frozenset[int]) -> None:
        """Tell when a trial's wait in a queue is over, if the wait was long."""
        now_s = self._now_s()
        for trial in trials:
            since_s = self._waiting.get(trial.number, now_s)
            if trial.number not in waiting and now_s - since_s >= LONG_WAIT_S and _is_under_way(trial):
                self.message(f"trial {trial.number:04d} started after waiting {_duration(now_s - since_s)}")
        self._waiting = {number: self._waiting.get(number, now_s) for number in waiting}

    def message(self, text: str) -> None:
        print(f"[{self._elapsed_s:5.1f} s] {_printable(text)}", file=self._stream, flush=True)

    def stop(self) -> None:
        pass

    def _is_history(self, trial: Trial) -> bool:
        return trial.closed_at is not None and trial.closed_at < self._started_at


def eta_s(trials: Sequence[Trial], progress: StudyProgress) -> float | None:
    """Estimate the seconds until a limit ends the study, from the launched trials that have ended."""
    left_s = None if progress.limit_s is None else max(0.0, progress.limit_s - progress.elapsed_s)
    durations_s = [
        trial.closed_at - trial.created_at
        for trial in trials
        if trial.is_launched and trial.state.is_closed and trial.closed_at is not None
    ]
    if progress.limit_trials is None or not durations_s:
        return left_s
    remaining = max(0, progress.limit_trials - _done(trials, progress))
    needed_s = fmean(durations_s) * remaining / progress.parallel
    return needed_s if left_s is None else min(needed_s, left_s)


def _is_refused(trial: Trial) -> bool:
    """True if the trial was not launched because its estimate says that it cannot fit."""
    is_estimated = isinstance(trial.outcome, Failure) and trial.outcome.kind is FailureKind.INFEASIBLE
    return is_estimated and trial.state is State.INFEASIBLE


def _done(trials: Sequence[Trial], progress: StudyProgress) -> int:
    return progress.launched - sum(trial.state is State.RUNNING for trial in trials)


def _worth_showing(trials: Sequence[Trial], best: Trial | None, room: int) -> list[Trial]:
    """Return the best trial, the running ones and the latest others, ordered by number."""

    def interest(trial: Trial) -> tuple[bool, bool, bool, int]:
        return trial is not best, trial.state is not State.RUNNING, _is_refused(trial), -trial.number

    return sorted(sorted(trials, key=interest)[:room], key=lambda trial: trial.number)


def _live_table(trials: Sequence[Trial], progress: StudyProgress, best: Trial | None) -> Table:
    table = Table(box=None, expand=True, padding=(0, 1), pad_edge=False, header_style="bold")
    table.add_column("", no_wrap=True)
    table.add_column("trial", no_wrap=True, justify="right")
    table.add_column("state", no_wrap=True)
    table.add_column("knobs", no_wrap=True, overflow="ellipsis", ratio=1)
    for header in ("tokens/s/GPU", "memory", "loss"):
        table.add_column(header, no_wrap=True, justify="right")
    for trial in trials:
        speed, memory, loss = _figures(trial)
        is_waiting = trial.number in progress.waiting
        state = WAITING if is_waiting else _live_state(trial, progress.running.get(trial.number))
        mark, knobs = "*" if trial is best else "", _knobs(trial, brief=True) + _from(trial)
        cells = (mark, f"{trial.number:04d}", state, knobs, speed, memory, loss)
        style = "bold green" if trial is best else "dim" if isinstance(trial.outcome, Failure) else ""
        table.add_row(*(Text(_printable(cell)) for cell in cells), style=style)
    return table


def _live_state(trial: Trial, reached: tuple[Phase, int, int] | None) -> str:
    if reached is not None and _is_under_way(trial):
        phase, step, of_steps = reached
        word = "repeat" if _is_repeated(trial) else "running"
        return f"{word} {phase}" if phase.is_startup else f"{word} {phase} {step}/{of_steps}"
    return _state(trial)


def _is_under_way(trial: Trial) -> bool:
    return trial.state is State.RUNNING or _is_repeated(trial)


def _is_repeated(trial: Trial) -> bool:
    """True if a repeat or a check of the trial runs now."""
    return trial.state is not State.RUNNING and trial.running is not None


def _state(trial: Trial) -> str:
    if _is_refused(trial):
        return f"{trial.state} estimated"
    if isinstance(trial.outcome, Failure) and trial.outcome.kind.value != trial.state.value:
        return f"{trial.state} {trial.outcome.kind}"
    return f"{trial.state}" if trial.reused_from is None else f"{trial.state} {trial.reused_from:04d}"


def _figures(trial: Trial) -> tuple[str, str, str]:
    """Return throughput, memory and loss: blank without a measurement, with ~ if estimated."""
    seen = trial.outcome
    if trial.estimate and _is_refused(trial):
        return "", f"~{gib(trial.estimate.peak_bytes)} GiB", ""
    if not isinstance(seen, Measurement):
        return "", "", ""
    speed = seen.tokens_per_s_per_gpu
    kind = " RSS" if seen.memory_kind is MemoryKind.HOST_RSS else ""
    return (
        f"{speed:,.0f}" if speed >= 100 else f"{speed:.3g}",
        f"{gib(seen.peak_bytes)} GiB{kind}",
        f"{seen.loss:.3f}",
    )


def _status(trials: Sequence[Trial], progress: StudyProgress, ranking: Ranking) -> str:
    limit = "" if progress.limit_trials is None else f"/{progress.limit_trials}"
    hours = "" if progress.limit_s is None else f" of {_duration(progress.limit_s)}"
    eta = eta_s(trials, progress)
    parts = [
        f"{_done(trials, progress)}{limit} trials",
        *([f"{refused} not launched: cannot fit"] if (refused := sum(map(_is_refused, trials))) else []),
        f"{_duration(progress.elapsed_s)}{hours}",
        *([] if eta is None else [f"ETA {_duration(eta)}"]),
        _best_so_far(ranking),
    ]
    return "\n" + "  |  ".join(parts)


def _best_so_far(ranking: Ranking) -> str:
    if ranking.best is None or ranking.best_value is None:
        return "no best yet"
    return f"best {ranking.best.number:04d}: {goal_text(ranking.goal, ranking.best_value)}"


def _event(trial: Trial, goal: Goal, is_best: bool) -> str:
    """Return the state of a trial and its result, in one line."""
    state, outcome = _state(trial), trial.outcome
    if _is_refused(trial):
        return f"not launched, estimated not to fit: {_why(trial)}"
    if isinstance(outcome, Failure):
        advice = f"; try next: {_changes(trial.advice)}" if trial.advice else ""
        return f"{state}: {outcome.message}{advice}"
    if isinstance(outcome, Measurement):
        speed, memory, loss = _figures(trial)
        value = None if goal.name in _SHOWN_ANYWAY else goal.value(outcome)
        sought = "" if value is None else f", {goal_text(goal, value)}"
        skipped = f": slower than the best, {counted(outcome.spared_steps, 'step')} skipped"
        why = skipped if trial.state is State.STOPPED else ""
        numbers = f"{speed} tokens/s/GPU, {memory}, loss {loss}{sought}"
        return f"{state} {numbers}{why}{' (best)' if is_best else ''}"
    return f"{state}: {'; '.join(reason.text for reason in trial.reasons)}" if trial.reasons else state


def _refusals(trials: Sequence[Trial]) -> str:
    """Sum up many plans that were not launched, in one line."""
    first = trials[0]
    example = f"trial {first.number:04d} {_knobs(first)}: {_why(first)}"
    return f"not launched: {counted(len(trials), 'plan')} estimated not to fit, for example {example}"


def _why(trial: Trial) -> str:
    """Return which memory is too small, with numbers."""
    message = trial.outcome.message if isinstance(trial.outcome, Failure) else ""
    return (trial.estimate.why if trial.estimate else "") or message.removeprefix("not launched: ")


def _changes(advice: Advice) -> str:
    return " ".join(f"{knob}={short(value)}" for knob, value in advice.changes.items())


def _knobs(trial: Trial, brief: bool = False) -> str:
    """Return the strategy and the other knobs that vary: `zero2 micro_batch=4`; brief: without sections."""
    strategy = trial.plan.strategy if trial.plan else trial.values.get("strategy", "")
    others = (
        f"{knob.rpartition('.')[2] if brief else knob}={short(value)}"
        for knob, value in trial.values.items()
        if knob != "strategy"
    )
    return " ".join((str(strategy), *others)).strip()


def _from(trial: Trial) -> str:
    """Return a mark for baselines and remedies; empty for other trials."""
    if trial.is_single_gpu:
        return " (single-GPU baseline)"
    if trial.origin is Origin.REMEDY and trial.parent is not None:
        return f" (remedy of {trial.parent:04d})"
    return " (baseline)" if trial.baseline else ""


def _headline(study: StudyRecord) -> str:
    knobs = f"; knobs: {', '.join(study.dimensions)}" if study.dimensions else ""
    sought = ", then ".join(goal.name for goal in study.goals)
    return f"study {study.name}: {study.model.name}, by {sought}{knobs}"


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _printable(text: str) -> str:
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())
