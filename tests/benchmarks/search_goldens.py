"""Record the course of searches, one per line: the proposals, the launches and the winner.

    python -m tests.benchmarks.search_goldens           # rewrites tests/data/goldens/search.jsonl

A line depends only on the code: jobs and time are scripted, and every random draw is seeded. A change that is
not meant to affect the search must not change the file.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

from tests.benchmarks.search_study import VARIANTS, Searched, searched
from tests.benchmarks.simulator.tables import recorded_tables
from tests.support.paths import DATA
from train_entry.contract import Scalar, Trial

GOLDENS = DATA / "goldens" / "search.jsonl"
# Seeds per method. The variants cover all ways to propose: most searches end before the sampler proposes.
SEEDS = {
    "shardsweep": 20,
    "  with the GP": 3,
    "  without the baselines": 5,
    "  without the prior": 5,
    "  unconfirmed": 3,
    "  sampler and gate alone": 5,
}

Search = tuple[str, str, int]  # method, table, seed


def searches() -> Iterator[Search]:
    for method, seeds in SEEDS.items():
        for table in recorded_tables():
            yield from ((method, table, seed) for seed in range(seeds))


def course_line(search: Search) -> str:
    """Run one search and return its course as a line of JSON."""
    method, table, seed = search
    found = searched(recorded_tables()[table], seed, VARIANTS[method])
    return json.dumps(
        {
            "method": method.strip(),
            "table": table,
            "seed": seed,
            "proposed": [_proposal(trial) for trial in found.trials],
            "launched": [
                f"{job.spec.trial} {job.spec.kind} {len(job.run.timed_s)}" for job in found.cluster.ended
            ],
            "winner": _winner(found),
            "reason": found.reason.name,
        }
    )


def _proposal(trial: Trial) -> str:
    knobs = " ".join(f"{key}={_text(value)}" for key, value in trial.values.items())
    return f"{trial.number} {trial.origin} {trial.state}: {knobs}"


def _text(value: Scalar) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _winner(found: Searched) -> list[str]:
    if found.winner is None:
        return []
    said = found.winner
    return [f"{place.trial} {place.value:.4f} x{place.repeats}" for place in said.standings] + [
        f"winner {said.trial}, tied {list(said.tied)}"
    ]


def lines() -> Iterator[str]:
    """Run all searches, each on its own core, and yield their lines."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(course_line, list(searches()))


if __name__ == "__main__":
    GOLDENS.write_text("".join(f"{line}\n" for line in lines()), encoding="utf-8")
