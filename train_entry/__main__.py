"""Run one rank: `python -m train_entry ATTEMPT_DIR [--out DIR]`.

By hand, without the orchestrator, for any trial:

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
    """Refuse a wrong launch with one line and status 2; otherwise become the rank, and not return."""
    parser = argparse.ArgumentParser(prog="python -m train_entry", description="Run one rank of a trial.")
    parser.add_argument("attempt", type=Path, help="directory with spec.json and ds_config.json")
    parser.add_argument("--out", type=Path, help="where to write; the attempt's own directory by default")
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
        raise LaunchError(f"{source.spec} is missing: give the directory of an attempt")
    return spec


def _refuse_recorded(out: AttemptDir, rank: int) -> None:
    """An outcome is a fact; a second run of the same attempt is another fact, and belongs elsewhere."""
    if out.outcome(rank).exists():
        raise LaunchError(f"{out.outcome(rank)} is recorded already; choose another directory with --out DIR")


if __name__ == "__main__":
    sys.exit(main())
