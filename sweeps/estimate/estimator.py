"""Estimate plans, and correct the estimates by every trial that has ended. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from sweeps.config.schema import GateConfig
from sweeps.estimate.fit import Room, judge
from sweeps.estimate.hardware import Hardware, hardware_of
from sweeps.estimate.memory.account import Memory
from sweeps.estimate.memory.fitting import MemoryObservation, fit_memory
from sweeps.estimate.memory.model import COLD, MemoryFactors, memory_of
from sweeps.estimate.time.fitting import TimeObservation, fit_time
from sweeps.estimate.time.step import COLD as COLD_TIME
from sweeps.estimate.time.step import StepTime, TimeFactors, time_of
from sweeps.machine import Machine
from train_entry.contract import (
    Estimate,
    Failure,
    FailureKind,
    Measurement,
    ModelShape,
    Plan,
    State,
    Trial,
)

MOST_OBSERVATIONS = 100  # the latest ones: fitting more takes longer and changes little


class Estimator:
    """Estimates for one model on one kind of machine. It learns from trials as they end."""

    def __init__(self, model: ModelShape, hardware: Hardware, room: Room, gate: GateConfig) -> None:
        self._model = model
        self._hardware = hardware
        self._room = room
        self._gate = gate
        self._memory_seen: deque[MemoryObservation] = deque(maxlen=MOST_OBSERVATIONS)
        self._time_seen: deque[TimeObservation] = deque(maxlen=MOST_OBSERVATIONS)
        self._is_fitted = True
        self._made: dict[Plan, Estimate] = {}  # with the current factors
        self._memory_factors: MemoryFactors = COLD
        self._time_factors: TimeFactors = COLD_TIME

    @property
    def room(self) -> Room:
        return self._room

    @property
    def observations(self) -> int:
        """Number of trials that the estimates have learned from."""
        return len(self._memory_seen)

    def estimate(self, plan: Plan) -> Estimate:
        """Return the plan's memory, its step time, and whether it fits."""
        self._fit()
        if plan not in self._made:
            memory = memory_of(plan, self._model, self._hardware, self._memory_factors)
            step = time_of(plan, self._model, self._hardware, self._time_factors)
            self._made[plan] = self._record(memory, step)
        return self._made[plan]

    def learn(self, trials: Iterable[Trial]) -> None:
        """Learn from trials that have ended; skip those that tell nothing about memory or time."""
        for trial in trials:
            if trial.plan is None or trial.state is State.REUSED:  # the trial that it reuses has counted
                continue
            match trial.outcome:
                case Measurement() as seen:
                    self._learn_measured(trial, trial.plan, seen)
                case Failure(kind=FailureKind.GPU_OOM):
                    self._learn_oom(trial, trial.plan)

    def imposed_bytes(self, estimate: Estimate | None) -> int | None:
        """Return the limit imposed on torch on each GPU, or None if the GPU itself is the limit."""
        return estimate.reservable_bytes if estimate and self._room.is_imposed else None

    def _fit(self) -> None:
        if self._is_fitted:
            return
        self._memory_factors = fit_memory(tuple(self._memory_seen))
        self._time_factors = fit_time(tuple(self._time_seen))
        self._made.clear()
        self._is_fitted = True

    def _learn_measured(self, trial: Trial, plan: Plan, seen: Measurement) -> None:
        fullest = max(seen.ranks, key=lambda rank: rank.peak.allocated_bytes, default=None)
        self._memory_seen.append(
            MemoryObservation(
                plan=plan,
                model=self._model,
                hardware=self._hardware,
                is_oom=False,
                peak_bytes=seen.peak_bytes,
                limit_bytes=trial.estimate.reservable_bytes if trial.estimate else None,
                reserved_bytes=fullest.steady.reserved_bytes if fullest else None,
                card_bytes=fullest.device_in_use_bytes if fullest else None,
            )
        )
        if not trial.is_shared:  # a neighbour on the node makes it slower
            self._time_seen.append(
                TimeObservation(plan=plan, model=self._model, hardware=self._hardware, step_s=seen.step_s)
            )
        self._is_fitted = False

    def _learn_oom(self, trial: Trial, plan: Plan) -> None:
        self._memory_seen.append(
            MemoryObservation(
                plan=plan,
                model=self._model,
                hardware=self._hardware,
                is_oom=True,
                peak_bytes=None,
                limit_bytes=trial.estimate.reservable_bytes if trial.estimate else None,
            )
        )
        self._is_fitted = False

    def _record(self, memory: Memory, step: StepTime) -> Estimate:
        verdict = judge(memory, self._memory_factors, self._room, self._gate.quantile)
        peak = memory.fullest.peak
        return Estimate(
            fit=verdict.fit,
            why=verdict.why,
            peak_bytes=memory.peak_bytes,
            needed_bytes=verdict.needed_bytes,
            limit_bytes=verdict.limit_bytes,
            reservable_bytes=self._reservable_bytes(memory),
            host_bytes=memory.host_bytes,
            host_limit_bytes=self._room.host_bytes,
            nvme_bytes=memory.nvme_bytes,
            phase=peak.phase,
            components={part.name: peak.bytes_of(part.name) for part in peak.components},
            step_s=step.step_s,
            parts=step.parts,
            tokens_per_s=step.tokens_per_s,
            tokens_per_s_per_gpu=step.tokens_per_s_per_gpu,
            observations=self.observations,
        )

    def _reservable_bytes(self, memory: Memory) -> int | None:
        if self._hardware.is_cpu:
            return None
        # Without the learned factor, so that all trials of a study are held to the same limit.
        context = memory.context_bytes / self._memory_factors.context if self._room.counts_context else 0.0
        return max(0, self._room.device_bytes - round(context))


def hardware_for(machine: Machine) -> Hardware:
    """Return the figures of the machine from which estimates are computed."""
    return hardware_of(
        machine.device_name,
        machine.device,
        machine.ranks_per_node,
        min((gpu.memory_bytes for gpu in machine.gpus), default=machine.host_memory_bytes or 0),
        machine.host_memory_bytes or 0,
    )
