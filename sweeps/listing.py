"""The plans of a space, legal or not and why: what `dry_run=true` prints. Launches and writes nothing."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TextIO

from sweeps.display import as_typed
from sweeps.plan import Rejection
from sweeps.planner import Planned
from sweeps.space import Matters, Point, SearchSpace
from train_entry.contract import Plan, Reason, Scalar

MAX_LISTED = 3000  # points; a larger space is sampled
GAP = "  "  # between two columns


@dataclass(frozen=True, kw_only=True, slots=True)
class LegalPoint:
    """A point that would run."""

    number: int  # within the listing
    point: Point
    plan: Plan
    same_as: int | None  # an earlier one that would run the very same job


@dataclass(frozen=True, kw_only=True, slots=True)
class BrokenRule:
    """A rule, and how many points break it."""

    count: int
    example: Reason


@dataclass(frozen=True, kw_only=True, slots=True)
class Listing:
    """The points of a space that were looked at: all of a small one, a sample of a large one."""

    knobs: tuple[str, ...]  # that vary
    legal: tuple[LegalPoint, ...]
    broken: tuple[BrokenRule, ...]  # the most frequent first; a point may break several
    looked_at: int
    points: int | None  # of the space; None: infinitely many
    seed: int  # of the sample

    @property
    def distinct(self) -> int:
        """How many different jobs the legal points are."""
        return sum(found.same_as is None for found in self.legal)


def list_plans(
    space: SearchSpace, plan: Callable[[Mapping[str, Scalar]], Planned], matters: Matters, seed: int
) -> Listing:
    """Plan every point of a finite space up to MAX_LISTED; else corners and random points, by the seed."""
    points = _chosen(space, random.Random(seed), matters)
    planned = [(point, plan(point)) for point in points]
    return Listing(
        knobs=tuple(dimension.key for dimension in space.dimensions),
        legal=tuple(_legal(planned)),
        broken=_broken(found.plan for _, found in planned),
        looked_at=len(points),
        points=space.size(matters),
        seed=seed,
    )


def _chosen(space: SearchSpace, source: random.Random, matters: Matters) -> list[Point]:
    if space.is_finite:
        return space.sample(MAX_LISTED, source, matters)
    corners = space.ends.sample(MAX_LISTED // 2, source, matters)
    drawn = space.sample(MAX_LISTED - len(corners), source, matters)
    return list({tuple(point.items()): point for point in (*corners, *drawn)}.values())


def _legal(planned: Iterable[tuple[Point, Planned]]) -> Iterator[LegalPoint]:
    first: dict[str | None, int] = {}
    number = 0
    for point, found in planned:
        if isinstance(found.plan, Rejection):
            continue
        number += 1
        same_as = first.setdefault(found.fingerprint, number)
        yield LegalPoint(
            number=number, point=point, plan=found.plan, same_as=None if same_as == number else same_as
        )


def _broken(plans: Iterable[Plan | Rejection]) -> tuple[BrokenRule, ...]:
    examples: dict[str, list[Reason]] = {}
    for plan in plans:
        for reason in plan.reasons if isinstance(plan, Rejection) else ():
            examples.setdefault(reason.rule, []).append(reason)
    by_count = sorted(examples.values(), key=len, reverse=True)
    return tuple(BrokenRule(count=len(reasons), example=reasons[0]) for reasons in by_count)


# ---------------------------------------------------------------- for people


def show_listing(listing: Listing, stream: TextIO) -> None:
    """Print it: legal plans, a line each; broken rules; totals. No line is cut off."""
    for line in (*_table(listing), *map(_rule_text, listing.broken), *totals(listing)):
        print(line, file=stream)


def totals(listing: Listing) -> list[str]:
    """How many points there are, were looked at, and are legal."""
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


def _rule_text(broken: BrokenRule) -> str:
    reason = broken.example
    source = f" [{reason.source}]" if reason.source else ""
    return f"rejected ({broken.count:,}) by {reason.rule}, for example: {reason.text}{source}"


def _table(listing: Listing) -> Iterator[str]:
    """Columns as wide as their widest cell. Rich takes milliseconds a row, and there may be thousands."""
    if not listing.legal:
        return
    knobs = [knob for knob in listing.knobs if knob != "strategy"]  # the plan's own says more
    names = ("#", "strategy", *knobs, "accumulation", "")
    headers = [name.replace(".", ".\n").replace("_", "_\n").split("\n") for name in names]
    height = max(map(len, headers))
    head = list(zip(*([""] * (height - len(lines)) + lines for lines in headers), strict=True))
    body = [tuple(_cells(found, knobs)) for found in listing.legal]
    widths = [max(map(len, column)) for column in zip(*head, *body, strict=True)]
    yield from (_aligned(cells, widths) for cells in head)
    yield "─" * (sum(widths) + len(GAP) * (len(widths) - 1))
    yield from (_aligned(cells, widths) for cells in body)
    yield ""


def _cells(found: LegalPoint, knobs: Iterable[str]) -> Iterator[str]:
    yield str(found.number)
    yield found.plan.strategy
    for knob in knobs:
        yield as_typed(found.point[knob]) if knob in found.point else ""
    yield str(found.plan.grad_accum)
    yield f"same as #{found.same_as}" if found.same_as else ""


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    """To the right, but for the strategy and the last."""
    lefts = (1, len(cells) - 1)
    padded = (
        cell.ljust(width) if at in lefts else cell.rjust(width)
        for at, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return GAP.join(padded).rstrip()
