"""The interface of a cluster: submit, poll, cancel, re-attach. No more, so that backends are easy to add."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from sweeps.machine import Machine
from train_entry.contract import AttemptDir, TrialSpec


class JobState(StrEnum):
    QUEUED = "queued"  # the scheduler has accepted the job, which waits for its nodes
    STARTING = "starting"  # submitted; none of its processes has reported yet
    RUNNING = "running"
    ENDED = "ended"  # every rank's supervisor has written how its rank ended
    LOST = "lost"  # its processes are gone, and not every rank's end is recorded


@dataclass(frozen=True, kw_only=True, slots=True)
class JobHandle:
    """An attempt that was submitted. Everything else about it is in its directory."""

    attempt: AttemptDir
    ranks: int
    slots: tuple[str, ...]
    submitted_at: float


def share_a_node(some: tuple[str, ...], others: tuple[str, ...]) -> bool:
    """True if two trials share a node. Slots are `NODE/SLOT`; slots that name no node are all on one."""
    nodes, other_nodes = ({slot.rpartition("/")[0] for slot in slots} for slots in (some, others))
    return not nodes.isdisjoint(other_nodes)


class Cluster(Protocol):
    @property
    def machine(self) -> Machine: ...

    def free_ranks(self) -> int:
        """Return how many ranks a trial launched now could have; 0 while `parallel` trials are running."""

    def reserve(self, ranks: int) -> tuple[str, ...] | None:
        """Lease slots for a trial of `ranks` ranks; None while too few are free."""

    def has_neighbours(self, slots: tuple[str, ...]) -> bool:
        """True if jobs outside this study may run beside these slots and disturb the trial's timing."""

    def submit(self, attempt: AttemptDir, spec: TrialSpec, slots: tuple[str, ...]) -> JobHandle:
        """Launch the attempt that this directory describes. Return at once."""

    def attach(self, attempt: AttemptDir, ranks: int, slots: tuple[str, ...]) -> JobHandle:
        """Return the handle of an attempt that an earlier orchestrator launched, whatever became of it."""

    def poll(self, handle: JobHandle) -> JobState:
        """Return the job's state. Cheap: the loop calls it several times a second."""

    def cancel(self, *handles: JobHandle) -> list[str]:
        """End every process of these jobs, grandchildren included, and return when they are gone.

        Return a line for each job that may still be there. Such a job does not keep the others from ending.
        """
