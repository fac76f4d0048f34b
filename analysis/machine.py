"""The machine while trials were measured: drift, and GPUs that were slowed. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from analysis.load import Study
from analysis.row import TrialRow
from train_entry.contract import State

MAX_NUMBERS = 8  # of trials in a line


def machine_lines(study: Study, *, everything: bool = False) -> list[str]:
    """Return a line on drift, and one for each reason for which GPUs were slowed."""
    own = [row for row in study.rows if row.step_s is not None and row.state is not State.REUSED]
    return [*_drift(own), *_slowed(own, everything)]


def _drift(rows: Sequence[TrialRow]) -> Iterator[str]:
    drifted = [row for row in rows if row.drift != 1.0]
    if not drifted:
        return
    first, last = drifted[0].number, drifted[-1].number
    when = f"for trials {first:04d} to {last:04d}"
    if len(drifted) == 1:
        when = f"for trial {first:04d}"
    if last == rows[-1].number:
        when = f"from trial {first:04d} on"
    drifts = [row.drift for row in drifted]
    how = " to ".join(dict.fromkeys((_how(min(drifts)), _how(max(drifts)))))
    seen_by = _numbers([row.number for row in rows if row.drift_repeats], everything=False)
    by = f" (measured by repeats of trial {seen_by})" if seen_by else ""
    yield f"drift: the machine was {how} {when}{by}; the ranking is corrected for it"


def _how(drift: float) -> str:
    return f"{1 - drift:.1%} slower" if drift < 1 else f"{drift - 1:.1%} faster"


def _slowed(rows: Iterable[TrialRow], everything: bool) -> Iterator[str]:
    """Yield one line for each set of reasons, since a limit of the machine holds for all trials alike."""
    groups: defaultdict[tuple[str, ...], list[TrialRow]] = defaultdict(list)
    for row in rows:
        if row.cards and row.cards.throttled:
            groups[row.cards.throttled].append(row)
    for reasons, slowed in groups.items():
        cards = [row.cards for row in slowed if row.cards]
        slowest = min(cards, key=lambda card: card.clock_mhz)
        numbers = _numbers([row.number for row in slowed], everything)
        clocks = f"down to {slowest.clock_mhz:,} of {slowest.max_clock_mhz:,} MHz"
        hottest = max(card.temperature_c for card in cards)
        trials = f"trial{'s' if len(slowed) > 1 else ''} {numbers}"
        yield f"GPUs slowed by {' and '.join(reasons)} in {trials}: {clocks}, up to {hottest} °C"


def _numbers(numbers: Sequence[int], everything: bool) -> str:
    shown = numbers if everything else numbers[:MAX_NUMBERS]
    more = f" and {len(numbers) - len(shown)} more" if len(shown) < len(numbers) else ""
    return ", ".join(f"{number:04d}" for number in shown) + more
