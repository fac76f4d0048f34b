"""Print a dry run: a line per legal plan, the best first; then the rules that the others break."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TextIO

from sweeps.plan.warnings import cautions
from sweeps.show.dry_run import BrokenRule, LegalPoint, Listing, Wasteful
from sweeps.show.estimates import FIT_WORDS, GROUPS, OTHER, by_group, limit_bytes, shortfall, speed
from train_entry.contract import Fit, Goal, gib, short
from train_entry.contract.study.goal_text import goal_number, goal_words
from train_entry.contract.study.goals import MAXIMIZED

GAP = "  "  # between two columns
# Heads of narrow columns, broken into lines.
SPLIT = {"optimizer": "opti-\nmizer", "gradients": "gradi-\nents", "activations": "activa-\ntions"}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Column:
    head: str  # lines
    text: Callable[[LegalPoint], str]
    is_text: bool = False  # aligned to the left


def show_listing(listing: Listing, stream: TextIO) -> None:
    """Print legal plans, a line each; cautions; broken rules; totals. No line is cut off."""
    notes = (*map(_caution_text, listing.wasteful), *map(_rule_text, listing.broken))
    for line in (*_table(listing), *notes, *_how(listing), *totals(listing)):
        print(line, file=stream)


def totals(listing: Listing) -> list[str]:
    """Return lines that count points: planned, legal, rejected, and for a sample those not planned."""
    rejected = listing.looked_at - len(listing.legal)
    repeats = len(listing.legal) - listing.distinct
    same = f" ({repeats:,} the same job as another)" if repeats else ""
    points = f"{listing.looked_at:,} point{'' if listing.looked_at == 1 else 's'}"
    lines = [f"{points}: {len(listing.legal):,} legal{same}, {rejected:,} rejected"]
    sample = f"a sample, by search.seed={listing.seed}"
    if listing.points is None:
        lines.append(f"{sample}: the space is infinite; these are corners of it and random points")
    elif listing.points > listing.looked_at:
        lines.append(f"{sample}: the space has {listing.points - listing.looked_at:,} more points")
    return lines


def aligned(rows: Iterable[Sequence[str]], lefts: Sequence[bool]) -> Iterator[str]:
    """Yield lines whose columns are as wide as their widest cell; `lefts` says which align to the left.

    Rich takes milliseconds per row, and there may be thousands of rows.
    """
    cells = list(rows)
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        padded = (
            cell.ljust(width) if left else cell.rjust(width)
            for cell, width, left in zip(row, widths, lefts, strict=True)
        )
        yield GAP.join(padded).rstrip()


def headed(heads: Sequence[str], rows: Iterable[Sequence[str]], lefts: Sequence[bool]) -> list[str]:
    """Return the lines of a table: heads of several lines, aligned at the bottom; a rule; the rows."""
    split = [head.split("\n") for head in heads]
    height = max(map(len, split))
    head_rows = list(zip(*([""] * (height - len(lines)) + lines for lines in split), strict=True))
    lines = list(aligned([*head_rows, *rows], lefts))
    return [*lines[:height], "─" * max(map(len, lines)), *lines[height:]]


def _rule_text(broken: BrokenRule) -> str:
    reason = broken.example
    source = f" [{reason.source}]" if reason.source else ""
    return f"rejected ({broken.count:,}) by {reason.rule}, for example: {reason.text}{source}"


def _caution_text(wasteful: Wasteful) -> str:
    caution = wasteful.example
    return f"wasteful ({wasteful.count:,}) by {caution.name}, for example: {caution.text}"


def _how(listing: Listing) -> Iterator[str]:
    if not listing.legal:
        return
    if listing.basis:
        yield f"estimates: {listing.basis}"
    counts = (f"{listing.count(fit):,} {FIT_WORDS[fit]}" for fit in Fit if listing.count(fit))
    yield f"{', '.join(counts)}; memory: the fullest rank, at its peak"


def _table(listing: Listing) -> Iterator[str]:
    if not listing.legal:
        return
    columns = _columns(listing)
    rows = [tuple(column.text(found) for column in columns) for found in listing.legal]
    yield from headed([column.head for column in columns], rows, [column.is_text for column in columns])
    yield ""


def _columns(listing: Listing) -> list[_Column]:
    """Return all columns. The knob `strategy` has none, since the plan's own strategy says more."""
    knobs = [knob for knob in listing.knobs if knob != "strategy"]
    return [
        _Column(head="#", text=lambda found: str(found.number)),
        _Column(head="strategy", text=lambda found: found.plan.strategy, is_text=True),
        *(_knob_column(knob) for knob in knobs),
        _Column(head="accumulation", text=lambda found: str(found.plan.grad_accum)),
        *_goal_columns(listing),
        _Column(head="step\nms", text=lambda found: _milliseconds(found.estimate.step_s)),
        _Column(head="peak\nGiB", text=lambda found: gib(found.estimate.peak_bytes)),
        *_needed_columns(listing),
        *_group_columns(listing),
        _Column(head="verdict", text=lambda found: FIT_WORDS[found.estimate.fit], is_text=True),
        _Column(head="", text=_remarks, is_text=True),
    ]


