"""`python -m analysis COMMAND STUDY_DIR`: what a study found, from its files alone."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from analysis.calibration.page import PAGE
from analysis.calibration.view import show_calibration, write_calibration_csv, write_page
from analysis.columns import UnknownColumn
from analysis.export import export_lines
from analysis.load import StudyUnreadable, load_study
from analysis.table import show, write_csv
from train_entry.contract import StudyDir, write_atomic

if TYPE_CHECKING:
    _Commands = argparse._SubParsersAction[argparse.ArgumentParser]  # generic for mypy only

_TABLE_HELP = """\
Print the ranked table of a study and write the same to STUDY_DIR/table.csv.
The study may still be running. Nothing else in the directory is changed.

examples:
  python -m analysis table studies/llama1b3
  python -m analysis table studies/llama1b3 --sort peak_bytes --all
"""

_CALIBRATION_HELP = """\
Compare the estimates of a study with its measurements, and write plots to STUDY_DIR/calibration.html.
The study may still be running. Nothing else in the directory is changed.

examples:
  python -m analysis calibration studies/llama1b3
  python -m analysis calibration studies/llama1b3 --csv calibration.csv
"""

_EXPORT_HELP = """\
Write every trial that ran, with its plan and every step's seconds, as JSON: one object a line, the first
about the study. The file can replay a search without a GPU. docs/tables.md describes the fields.

examples:
  python -m analysis export-table studies/llama1b3 --to llama1b3.jsonl
  python -m analysis export-table studies/llama1b3 | head -1
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status: 0; 1 if a file cannot be written; 2 if the study or column does not exist."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without ± still gets its numbers
    options = _parser().parse_args(arguments)
    try:
        status: int = options.run(options)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is flushed at exit
        return 0
    except (StudyUnreadable, UnknownColumn) as error:
        print(f"python -m analysis: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m analysis", description="Read a study's files.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    table = _command(commands, "table", "print the ranked table and write table.csv", _TABLE_HELP)
    table.add_argument(
        "--sort",
        metavar="COLUMN",
        help="a column of table.csv, such as peak_bytes, loss or a knob; "
        "throughputs largest first, all others smallest first (default: by the study's objective)",
    )
    table.add_argument(
        "--all", action="store_true", help="also rejected trials, and more than the first rows and notes"
    )
    table.set_defaults(run=_table)
    calibration = _command(
        commands, "calibration", "compare estimates with measurements, with plots", _CALIBRATION_HELP
    )
    calibration.add_argument(
        "--csv", type=Path, metavar="PATH", help="also write the comparison there, one row a trial"
    )
    calibration.set_defaults(run=_calibration)
    export = _command(commands, "export-table", "write all trials as JSON, to replay searches", _EXPORT_HELP)
    export.add_argument("--to", type=Path, metavar="FILE", help="write there (default: print)")
    export.set_defaults(run=_export_table)
    return parser


def _command(commands: _Commands, name: str, what: str, text: str) -> argparse.ArgumentParser:
    command = commands.add_parser(
        name, help=what, description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    command.add_argument(
        "study", type=Path, metavar="STUDY_DIR", help="the directory that holds study.json: studies/NAME"
    )
    return command


def _table(options: argparse.Namespace) -> int:
    study = load_study(StudyDir(options.study))
    show(study, sys.stdout, sort=options.sort, everything=options.all)
    return _written(study.directory.table, lambda: write_csv(study))


def _calibration(options: argparse.Namespace) -> int:
    study = load_study(StudyDir(options.study))
    path: Path | None = options.csv
    if path is not None and (problem := _no_target(path)):
        print(f"python -m analysis: --csv {path}: {problem}", file=sys.stderr)
        return 2
    show_calibration(study, sys.stdout)
    if path is not None and (status := _written(path, lambda: write_calibration_csv(study, path))):
        return status
    status = _written(study.directory.path / PAGE, lambda: write_page(study))
    if status == 0:
        print(f"plots: {study.directory.path / PAGE}")
    return status


def _export_table(options: argparse.Namespace) -> int:
    study = load_study(StudyDir(options.study))
    path: Path | None = options.to
    if path is None:
        for line in export_lines(study):
            print(line)
        return 0
    if problem := _no_target(path):
        print(f"python -m analysis: --to {path}: {problem}", file=sys.stderr)
        return 2
    text = "".join(f"{line}\n" for line in export_lines(study))
    if status := _written(path, lambda: write_atomic(path, text)):
        return status
    print(f"{text.count(chr(10)) - 1} trials: {path}")
    return 0


def _no_target(path: Path) -> str:
    """Return why a file could not be written there, before anything is; empty if it can be."""
    folder = path.absolute().parent
    if path.is_dir():
        return "is a directory; give a file in it"
    if not folder.is_dir():
        return f"there is no folder {folder}; make it, or give another"
    if not os.access(folder, os.W_OK | os.X_OK):
        return f"the folder {folder} cannot be written; give another"
    return ""


def _written(path: Path, write: Callable[[], object]) -> int:
    """Return the exit status of writing a file."""
    try:
        write()
    except OSError as error:
        print(f"python -m analysis: cannot write {path}: {error.strerror}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
