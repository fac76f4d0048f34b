from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.examples import a_plan, a_trial_spec
from tests.train_entry.conftest import StartRanks, tiny_plan, tiny_spec, write_attempt, zero_plan
from train_entry.contract import (
    AttemptDir,
    MeasureSpec,
    RankMeasurement,
    StepMetrics,
    TimingEnd,
    read_lines,
)
from train_entry.engines.base import Held, Part
from train_entry.measure.clock import PartTime, StepClock, Timings, distance, medians
from train_entry.measure.stopping import half_width_s
from train_entry.progress import Heartbeats


def micro_step(scale: float, exchange_s: float = 0.0) -> list[PartTime]:
    seconds = {
        Part.EXCHANGE: exchange_s,
        Part.FETCH: 1,
        Part.FORWARD: 10,
        Part.BACKWARD: 100,
        Part.UPDATE: 1000,
    }
    return [(part, scale * spent) for part, spent in seconds.items()]


def test_parts_are_summed_over_micro_batches_and_the_middle_step_counts() -> None:
    split = medians([micro_step(1) * 2, micro_step(2) + micro_step(3), micro_step(50) * 2])
    assert split is not None
    assert (split.forward_s, split.backward_s, split.update_s) == (50, 500, 5000)


def test_the_local_part_ends_with_the_first_forward_pass() -> None:
    split = medians([micro_step(2) + micro_step(99)])
    assert split is not None
    assert split.local_s == 22


def test_waiting_for_another_stage_is_a_part_of_its_own() -> None:
    split = medians([micro_step(1, exchange_s=7) + micro_step(1, exchange_s=3)])
    assert split is not None
    assert (split.exchange_s, split.local_s) == (10, 11)


def test_without_split_steps_there_is_no_split() -> None:
    assert medians([]) is None


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of one rank."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_the_distance_of_two_models_goes_over_all_parameters_once() -> None:
    before = [Held(torch.zeros(2), 1), Held(torch.zeros(1, dtype=torch.bfloat16), 4)]
    after = [
        Held(torch.tensor([2.0, 3.0]), 1),
        Held(torch.full((1,), 12.0, dtype=torch.bfloat16), 4),  # this rank contributes a quarter of it
    ]
    assert distance(before, after, torch.device("cpu")) == pytest.approx(7)


# ---------------------------------------------------------------- when timing ends

FASTER_THAN_ANY_S = -1.0  # no step beats this, however noisy the machine is


class Nothing:
    """An engine that does nothing. Implements TrainEngine."""

    def step(self, batches: Iterator[torch.Tensor], lap: Callable[[Part], None]) -> torch.Tensor:
        for part in (Part.FETCH, Part.FORWARD, Part.BACKWARD, Part.UPDATE):
            lap(part)
        return torch.tensor(2.0)

    def lr(self) -> float:
        return 1e-3

    def grad_norm(self) -> float | None:
        return None

    def held(self) -> list[Held]:
        return []


@pytest.fixture
def timed(alone: None, tmp_path: Path) -> Callable[..., tuple[Timings, list[StepMetrics]]]:
    """Run one warm-up step, at most 10 timed steps and two split steps of an engine that does nothing."""

    def run(**measure: Any) -> tuple[Timings, list[StepMetrics]]:
        asked = MeasureSpec(**{"warmup_steps": 1, "steps": 10, "split_steps": 2, **measure})
        out = AttemptDir(tmp_path)
        out.metrics.unlink(missing_ok=True)
        spec = a_trial_spec(plan=a_plan(ranks=1), measure=asked)
        clock = StepClock(Nothing(), iter(()), spec, torch.device("cpu"), Heartbeats(out, 0))
        clock.first_step()
        return clock.remaining_steps(), list(read_lines(out.metrics, StepMetrics))

    return run


Timed = Callable[..., tuple[Timings, list[StepMetrics]]]


