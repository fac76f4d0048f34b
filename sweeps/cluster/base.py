"""What the loop asks of a cluster: submit, poll, cancel, re-attach. Nothing more, so that others fit in."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from sweeps.machine import Machine
from train_entry.contract import AttemptDir, TrialSpec


class JobState(StrEnum):
    QUEUED = "queued"  # the scheduler has taken it, and waits for its nodes
    STARTING = "starting"  # submitted; none of its processes has reported yet
    RUNNING = "running"
    ENDED = "ended"  # every rank's supervisor has written how its rank ended
    LOST = "lost"  # gone without a word


@dataclass(frozen=True, kw_only=True, slots=True)
class JobHandle:
    """An attempt that was submitted. Everything else about it is in its directory."""

    attempt: AttemptDir
    ranks: int
    slots: tuple[str, ...]
    submitted_at: float


def share_a_node(some: tuple[str, ...], others: tuple[str, ...]) -> bool:
    """Whether two trials run on one node, by their slots: `NODE/SLOT`, or all on one where none is named."""
    nodes, other_nodes = ({slot.rpartition("/")[0] for slot in slots} for slots in (some, others))
    return not nodes.isdisjoint(other_nodes)


class Cluster(Protocol):
    @property
    def machine(self) -> Machine: ...

    def free_ranks(self) -> int:
        """How many ranks a trial launched now could have; 0 while enough trials are running."""

    def reserve(self, ranks: int) -> tuple[str, ...] | None:
        """Lease slots for a trial of so many ranks; None while there are not enough free ones."""

    def has_neighbours(self, slots: tuple[str, ...]) -> bool:
        """Whether trials of other studies run beside ours and these slots, and so disturb their timing."""

    def submit(self, attempt: AttemptDir, spec: TrialSpec, slots: tuple[str, ...]) -> JobHandle:
        """Launch what the attempt directory holds. Returns at once."""

    def attach(self, attempt: AttemptDir, ranks: int, slots: tuple[str, ...]) -> JobHandle:
        """The handle of an attempt that an earlier orchestrator launched, whatever became of it."""

    def poll(self, handle: JobHandle) -> JobState:
        """Where the job stands. Cheap: called several times a second."""

    def cancel(self, *handles: JobHandle) -> list[str]:
        """End every process of these jobs, grandchildren included; returns when they are gone.

        A line for each that may still be there: one that cannot be ended keeps none of the others.
        """
