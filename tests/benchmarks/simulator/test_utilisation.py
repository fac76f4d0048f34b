"""With eight slots and trials of different lengths, no slot waits for the longest trial."""

from __future__ import annotations

import pytest

from sweeps.study.loop import POLL_S
from tests.benchmarks.search_study import Ours, searched
from tests.benchmarks.simulator.made_up_tables import evenly_long
from train_entry.contract import AttemptKind

UNIT_S = 40.0
PLANS = 24
SLOTS = 8
BY_SAMPLER = Ours(baselines=False, prior=0, adaptive=False, confirm_best=0, improvement=0.0)
BY_BASELINES = Ours(adaptive=False, confirm_best=0, improvement=0.0)


@pytest.mark.parametrize("ours", [BY_SAMPLER, BY_BASELINES], ids=["sampler", "baselines"])
def test_no_slot_is_idle_for_longer_than_it_takes_to_look(ours: Ours) -> None:
    table = evenly_long(UNIT_S, longer=3)
    study = searched(table, seed=0, ours=ours, parallel=SLOTS, hurries=False)
    jobs = study.cluster.ended
    first = [job for job in jobs if job.spec.kind is AttemptKind.FIRST]  # the others are drift repeats
    last_begin_s = max(job.began_s for job in first)  # after that nothing is left to propose
    idle_s = study.cluster.longest_idle_s(until_s=last_begin_s)
    used = study.cluster.utilisation(until_s=last_begin_s)
    print(f"\n{len(jobs)} trials on {SLOTS} slots: {used:.1%} used, idle at most {idle_s:.2f} s at a time")
    lengths_s = sorted({round(job.ended_s - job.began_s) for job in first})
    assert (len(first), lengths_s) == (PLANS, [UNIT_S, 3 * UNIT_S])
    assert idle_s <= POLL_S + 1e-6
    assert used > 0.99