def test_without_a_reason_to_end_all_steps_are_timed(timed: Timed) -> None:
    seen, steps = timed()
    assert (seen.ended, len(seen.step_s), seen.health) == (TimingEnd.CAP, 10, None)
    assert [step.timed for step in steps] == [False, *[True] * 10, False, False]
    assert seen.half_width_s == half_width_s(seen.step_s, 0.95)


def test_a_known_step_time_ends_timing_and_steps_are_still_taken_apart(timed: Timed) -> None:
    seen, steps = timed(precision=1e6)
    assert (seen.ended, len(seen.step_s)) == (TimingEnd.PRECISE, 4)
    assert [step.timed for step in steps] == [False, *[True] * 4, False, False]
    assert [step.step_s for step in steps if step.timed] == list(seen.step_s)
    assert seen.split is not None


def test_a_futile_trial_is_not_taken_apart(timed: Timed) -> None:
    seen, steps = timed(beat_step_s=FASTER_THAN_ANY_S, min_steps=6, precision=0.0)
    assert (seen.ended, len(seen.step_s), seen.split) == (TimingEnd.FUTILE, 6, None)
    assert len(steps) == 7


def test_an_orchestrator_that_asks_is_heard_at_the_next_look(timed: Timed, tmp_path: Path) -> None:
    AttemptDir(tmp_path).stop.touch()
    seen, _ = timed(min_steps=5, look_every=1)
    assert (seen.ended, len(seen.step_s)) == (TimingEnd.ASKED, 5)


def test_a_first_step_that_is_timed_counts(timed: Timed) -> None:
    seen, steps = timed(warmup_steps=0, precision=1e6)
    assert (len(seen.step_s), [step.timed for step in steps]) == (4, [True] * 4 + [False] * 2)


@pytest.fixture(scope="module")
def ended(
    start_ranks: StartRanks, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[RankMeasurement]]:
    """Measurements of two ranks for each of five plans, whose timing may end for different reasons."""
    asked = MeasureSpec(warmup_steps=1, steps=10, split_steps=1)
    precise = replace(asked, precision=1e6)
    futile = replace(asked, beat_step_s=FASTER_THAN_ANY_S)
    specs = {
        "precise": tiny_spec(zero_plan(2), measure=precise),
        "futile": tiny_spec(tiny_plan(), measure=futile),
        "asked": tiny_spec(zero_plan(3), measure=asked),
        "not asked": tiny_spec(zero_plan(3), measure=asked),
        "staged": tiny_spec(zero_plan(1, pipeline=2), measure=precise),
    }
    seen = {}
    for name, spec in specs.items():
        attempt = write_attempt(tmp_path_factory.mktemp("ended"), spec)
        if name == "asked":
            attempt.stop.touch()
        job = start_ranks(attempt, 2, "train_entry", str(attempt.path))
        assert job.wait() == [0, 0], job.logs
        seen[name] = [found for rank in (0, 1) if isinstance(found := job.outcome(rank), RankMeasurement)]
    return seen


@pytest.mark.slow
@pytest.mark.jobs
def test_real_ranks_end_together_and_for_the_same_reason(ended: dict[str, list[RankMeasurement]]) -> None:
    assert {
        name: [(rank.ended, len(rank.step_s), rank.split is None) for rank in ranks]
        for name, ranks in ended.items()
    } == {
        "precise": [(TimingEnd.PRECISE, 4, False)] * 2,
        "futile": [(TimingEnd.FUTILE, 4, True)] * 2,
        "asked": [(TimingEnd.ASKED, 4, False)] * 2,
        "not asked": [(TimingEnd.CAP, 10, False)] * 2,
        "staged": [(TimingEnd.PRECISE, 4, False)] * 2,
    }


@pytest.mark.slow
@pytest.mark.jobs
def test_what_stages_say_of_their_common_step_is_the_same(ended: dict[str, list[RankMeasurement]]) -> None:
    first, last = ended["staged"]
    longest = [max(both) for both in zip(first.step_s, last.step_s, strict=True)]
    assert first.step_s_half_width == last.step_s_half_width == pytest.approx(half_width_s(longest, 0.95))
