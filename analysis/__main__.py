"""`python -m analysis table STUDY_DIR`: what a study found, from its files alone."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence
from pathlib import Path

from analysis.load import StudyUnreadable, load_study
from analysis.table import UnknownColumn, show, write_csv
from train_entry.contract import StudyDir

_TABLE_HELP = """\
Print the ranked table of a study and write the same to STUDY_DIR/table.csv.
The study may still be running. Nothing else in the directory is changed.

examples:
  python -m analysis table studies/llama1b3
  python -m analysis table studies/llama1b3 --sort peak_bytes --all
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status: 0; 1 where table.csv cannot be written; 2 where what was asked does not exist."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without ± still gets its numbers
    options = _parser().parse_args(arguments)
    try:
        return _table(options)
    except (StudyUnreadable, UnknownColumn) as error:
        print(f"python -m analysis: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m analysis", description="Read a study's files.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    table = commands.add_parser(
        "table",
        help="print the ranked table and write table.csv",
        description=_TABLE_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    table.add_argument(
        "study", type=Path, metavar="STUDY_DIR", help="the directory that holds study.json: studies/NAME"
    )
    table.add_argument(
        "--sort",
        metavar="COLUMN",
        help="a column of table.csv, such as peak_bytes, loss or a knob; "
        "throughputs largest first, all others smallest first (default: by the study's objective)",
    )
    table.add_argument(
        "--all", action="store_true", help="also rejected trials, and more than the first rows and notes"
    )
    return parser


def _table(options: argparse.Namespace) -> int:
    study = load_study(StudyDir(options.study))
    show(study, sys.stdout, sort=options.sort, everything=options.all)
    try:
        write_csv(study)
    except OSError as error:
        print(f"python -m analysis: cannot write {study.directory.table}: {error.strerror}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
