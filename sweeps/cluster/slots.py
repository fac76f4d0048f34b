"""Slots of identical nodes: which are free, and where a trial fits. Pure."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """A trial's nodes: as few as hold its ranks, with equally many ranks on each if they divide."""

    ranks: int
    nodes: int

    @classmethod
    def of(cls, ranks: int, ranks_per_node: int) -> Layout:
        return cls(ranks=ranks, nodes=math.ceil(ranks / ranks_per_node))

    @property
    def tasks_per_node(self) -> int:
        return math.ceil(self.ranks / self.nodes)

    @property
    def is_even(self) -> bool:
        return self.ranks % self.nodes == 0


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotTable:
    """All slots, named GROUPnode-NODE/SLOT. A trial lies in one group: on part of a node, or whole nodes."""

    groups: tuple[str, ...]
    nodes: int  # of each group
    per_node: int

    def free_ranks(self, taken: Collection[str]) -> int:
        """The most ranks that one trial could have now."""
        free = [[len(slots) for slots in nodes] for nodes in self._free(taken)]
        return max(max([sum(n for n in nodes if n == self.per_node), *nodes]) for nodes in free)

    def reserve(self, ranks: int, taken: Collection[str]) -> tuple[str, ...] | None:
        """Return slots for `ranks` ranks; None while too few are free."""
        layout = Layout.of(ranks, self.per_node)
        wanted = self.per_node if layout.nodes > 1 else ranks
        for nodes in self._free(taken):
            found = [slots[:wanted] for slots in nodes if len(slots) >= wanted][: layout.nodes]
            if len(found) == layout.nodes:
                return tuple(slot for slots in found for slot in slots)
        return None

    def _free(self, taken: Collection[str]) -> list[list[list[str]]]:
        """The free slots, by group and node."""
        return [
            [
                [name for slot in range(self.per_node) if (name := f"{group}node-{node}/{slot}") not in taken]
                for node in range(self.nodes)
            ]
            for group in self.groups
        ]
