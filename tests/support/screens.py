"""Render every screen as text: all views of recorded studies, and of dry runs.

    SHARDSWEEP_WRITE_SCREENS=1 python -m pytest tests/test_screens.py     # rewrites tests/data/screens

The texts do not depend on the machine or on the time of day.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import re
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from rich.console import Console

import sweep
from analysis.__main__ import main as analysis_main
from analysis.load import load_study
from analysis.table import render, show, write_csv
from analysis.trial import show_trial
from sweeps.__main__ import main as sweeps_main
from sweeps.config.compose import Composer
from sweeps.show.display import LiveDisplay, PlainDisplay, StudyProgress
from sweeps.show.dry_run import Listing
from sweeps.show.dry_run_file import write_listing
from sweeps.show.dry_run_view import show_listing
from sweeps.study.ledger import Ledger
from sweeps.study.limits import StopReason
from sweeps.tracking.content import run_content, shared_view
from sweeps.tracking.mlflow import shown_attempt
from tests.support.dry_runs import CPU, TWO_H200, listed
from tests.support.paths import DATA, ROOT
from train_entry.contract import FailureKind, Ranking, StudyDir, StudyRecord, Winner, read_document

RECORDED = DATA / "goldens" / "first_edition.tar.xz"
NAMES = (
    *("searched", "interrupted", "died", "died_confirming", "died_checking", "goals", "remedies", "grid"),
    *("quickstart", "h200"),
)
# The machine and arguments of each dry run: one on two cores, one on two H200s.
DRY_RUNS = {
    "dry_run_cpu": (CPU, ("-m", "space=quickstart", "strategy=ddp,zero1,zero3", "micro_batch=1,3")),
    "dry_run_gpu": (
        TWO_H200,
        (
            "model=llama_7b",
            "global_batch=32",
            "strategy=ddp,zero1,zero3,pp2,zero3_offload",
            "micro_batch=4,8",
        ),
    ),
}


def extract_studies(to: Path) -> Path:
    """Extract the recorded studies into a directory, and return it."""
    with tarfile.open(RECORDED) as archive:
        archive.extractall(to, filter="data")
    return to


def screens_of(studies: Path, composer: Composer) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield each screen's name and the function that renders it."""
    for name in NAMES:
        directory = StudyDir(studies / name)
        yield f"{name}.table", partial(tables, directory)
        yield f"{name}.trials", partial(trials, directory)
        yield f"{name}.live", partial(live, directory)
        yield f"{name}.mlflow", partial(mlflow_runs, directory)
        yield f"{name}.calibration", partial(calibration, directory)
    yield "list", partial(printed, sweeps_main, "list", str(studies))
    yield "memory", partial(printed, sweeps_main, "memory", "model=llama_7b", "--card", "H100")
    for study in ("searched", "quickstart"):
        yield f"{study}.why", partial(why, studies / study)
    yield "remedies.advise", partial(advise, studies / "remedies", 2, 3, 4)
    for name, (machine, arguments) in DRY_RUNS.items():
        found = listed(composer, *(word for word in arguments if word != "-m"), machine=machine)
        yield name, partial(listing, found)
    yield "help", lambda: "".join(map(helped, (sweeps_main, analysis_main)))
    yield "words", words


def printed(program: Callable[[list[str]], int], *arguments: str) -> str:
    """Return a program's output and errors, and its exit status."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            status = program(list(arguments))
        except SystemExit as ended:
            status = int(str(ended.code or 0))
    return neutral(f"{out.getvalue()}{err.getvalue()}[status {status}]\n")


def neutral(text: str) -> str:
    """Replace paths and this host's memory limit in a text."""
    text = re.sub(r"/[\w/.-]*/recorded\d+/studies", "STUDIES", text)
    text = text.replace(str(ROOT), "ROOT").replace(sys.executable, "python")
    return re.sub(r"limit [\d.]+ GiB a node", "limit N GiB a node", text)


