"""Memory by component: what a plan needs, where it peaks, and of what that peak is made. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

# Which fitted factor scales a component (memory_fit.py); all others are counted exactly, from shapes.
ACTIVATIONS = "activations"
LOGITS = "logits"
STEP = "optimizer_step"


@dataclass(frozen=True, kw_only=True, slots=True)
class Component:
    """One kind of tensors that a rank holds at a time."""

    name: str
    bytes: int
    factor: str = ""  # the fitted factor it is scaled by, if any


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseMemory:
    """What a rank's device holds at the worst point of a phase."""

    phase: str
    components: tuple[Component, ...]

    @property
    def total(self) -> int:
        return sum([component.bytes for component in self.components])

    def bytes_of(self, name: str) -> int:
        """Of all components of that name; 0: there is none."""
        return sum(component.bytes for component in self.components if component.name == name)


@dataclass(frozen=True, kw_only=True, slots=True)
class StageMemory:
    """Phases of the fullest rank of one pipeline stage."""

    stage: int
    phases: tuple[PhaseMemory, ...]

    @property
    def peak(self) -> PhaseMemory:
        return max(self.phases, key=_total)


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """All that a plan needs."""

    stages: tuple[StageMemory, ...]
    context_bytes: int  # on the device, outside of torch's allocator: CUDA's context, kernels, NCCL's buffers
    host_bytes: int  # of all ranks of the fullest node
    nvme_bytes: int  # of all ranks of the fullest node
    gaps: float = 1.0  # of the usual fragmentation
    process_bytes: int = 0  # of host_bytes, what processes take that train nothing

    @property
    def fullest(self) -> StageMemory:
        return max(self.stages, key=_peak_total)

    @property
    def peak_bytes(self) -> int:
        """Allocated on the fullest device, at its worst."""
        return self.fullest.peak.total


NOTHING = Component(name="nothing", bytes=0)


def scaled(name: str, count: float, factor: str = "") -> Component:
    """A component of a computed size; one of none is the same whatever its name."""
    if count < 1:
        return NOTHING
    return Component(name=name, bytes=int(count), factor=factor)


def enlarged(one: PhaseMemory, ratio: float) -> PhaseMemory:
    """With all components so many times as large."""
    parts = [replace(part, bytes=int(part.bytes * ratio)) for part in one.components]
    return PhaseMemory(phase=one.phase, components=tuple([part for part in parts if part.bytes]))


def phase(name: str, held: Iterable[Component], *more: Component) -> PhaseMemory:
    """A phase: what is held all the time, and what only then. Empty components are left out."""
    return PhaseMemory(phase=name, components=tuple([part for part in (*held, *more) if part.bytes]))


def _total(one: PhaseMemory) -> int:
    return one.total


def _peak_total(one: StageMemory) -> int:
    return one.peak.total
