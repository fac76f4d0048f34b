"""Print the gap between two trials in a held allocation of a real Slurm: `make bench`. Asserts no time."""

from __future__ import annotations

import statistics
from itertools import pairwise

import pytest

from tests.slurm.conftest import TINY, SlurmLine
from train_entry.contract import JobRecord, State, StudyDir, read_document

pytestmark = pytest.mark.slurm

STUDY = ("-m", *TINY, "cluster.hold=true", "ranks=1", "cluster.gpus_per_node=1", "study=x")
SPACE = ("strategy=ddp", "lr.base=1e-4,2e-4,3e-4,4e-4")


def test_the_gap_between_two_trials(line: SlurmLine) -> None:
    done = line.run(*STUDY, *SPACE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [trial.state for trial in line.trials()] == [State.MEASURED] * 4
    spans = []
    for trial in line.trials():
        place = StudyDir(line.studies / "x").trial(trial.number).attempt(1)
        job = read_document(place.job, JobRecord)
        assert job is not None
        spans.append((job.started_at, place.exit(0).stat().st_mtime))
    gaps = [begun - ended for (_, ended), (begun, _) in pairwise(spans)]
    print(f"\nfrom a trial's end to the start of the next: {statistics.median(gaps):.1f} s", end=" ")
    print(f"({', '.join(f'{gap:.1f}' for gap in gaps)}); one wait in the queue")