def tables(directory: StudyDir) -> str:
    study = load_study(directory)
    plain, everything = io.StringIO(), io.StringIO()
    show(study, plain)
    show(study, everything, sort="peak_bytes", everything=True)
    narrow = Console(file=io.StringIO(), width=80)
    narrow.print(render(study, narrow=True))
    assert isinstance(narrow.file, io.StringIO)
    parts = {
        "table": plain.getvalue(),
        "table --sort peak_bytes --all": everything.getvalue(),
        "on a narrow terminal": narrow.file.getvalue(),
        "table.csv": write_csv(study).read_text(encoding="utf-8"),
    }
    return neutral("".join(f"== {name}\n{text}" for name, text in parts.items()))


def trials(directory: StudyDir) -> str:
    rows = {row.number: row for row in load_study(directory).rows}
    out = io.StringIO()
    for trial in Ledger(directory).trials:
        show_trial(trial, rows[trial.number], out)
        out.write("\n")
    return neutral(out.getvalue())


def live(directory: StudyDir) -> str:
    """Return the log of a start that finds the study in this state, and the live table."""
    record = read_document(directory.record, StudyRecord)
    assert record is not None
    known = Ledger(directory).trials
    progress = StudyProgress(launched=3, elapsed_s=120.0, limit_trials=30, limit_s=3600.0)
    log = io.StringIO()
    plain = PlainDisplay(log, lambda: 0.0)
    plain.start(record)
    for count in range(1, len(known) + 1):
        plain.update(known[:count], progress)
    console = Console(file=io.StringIO(), width=120, height=40)
    table = LiveDisplay(console)
    table.start(record)
    table.stop()
    frame = Console(file=io.StringIO(), width=120)
    frame.print(table.frame(known, progress))
    assert isinstance(frame.file, io.StringIO)
    return log.getvalue() + frame.file.getvalue()


def mlflow_runs(directory: StudyDir) -> str:
    """Return metrics and tags of each trial's run, without its parameters (the plan) and step series."""
    record = read_document(directory.record, StudyRecord)
    assert record is not None
    winner = read_document(directory.winner, Winner)
    lines = [shared_view(record)]
    known = Ledger(directory).trials
    ranking = Ranking(known, record.goal)
    for trial in known:
        attempt = shown_attempt(directory.trial(trial.number), trial)
        content = run_content(trial, attempt, record.goals, winner, ranking.drift(trial))
        found = dataclasses.asdict(content)
        del found["params"], found["artifacts"]
        found["series"] = len(found["series"])
        lines.append(json.dumps(found, indent=1))
    return "".join(f"{line}\n" for line in lines)


def calibration(directory: StudyDir) -> str:
    text = printed(analysis_main, "calibration", str(directory.path))
    return text + printed(analysis_main, "export-table", str(directory.path))


def why(study: Path) -> str:
    asked = (
        *(("strategy=zero1", "micro_batch=2"), ("strategy=zero2", "micro_batch=4")),
        *(("strategy=zero3", "micro_batch=1"), ("strategy=zero1", "micro_batch=3")),
        *(("strategy=ddp", "micro_batch=4"), ("strategy=zero1", "micro_batch=16")),
    )
    return "".join(f"== {' '.join(one)}\n{printed(sweeps_main, 'why', str(study), *one)}" for one in asked)


def advise(study: Path, *numbers: int) -> str:
    return "".join(printed(sweeps_main, "advise", str(study), str(number)) for number in numbers)


def listing(found: Listing) -> str:
    out = io.StringIO()
    show_listing(found, out)
    with tempfile.TemporaryDirectory() as folder:
        plans = Path(folder) / "plans.csv"
        write_listing(found, plans)
        return out.getvalue() + plans.read_text(encoding="utf-8")


def helped(program: Callable[[list[str]], int]) -> str:
    text = printed(program, "--help")
    commands = re.findall(r"^    (\w[\w-]*) ", text, re.MULTILINE)
    return text + "".join(printed(program, command, "--help") for command in commands)


def words() -> str:
    """Return texts that no recorded study shows."""
    lines = [f"{reason.name}: {reason}" for reason in StopReason]
    lines += [f"{kind}: {kind.explanation}" for kind in FailureKind]
    assert sweep.__doc__ is not None
    return "".join(f"{line}\n" for line in (*lines, *sweep.__doc__.splitlines()))
