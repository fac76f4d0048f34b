"""One rank of a trial, from start to outcome. Read `prepare` and `measure_steps` from top to bottom."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from train_entry.contract import (
    AttemptDir,
    Phase,
    RankMeasurement,
    RankOutcome,
    TrialSpec,
    dump,
    write_atomic,
)
from train_entry.failures import failure_from
from train_entry.progress import Heartbeats
from train_entry.rank import RankInfo, dump_stacks_on_signal, prepare_process, process_age_s
from train_entry.scratch import own_nvme_path

if TYPE_CHECKING:
    import torch

    from train_entry.engines.base import TrainEngine
    from train_entry.measure.memory import MemoryMeter


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """Everything that a rank needs to train."""

    engine: TrainEngine
    batches: Iterator[torch.Tensor]
    device: torch.device
    meter: MemoryMeter
    parameters: int


def run_rank(spec: TrialSpec, source: AttemptDir, out: AttemptDir, where: RankInfo) -> NoReturn:
    """Train as specified, write this rank's outcome to `out`, and exit: with status 1 after a failure."""
    dump_stacks_on_signal(out.stacks(where.rank))
    progress = Heartbeats(out, where.rank)
    outcome: RankOutcome
    try:
        outcome = train(spec, source, where, progress)
        status = 0
    except Exception as error:  # the outermost level: every error becomes a record
        outcome = failure_from(error, where.rank, progress.phase)
        print(outcome.evidence, file=sys.stderr)
        status = 1
    write_atomic(out.outcome(where.rank), dump(outcome))
    if status == 0:
        leave_peers()
    leave(status, out.stacks(where.rank))


def train(spec: TrialSpec, source: AttemptDir, where: RankInfo, progress: Heartbeats) -> RankMeasurement:
    """Run the phases of a rank, in order. Any exception is a failure in the phase that was reached."""
    with contextlib.ExitStack() as held:  # releases what would outlive the process, however the run ends
        ready = prepare(spec, source, where, progress, held)
        return measure_steps(ready, spec, where, progress)


def measure_steps(ready: Ready, spec: TrialSpec, where: RankInfo, progress: Heartbeats) -> RankMeasurement:
    """Run the first step and the remaining steps, and return this rank's measurement."""
    from train_entry.measure import (
        clock,
        devices,  # not at module level: they import torch, and that import belongs to a phase
    )

    startup = ready.meter.take()

    progress.enter(Phase.FIRST_STEP)
    step_clock = clock.StepClock(ready.engine, ready.batches, spec, ready.device, progress)
    step_clock.first_step()
    first_step = ready.meter.take()
    startup_s = process_age_s()
    rest()

    progress.enter(Phase.STEPS)
    timings = step_clock.remaining_steps()

    progress.enter(Phase.REPORT)
    steady = ready.meter.take()
    in_use_bytes, total_bytes = ready.meter.in_use_bytes()
    device_name = devices.name_of(ready.device)
    return RankMeasurement(
        rank=where.rank,
        host=socket.gethostname(),
        device_name=device_name,
        parameters=ready.parameters,
        memory_kind=ready.meter.kind,
        startup=startup,
        first_step=first_step,
        steady=steady,
        device_in_use_bytes=in_use_bytes,
        device_total_bytes=total_bytes,
        peak_flops_per_s=devices.peak_flops_per_s(device_name, spec.plan.precision),
        step_s=timings.step_s,
        split=timings.split,
        startup_s=startup_s,
        host_peak_bytes=ready.meter.host_peak_bytes(),
        ended=timings.ended,
        step_s_half_width=timings.half_width_s,
        health=timings.health,
    )


def rest() -> None:
    """Exclude all objects that start-up created from garbage collection, for every strategy alike.

    Collecting them takes half a second, which would fall into some timed step.
    """
    gc.collect()
    gc.freeze()


def prepare(
    spec: TrialSpec, source: AttemptDir, where: RankInfo, progress: Heartbeats, held: contextlib.ExitStack
) -> Ready:
    """Do everything before the first step. Resources to release at the end are entered into `held`."""
    plan = spec.plan

    progress.enter(Phase.IMPORTS)
    prepare_process(where, spec.device, plan.expandable_segments)
    from train_entry import data  # these import torch and transformers, which takes seconds
    from train_entry.engines import choose
    from train_entry.measure import memory
    from train_entry.model import build

    backend = choose.backend_for(plan)
    device = where.device(spec.device)
    memory.hold_to(spec.memory_limit_bytes, device)
    meter = memory.meter_for(device)

    progress.enter(Phase.RENDEZVOUS)
    backend.join_ranks(choose.collectives_for(device), where)

    progress.enter(Phase.MODEL)
    written = json.loads(source.ds_config.read_text()) if source.ds_config.exists() else {}
    ds_config = held.enter_context(own_nvme_path(written, f"{spec.study}-{spec.trial}-rank{where.rank}"))
    sharding = choose.sharding_for(plan, ds_config, device, where.rank)
    net = build.build_model(spec.model, plan, device, sharding, progress.beat)
    parameters = build.count_over_ranks(net, plan, device)

    progress.enter(Phase.DATA)
    tokens = data.load_tokens(spec.data, spec.model, plan.seed, progress.beat)
    batches = data.micro_batches(data.Windows(tokens, plan), plan, plan.coordinates(where.rank).data)

    progress.enter(Phase.ENGINE)
    opened = backend.open_engine(net, plan, ds_config, device)
    return Ready(engine=opened, batches=batches, device=device, meter=meter, parameters=parameters)


def leave_peers() -> None:
    """Destroy the process group. Not after a failure: that could wait for peers that are gone."""
    import torch.distributed as dist

    with contextlib.suppress(RuntimeError):  # the measurement is recorded: an error no longer matters
        dist.destroy_process_group()


def leave(status: int, stacks: Path) -> NoReturn:
    """End the process at once.

    The interpreter's normal exit runs clean-up code of DeepSpeed, NCCL and torch, which can hang.
    """
    if stacks.exists() and stacks.stat().st_size == 0:
        stacks.unlink()  # no stacks were dumped
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
