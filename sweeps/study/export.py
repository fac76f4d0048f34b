"""Write the winner as files that run without shardsweep.

They are best/{ds_config.json, plan.json, overrides.txt, command.sh}.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from sweeps.plan.ds_config import ds_config_text
from train_entry.contract import StudyDir, Trial, dump, write_atomic


def reproduce_command(overrides: Sequence[str]) -> str:
    """Return the command line that runs one trial alone, ready to paste."""
    return shlex.join(["python", "sweep.py", *overrides])


def write_best(directory: StudyDir, trial: Trial) -> Path:
    """Write, or replace, the study's winner; return the folder."""
    if trial.plan is None:
        raise ValueError(f"trial {trial.number} has no plan")
    best = directory.best
    write_atomic(best / "plan.json", dump(trial.plan) + "\n")
    write_atomic(best / "overrides.txt", "".join(f"{override}\n" for override in trial.overrides))
    write_atomic(best / "command.sh", _script(directory, trial))
    text = ds_config_text(trial.plan)
    if text is None:  # ddp has none; the winner of an earlier start may have left one
        (best / "ds_config.json").unlink(missing_ok=True)
    else:
        write_atomic(best / "ds_config.json", text)
    return best


def _script(directory: StudyDir, trial: Trial) -> str:
    attempt = directory.trial(trial.number).attempt(trial.shown.number if trial.shown else 1).path.resolve()
    ranks, strategy = (trial.plan.ranks, trial.plan.strategy) if trial.plan else (1, "")
    again = shlex.join(
        ["torchrun", f"--nproc-per-node={ranks}", "-m", "train_entry", str(attempt), "--out", "again"]
    )
    return (
        "#!/bin/sh\n"
        f"# The winner of study {directory.path.name}: trial {trial.number}, {strategy}.\n"
        "# Measures it once more, as a trial of its own:\n"
        f"cd {shlex.quote(str(Path.cwd()))}\n"
        f"{reproduce_command(trial.overrides)}\n"
        "# The same job by hand, without the orchestrator, results in ./again:\n"
        f"# {again}\n"
    )
