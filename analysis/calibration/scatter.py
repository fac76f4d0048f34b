"""Draw a scatter plot of two like quantities as SVG text: equal logarithmic axes and the diagonal. Pure."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SIZE = 420  # pixels, also of the units in the drawing
LEFT, TOP, RIGHT, BOTTOM = 58, 12, 12, 44  # margins
BAND = 0.1  # of the value, to either side of the diagonal
MOST_TICKS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    x: float  # positive, as is y
    y: float
    series: str
    hollow: bool
    label: str  # shown when pointed at


@dataclass(frozen=True, slots=True)
class _Axis:
    """A logarithmic axis from the smallest to the largest value."""

    low: float
    high: float

    def share(self, value: float) -> float:
        return math.log(value / self.low) / math.log(self.high / self.low)

    def x(self, value: float) -> float:
        return LEFT + self.share(value) * (SIZE - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return SIZE - BOTTOM - self.share(value) * (SIZE - TOP - BOTTOM)


def svg(points: Sequence[Point], unit: str, colours: Mapping[str, str]) -> str:
    """Draw the plot: measured values to the right, estimates upwards, one colour a series."""
    what, middle = html.escape(unit), (LEFT + SIZE - RIGHT) / 2
    axis = _axis([value for point in points for value in (point.x, point.y)])
    parts = [
        f'<svg viewBox="0 0 {SIZE} {SIZE}" width="{SIZE}" height="{SIZE}" role="img" '
        f'aria-label="{what}: estimated against measured">',
        f'<clipPath id="inside-{what}"><rect x="{LEFT}" y="{TOP}" width="{SIZE - LEFT - RIGHT}" '
        f'height="{SIZE - TOP - BOTTOM}"/></clipPath>',
        *_grid(axis),
        f'<g clip-path="url(#inside-{what})">{_diagonal(axis)}</g>',
        *(_circle(point, axis, colours[point.series]) for point in points),
        f'<text class="axis" x="{middle}" y="{SIZE - 8}">measured {what}</text>',
        f'<text class="axis" transform="translate(13 {(TOP + SIZE - BOTTOM) / 2}) rotate(-90)">'
        f"estimated {what}</text>",
        "</svg>",
    ]
    return "\n".join(parts)


def _axis(values: Sequence[float]) -> _Axis:
    """Return the axis range: a tenth wider than the values on each side, and never a single point."""
    low, high = min(values), max(values)
    margin = max(1.1, (high / low) ** 0.05)
    return _Axis(low / margin, high * margin)


def ticks(low: float, high: float) -> list[float]:
    """Return round tick values: 1, 2, 5 times powers of ten, or finer where the range is small."""
    for multiples in ((1,), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 8)):
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        found = [m * 10.0**power for power in powers for m in multiples if low <= m * 10.0**power <= high]
        if len(found) > 2:
            break
    if len(found) < 2:
        step = 10.0 ** math.floor(math.log10(high - low))
        found = [step * n for n in range(math.ceil(low / step), math.floor(high / step) + 1)]
    return found[:: math.ceil(len(found) / MOST_TICKS)] if found else []


def _grid(axis: _Axis) -> list[str]:
    parts = []
    for value in ticks(axis.low, axis.high):
        x, y, text = axis.x(value), axis.y(value), f"{value:,.4g}"
        parts += [
            f'<path class="grid" d="M{x:.1f} {TOP}V{SIZE - BOTTOM}M{LEFT} {y:.1f}H{SIZE - RIGHT}"/>',
            f'<text class="tick" x="{x:.1f}" y="{SIZE - BOTTOM + 16}" text-anchor="middle">{text}</text>',
            f'<text class="tick" x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{text}</text>',
        ]
    return parts


def _diagonal(axis: _Axis) -> str:
    """Draw the diagonal, where estimates are right, and a band around it."""
    low, high = axis.low, axis.high
    corners = [
        *((low, low * (1 + BAND)), (high, high * (1 + BAND))),
        *((high, high / (1 + BAND)), (low, low / (1 + BAND))),
    ]
    band = " ".join(f"{axis.x(x):.1f},{axis.y(y):.1f}" for x, y in corners)
    line = f"M{axis.x(low):.1f} {axis.y(low):.1f}L{axis.x(high):.1f} {axis.y(high):.1f}"
    return f'<polygon class="band" points="{band}"/><path class="diagonal" d="{line}"/>'


def _circle(point: Point, axis: _Axis, colour: str) -> str:
    x, y, fill = axis.x(point.x), axis.y(point.y), "none" if point.hollow else colour
    title = f"<title>{html.escape(point.label)}</title>"
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{fill}" stroke="{colour}">{title}</circle>'
