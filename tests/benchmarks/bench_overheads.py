"""Print the time that the orchestrator itself takes: `make bench`. Jobs are scripted and time is fake.

No time is asserted. Compare only lines of the same run, not of different machines.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from sweeps.config.schema import SearchConfig
from sweeps.search.sampler import Sampler
from sweeps.search.verdicts import HOLDS, Lesson
from sweeps.space.dimensions import Choices, Dimension, Interval, SearchSpace
from sweeps.study.limits import Limits
from tests.support.studies import Bench

TRIALS = (50, 200, 400)
WIDE = (
    "strategy=zero1,zero2,zero3",
    "micro_batch=1,2,4",
    "zero.reduce_bucket_size=tag(log,interval(5e7,1e9))",
)
ASKS = {"random": 200, "tpe": 200, "gp": 50}
SPACE = SearchSpace(
    dimensions=(
        Dimension(key="strategy", text="", range=Choices(values=("ddp", "zero1", "zero2", "zero3"))),
        Dimension(key="micro_batch", text="", range=Choices(values=(1, 2, 4, 8, 16))),
        Dimension(
            key="zero.reduce_bucket_size",
            text="",
            range=Interval(low=5e7, high=1e9, log=True, integral=True, digits=2),
        ),
    )
)


def test_the_loop_costs_milliseconds_a_trial(bench: Callable[..., Bench]) -> None:
    """Time ask, plan, write, submit, collect and tell, for the first trials of a study and for later ones."""
    study, done = bench(), 0
    print("\ntrials so far ms per trial  ms per trial at a restart")
    for total in TRIALS:
        began = time.perf_counter()
        study.start(*WIDE, limits=Limits(trials=total, hours=None, retries=1))
        spent = time.perf_counter() - began
        began = time.perf_counter()
        study.start(*WIDE, limits=Limits(trials=total, hours=None, retries=1))
        again = time.perf_counter() - began
        print(f"{total:13d} {1e3 * spent / (total - done):12.1f} {1e3 * again / total:27.2f}")
        done = total
    assert len(study.trials) == TRIALS[-1]


@pytest.mark.parametrize("sampler", ASKS)
def test_a_proposal_costs(sampler: str) -> None:
    asked = Sampler(SPACE, SearchConfig(sampler=sampler))
    spent: list[float] = []
    for number in range(ASKS[sampler]):
        began = time.perf_counter()
        proposal = asked.ask()
        spent.append(time.perf_counter() - began)
        assert proposal is not None
        value = float(number % 7)
        asked.tell(
            proposal, Lesson(point=proposal.point, scores=(value,), legal=HOLDS, memory=HOLDS, trained=HOLDS)
        )
    last = sorted(spent[-20:])
    print(f"\n{sampler}: {1e3 * last[10]:.1f} ms per proposal (median of the last 20 of {ASKS[sampler]})")
