"""`python -m sweeps`: commands that need no running sweep, most of them on a study's directory.

list    list the studies of a directory and their progress
why     tell what a study knows about one configuration: its result, or why it has none
advise  tell why a trial ran out of memory, and what to try next
memory  print a model's memory by strategy and number of GPUs; needs neither a study nor a GPU
probe   ask a node of a Slurm cluster for its hardware: once, before the first dry run
cancel  end the running trials of a study whose orchestrator is gone
replay  record a study in MLflow from its files
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from sweeps.errors import ConfigError, SweepError
from sweeps.study.ledger import Ledger, exclusive
from train_entry.contract import (
    ContractError,
    Ranking,
    State,
    StudyDir,
    StudyRecord,
    Winner,
    counted,
    read_document,
)
from train_entry.contract.study.goal_text import goal_text

OK, ERROR, BAD_INPUT = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Return the exit status: 0 done, 1 error, 2 bad input."""
    options = _parsed(arguments)
    try:
        status: int = options.run(options)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader, such as `| head`, has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the flush at exit must not fail
        return OK
    except (ConfigError, ContractError) as error:
        print(error, file=sys.stderr)
        return BAD_INPUT
    except SweepError as error:
        print(error, file=sys.stderr)
        return ERROR


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line. Overrides may stand before and after an option, unlike in plain argparse."""
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if rest and (not hasattr(options, "overrides") or any(word.startswith("-") for word in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        options.overrides += rest
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m sweeps", description="Studies on disk.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    listing = commands.add_parser("list", help="list studies and their progress")
    listing.add_argument("studies_dir", nargs="?", default="studies", metavar="STUDIES_DIR")
    listing.set_defaults(run=_list)
    advise = commands.add_parser("advise", help="why a trial ran out of memory, and what to try next")
    advise.add_argument("study_dir", metavar="STUDY_DIR")
    advise.add_argument("trial", metavar="TRIAL", type=int, help="the trial's number")
    advise.set_defaults(run=_advise)
    why = commands.add_parser(
        "why", help="what a study knows about one configuration: its result, or why it has none"
    )
    why.add_argument("study_dir", metavar="STUDY_DIR")
    why.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="overrides on top of the study's")
    why.set_defaults(run=_why)
    memory = commands.add_parser("memory", help="a model's memory by strategy and number of GPUs")
    memory.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="such as model=llama_13b")
    memory.add_argument("--card", metavar="NAME", help="such as H100 or A100-80GB; this machine's, else H100")
    memory.add_argument(
        "--memory-gib", metavar="GIB", type=float, help="the GPU's memory, if it differs from the data sheet"
    )
    memory.set_defaults(run=_memory)
    probe = commands.add_parser("probe", help="ask a Slurm node for its hardware, before dry_run=true")
    probe.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="such as cluster.partition=gpu")
    probe.set_defaults(run=_probe)
    cancel = commands.add_parser(
        "cancel", help="end the running trials of a study whose orchestrator is gone"
    )
    cancel.add_argument("study_dir", metavar="STUDY_DIR")
    cancel.set_defaults(run=_cancel)
    replay = commands.add_parser("replay", help="record a study in MLflow from its files; may be repeated")
    replay.add_argument("study_dir", metavar="STUDY_DIR")
    replay.add_argument("--uri", help="tracking URI; the default lies beside the studies")
    replay.set_defaults(run=_replay)
    return parser


def _list(options: argparse.Namespace) -> int:
    found = sorted(Path(options.studies_dir).glob("*/study.json"))
    if not found:
        raise ConfigError(f"{options.studies_dir}: no study here; give the directory that holds them")
    for path in found:
        print(_summary(StudyDir(path.parent)))
    return OK


def _summary(directory: StudyDir) -> str:
    try:
        record, ledger = _study(directory), Ledger(directory)
        best = _best(record, ledger)
    except (ContractError, ConfigError) as error:
        return f"{directory.path.name}: unreadable: {error}"
    counts = Counter(trial.state for trial in ledger.trials)
    states = ", ".join(f"{counts[state]} {state}" for state in State if counts[state]) or "no trials"
    return f"{record.name}: {record.model.name}: {states}{best}"


def _best(record: StudyRecord, ledger: Ledger) -> str:
    """Return the text for the best trial: the confirmed winner if there is one, else the best measured."""
    ranking = Ranking(ledger.trials, record.goal)
    confirmed = read_document(ledger.directory.winner, Winner)
    if confirmed is not None and confirmed.goal == record.goal.name:
        for standing in confirmed.standings:
            is_known = any(trial.number == standing.trial for _, trial in ranking.contenders)
            if standing.trial == confirmed.trial and is_known:
                value = goal_text(record.goal, standing.value)
                return f"; best {value}, trial {standing.trial:04d}, confirmed"
    if ranking.best is None or ranking.best_value is None:
        return ""
    return f"; best {goal_text(record.goal, ranking.best_value)}, trial {ranking.best.number:04d}"


def _advise(options: argparse.Namespace) -> int:
    from sweeps.commands.advise import advice_lines  # imports Hydra: `list` need not wait 0.5 s

    directory = StudyDir(Path(options.study_dir))
    for line in advice_lines(directory, _study(directory), options.trial):
        print(line)
    return OK


def _why(options: argparse.Namespace) -> int:
    from sweeps.commands.why import why_lines  # imports Hydra, as above

    directory = StudyDir(Path(options.study_dir))
    for line in why_lines(directory, _study(directory), options.overrides):
        print(line)
    return OK


def _memory(options: argparse.Namespace) -> int:
    from sweeps.commands.memory import memory_lines  # imports Hydra, as above

    for line in memory_lines(options.overrides, options.card, options.memory_gib):
        print(line)
    return OK


def _probe(options: argparse.Namespace) -> int:
    from sweeps.commands.machines import probe_lines  # imports Hydra, as above

    for line in probe_lines(options.overrides):
        print(line)
    return OK


def _cancel(options: argparse.Namespace) -> int:
    from sweeps.cluster.choose import cancel_attempts  # imports submitit: `list` need not wait 0.5 s

    directory = StudyDir(Path(options.study_dir))
    _study(directory)
    with exclusive(directory):  # a live orchestrator would launch the trials again: end it by Ctrl-C
        ledger = Ledger(directory)
        running = [
            ledger.attempt(trial.number, trial.running.number)
            for trial in ledger.trials
            if trial.running is not None
        ]
        problems = cancel_attempts(running)
    if problems:
        raise SweepError("\n".join(problems))
    cancelled = counted(len(running), "running trial")
    print(f"cancelled {cancelled}; the command that started the study resumes it")
    return OK


def _replay(options: argparse.Namespace) -> int:
    from sweeps.tracking.location import default_uri, ui_command
    from sweeps.tracking.mlflow import replay

    directory = StudyDir(Path(options.study_dir).absolute())
    _study(directory)
    uri = options.uri or default_uri(directory.path.parent)
    print(f"recorded {counted(replay(directory, uri), 'trial')}\n{ui_command(uri)}")
    return OK


def _study(directory: StudyDir) -> StudyRecord:
    record = read_document(directory.record, StudyRecord)
    if record is None:
        raise ConfigError(f"{directory.path}: no study here; it has no {directory.record.name}")
    return record


if __name__ == "__main__":
    sys.exit(main())
