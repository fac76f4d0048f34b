"""calibration.html: plots, tables and lines in one file that needs no other. Pure."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

from analysis.calibration.scatter import BAND, Point, svg

PAGE = "calibration.html"
# Colour-blind safe (Okabe and Ito 2008, without black), on white and on dark.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#b8a900")
OTHER = "#888888"

STYLE = """\
:root { color-scheme: light dark; --line: #8884; --soft: #8882; --muted: #777 }
body { font: 15px/1.45 system-ui, sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem }
h1 { font-size: 1.4rem } h2 { font-size: 1.05rem; margin: 0 0 .3rem }
.plots { display: flex; flex-wrap: wrap; gap: 1.5rem }
svg { max-width: 100%; height: auto; font: 12px system-ui, sans-serif }
svg text { fill: currentColor } .axis { text-anchor: middle } .tick { fill: var(--muted) !important }
.grid { stroke: var(--line) } .band { fill: var(--soft) } .diagonal { stroke: currentColor; fill: none }
circle { stroke-width: 1.6; fill-opacity: .75 } circle:hover { stroke-width: 4 }
.key span { margin-right: 1.1rem; white-space: nowrap } .muted { color: var(--muted) }
section { overflow-x: auto; margin: 1.5rem 0 }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .15rem .7rem; text-align: right; white-space: pre-line; vertical-align: bottom }
th { border-bottom: 1px solid var(--line); font-weight: 600 } .left { text-align: left }
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """A table as text."""

    title: str
    caption: str
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: tuple[int, ...]  # columns of words


@dataclass(frozen=True, kw_only=True, slots=True)
class Scatter:
    title: str  # the quantity and its unit, after a comma
    points: tuple[Point, ...]


def page(*, title: str, scatters: Sequence[Scatter], grids: Sequence[Grid], lines: Sequence[str]) -> str:
    """Return the whole file."""
    colours = _colours(scatters)
    plots = "\n".join(
        f"<div><h2>{_text(scatter.title)}</h2>\n{_plot(scatter, colours)}</div>" for scatter in scatters
    )
    return "\n".join(
        (
            "<!doctype html>",
            f'<html lang="en"><head><meta charset="utf-8"><title>{_text(title)}</title>',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<style>\n{STYLE}</style></head><body>",
            f"<h1>{_text(title)}</h1>",
            *([f'<div class="plots">\n{plots}</div>', _key(colours)] if scatters else []),
            f"<p>{'<br>'.join(map(_text, lines))}</p>",
            *(_table(grid) for grid in grids if grid.rows),
            "</body></html>\n",
        )
    )


def _plot(scatter: Scatter, colours: dict[str, str]) -> str:
    return svg(scatter.points, scatter.title.rpartition(" ")[2], colours)


def _colours(scatters: Sequence[Scatter]) -> dict[str, str]:
    """Return the colour of each series by name; series beyond the palette share one."""
    names = sorted({point.series for scatter in scatters for point in scatter.points})
    return {name: COLOURS[place] if place < len(COLOURS) else OTHER for place, name in enumerate(names)}


def _key(colours: dict[str, str]) -> str:
    series = "".join(
        f'<span><b style="color:{colour}">&#9679;</b> {_text(name)}</span>'
        for name, colour in colours.items()
    )
    how = "Above the diagonal an estimate was too high. The band is"
    hollow = "Hollow: estimated from formulas alone. Point at a trial to see which it is."
    return f'<p class="key">{series}</p>\n<p class="muted">{how} {BAND:.0%} to either side. {hollow}</p>'


def _table(grid: Grid) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        classes = (' class="left"' if number in grid.left else "" for number in range(len(cells)))
        parts = (f"<{tag}{mark}>{_text(cell)}</{tag}>" for mark, cell in zip(classes, cells, strict=True))
        return f"<tr>{''.join(parts)}</tr>"

    body = "\n".join(row(cells, "td") for cells in grid.rows)
    caption = "<br>".join(_text(line) for line in grid.caption.splitlines())
    return (
        f"<section><h2>{_text(grid.title)}</h2>\n<table><thead>{row(grid.headers, 'th')}</thead>\n"
        f'<tbody>{body}</tbody></table>\n<p class="muted">{caption}</p></section>'
    )


def _text(text: str) -> str:
    return html.escape(text)
