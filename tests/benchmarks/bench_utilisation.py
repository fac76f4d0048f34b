"""Print the share of time for which slots are used, compared with a search in batches: `make bench`."""

from __future__ import annotations

from tests.benchmarks.search_study import searched
from tests.benchmarks.simulator.made_up_tables import evenly_long
from tests.benchmarks.simulator.test_utilisation import BY_BASELINES, PLANS, SLOTS, UNIT_S
from train_entry.contract import AttemptKind

LONGER = 3


def test_slots_are_used_while_there_is_something_to_launch() -> None:
    """A search in batches waits for each batch's longest trial. Here the first batch has a long one."""
    batches = -(-PLANS // SLOTS)
    in_batches = (PLANS + LONGER - 1) / (SLOTS * (batches + LONGER - 1))
    print(f"\nin batches of {SLOTS}: {in_batches:.1%} used")
    for seed in range(5):
        cluster = searched(
            evenly_long(UNIT_S, LONGER), seed, BY_BASELINES, parallel=SLOTS, hurries=False
        ).cluster
        until_s = max(job.began_s for job in cluster.ended if job.spec.kind is AttemptKind.FIRST)
        idle_s = cluster.longest_idle_s(until_s)
        print(f"seed {seed}: {cluster.utilisation(until_s):.1%} used, idle at most {idle_s:.2f} s at a time")
        assert cluster.utilisation(until_s) > in_batches
