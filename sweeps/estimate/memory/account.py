"""A plan's memory by component, and its peak. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

# The fitted factors that scale components (fitting.py); other components are counted exactly, from shapes.
ACTIVATIONS = "activations"
LOGITS = "logits"
STEP = "optimizer_step"


@dataclass(frozen=True, kw_only=True, slots=True)
class Component:
    """One kind of tensors that a rank holds at the same time."""

    name: str
    bytes: int
    factor: str = ""  # the fitted factor that scales it, if any


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseMemory:
    """Memory of a rank's device at the worst point of a phase."""

    phase: str
    components: tuple[Component, ...]

    @property
    def total(self) -> int:
        return sum([component.bytes for component in self.components])

    def bytes_of(self, name: str) -> int:
        """Total of all components of that name; 0 if there is none."""
        return sum(component.bytes for component in self.components if component.name == name)


@dataclass(frozen=True, kw_only=True, slots=True)
class StageMemory:
    """The phases of the fullest rank of one pipeline stage."""

    stage: int
    phases: tuple[PhaseMemory, ...]

    @property
    def peak(self) -> PhaseMemory:
        return max(self.phases, key=_total)


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """All memory that a plan needs."""

    stages: tuple[StageMemory, ...]
    context_bytes: int  # on the device, outside of torch's allocator: CUDA's context, kernels, NCCL's buffers
    host_bytes: int  # of all ranks of the fullest node
    nvme_bytes: int  # of all ranks of the fullest node
    gaps: float = 1.0  # relative to the usual fragmentation
    process_bytes: int = 0  # the part of host_bytes that processes take before they train anything

    @property
    def fullest(self) -> StageMemory:
        return max(self.stages, key=_peak_total)

    @property
    def peak_bytes(self) -> int:
        """Bytes allocated on the fullest device at its peak."""
        return self.fullest.peak.total


NOTHING = Component(name="nothing", bytes=0)


def scaled(name: str, count: float, factor: str = "") -> Component:
    """Return a component of a computed size, or NOTHING if it has no bytes."""
    if count < 1:
        return NOTHING
    return Component(name=name, bytes=int(count), factor=factor)


def enlarged(one: PhaseMemory, ratio: float) -> PhaseMemory:
    """Return the phase with all components scaled by `ratio`."""
    parts = [replace(part, bytes=int(part.bytes * ratio)) for part in one.components]
    return PhaseMemory(phase=one.phase, components=tuple([part for part in parts if part.bytes]))


def phase(name: str, held: Iterable[Component], *more: Component) -> PhaseMemory:
    """Return a phase of components held all the time and of `more` held only then; leave out empty ones."""
    return PhaseMemory(phase=name, components=tuple([part for part in (*held, *more) if part.bytes]))


def _total(one: PhaseMemory) -> int:
    return one.total


def _peak_total(one: StageMemory) -> int:
    return one.peak.total
