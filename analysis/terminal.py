"""Tables on a terminal: a number is never cut off, however narrow it is."""

from __future__ import annotations

from typing import TextIO

from rich import box
from rich.console import Console
from rich.measure import Measurement as Width
from rich.table import Table
from rich.text import Text

WIDE = 10_000  # columns; no line of a table reaches it


def console_on(stream: TextIO) -> Console:
    """Return the console's width; a file gets lines of full width."""
    console = Console(file=stream, highlight=False)
    if not console.is_terminal:
        console.width = WIDE
    return console


def plain_table(title: str, caption: str, narrow: bool = False) -> Table:
    """Return an empty table in the look that all tables share."""
    return Table(
        title=Text(title),
        caption=Text(caption),
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 0 if narrow else 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )


def needed_width(console: Console, table: Table) -> int:
    return Width.get(console, console.options.update(max_width=WIDE), table).minimum


def print_whole(console: Console, table: Table) -> None:
    console.width = max(console.width, needed_width(console, table))
    console.print(table)
