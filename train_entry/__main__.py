"""Run one rank: `python -m train_entry ATTEMPT_DIR [--out DIR]`.

To run any trial by hand, without the orchestrator:

    torchrun --nproc-per-node N -m train_entry ATTEMPT_DIR --out DIR
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from train_entry.contract import AttemptDir, ContractError, TrialSpec, read_document
from train_entry.main import run_rank
from train_entry.rank import LaunchError, RankInfo


def main() -> int:
    """Run one rank and never return. A wrong launch is refused with one line on stderr and status 2."""
    parser = argparse.ArgumentParser(prog="python -m train_entry", description="Run one rank of a trial.")
    parser.add_argument("attempt", type=Path, help="directory with spec.json and ds_config.json")
    parser.add_argument("--out", type=Path, help="output directory; default: the attempt's own")
    arguments = parser.parse_args()
    source = AttemptDir(arguments.attempt)
    out = AttemptDir(arguments.out or arguments.attempt)
    try:
        spec = _read_spec(source)
        where = RankInfo.from_env(os.environ, spec.plan.ranks)
        _refuse_recorded(out, where.rank)
    except (LaunchError, ContractError) as error:
        print(error, file=sys.stderr)
        return 2
    out.path.mkdir(parents=True, exist_ok=True)
    run_rank(spec, source, out, where)


def _read_spec(source: AttemptDir) -> TrialSpec:
    spec = read_document(source.spec, TrialSpec)
    if spec is None:
        raise LaunchError(f"{source.spec} is missing: give an attempt's directory")
    return spec


def _refuse_recorded(out: AttemptDir, rank: int) -> None:
    """Raise LaunchError if an outcome is already recorded: a second run never overwrites the first."""
    if out.outcome(rank).exists():
        raise LaunchError(f"{out.outcome(rank)} already exists; choose another directory with --out DIR")


if __name__ == "__main__":
    sys.exit(main())