def _goal_columns(listing: Listing) -> Iterator[_Column]:
    """Yield the column of the goal that orders the plans, and in any case that of the speed."""
    goal = listing.goal
    if goal.name in ("time_to_tokens", "cost"):
        words = (
            goal_words(goal).replace(" to ", "\nto ").replace(" of ", "\nof ").replace(" tokens", "\ntokens")
        )
        yield _Column(head=words, text=lambda found: _sought(goal, found))
    name = goal.name if goal.name in MAXIMIZED else "tokens_per_s_per_gpu"
    head = goal_words(Goal(name=name)).replace("s/G", "s\n/G")
    yield _Column(head=head, text=lambda found: speed(getattr(found.estimate, name)))


def _sought(goal: Goal, found: LegalPoint) -> str:
    value = goal.value(found.estimate)
    return "" if value is None else goal_number(goal, value)


def _knob_column(knob: str) -> _Column:
    return _Column(
        head=knob.replace(".", ".\n").replace("_", "_\n"),
        text=lambda found: short(found.point[knob]) if knob in found.point else "",
    )


def _needed_columns(listing: Listing) -> list[_Column]:
    """Return the memory needed, with the limit in the head or, if limits differ, as on a CPU, in a column."""
    limits = {_limit(found) for found in listing.legal}
    limit = limits.pop()
    head = f"needed\nof {limit}\nGiB" if limit and not limits else "needed\nGiB"
    needed = _Column(head=head, text=lambda found: gib(found.estimate.needed_bytes))
    return [needed, *([_Column(head="limit\nGiB", text=_limit)] if limits else [])]


def _limit(found: LegalPoint) -> str:
    limit = limit_bytes(found.estimate)
    return "" if limit is None else gib(limit)


def _group_columns(listing: Listing) -> list[_Column]:
    """Return the columns of the peak's groups; a group that no plan has is left out."""
    found = set().union(*(by_group(one.estimate.components) for one in listing.legal))
    return [_group_column(group) for group in (*GROUPS, OTHER) if group in found]


def _group_column(group: str) -> _Column:
    def text(found: LegalPoint) -> str:
        count = by_group(found.estimate.components).get(group, 0)
        return gib(count) if count else ""

    return _Column(head=SPLIT.get(group, group), text=text)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f}" if seconds >= 0.1 else f"{seconds * 1e3:.3g}"


def _remarks(found: LegalPoint) -> str:
    """Return why the plan does not fit, and other remarks on it."""
    marks = [shortfall(found.estimate)] if found.estimate.why else []
    marks += ["wasteful"] if cautions(found.plan) else []
    marks += [f"same as #{found.same_as}"] if found.same_as else []
    return ", ".join(marks)
