"""Remedies for a trial that ran out of memory, in the order in which an experienced engineer tries them."""

from sweeps.search.remedies.advise import (
    ChangedPlan,
    Expect,
    Grounds,
    Option,
    PlanOf,
    advise,
    known,
    nothing_left,
    options,
    under_way,
)
from sweeps.search.remedies.base import Changes, Remedy, Step
from sweeps.search.remedies.order import ALL, remedies_for

__all__ = [
    "ALL",
    "ChangedPlan",
    "Changes",
    "Expect",
    "Grounds",
    "Option",
    "PlanOf",
    "Remedy",
    "Step",
    "advise",
    "known",
    "nothing_left",
    "options",
    "remedies_for",
    "under_way",
]
