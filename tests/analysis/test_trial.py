"""One trial in full: what a person reads after measuring one configuration."""

from __future__ import annotations

import io
from typing import Any

from analysis.row import CardHealth, TrialRow
from analysis.trial import show_trial
from tests.support.estimates import a_refused_trial, an_estimate, too_large
from tests.support.examples import a_measured_trial, a_measurement, a_plan, a_rank_measurement
from train_entry.contract import (
    Attempt,
    AttemptKind,
    Elapsed,
    Estimate,
    Fit,
    MemoryKind,
    Origin,
    StepSplit,
    TimingEnd,
    Trial,
)


def shown(**changes: Any) -> str:
    """A trial measured on a GPU of 80 GiB."""
    rank = a_rank_measurement(
        memory_kind=MemoryKind.DEVICE, device_in_use_bytes=6 * 2**30, device_total_bytes=80 * 2**30
    )
    trial = a_measured_trial(outcome=a_measurement(ranks=(rank,), **changes))
    row = TrialRow(number=1, state=trial.state, origin=trial.origin, strategy="zero2_offload")
    stream = io.StringIO()
    show_trial(trial, row, stream)
    return stream.getvalue()


def test_memory_of_the_card_and_of_the_host_stand_apart() -> None:
    text = shown(host_peak_bytes=9 * 2**30)
    assert "peak memory     3.00 GiB allocated on rank 0" in text
    assert "4.00 GiB reserved; 6.00 of 80.00 GiB in use on the GPU" in text
    assert "host memory     9.00 GiB at most, all ranks of the fullest node" in text


def test_a_record_from_before_host_memory_was_counted_says_nothing_of_it() -> None:
    assert "host memory" not in shown(host_peak_bytes=0)


# ---------------------------------------------------------------- a model that is divided


def split(local_s: float, exchange_s: float = 0.0) -> StepSplit:
    return StepSplit(local_s=local_s, forward_s=0.1, backward_s=0.2, update_s=0.03, exchange_s=exchange_s)


def lines(splits: list[StepSplit | None], seen: dict[str, Any], **plan: Any) -> list[str]:
    """Return the printed lines of a trial on as many ranks as there are splits."""
    ranks = tuple(a_rank_measurement(rank=rank, split=of_rank) for rank, of_rank in enumerate(splits))
    outcome = a_measurement(ranks=ranks, **seen)
    trial = a_measured_trial(outcome=outcome, plan=a_plan(ranks=len(ranks), **plan))
    row = TrialRow(number=1, state=trial.state, origin=trial.origin, strategy="tp2_pp2")
    stream = io.StringIO()
    show_trial(trial, row, stream)
    return stream.getvalue().splitlines()


def test_a_hybrid_says_how_work_is_divided_and_what_that_costs() -> None:
    seen = {"bubble": 0.3125, "tensor_volume_bytes": 3 * 2**29}
    text = lines([None] * 8, seen, tensor=2, pipeline=2)
    pipeline = "pipeline        2 stages, 4 micro-batches a step: ranks wait "
    assert f"{pipeline}20.0% of forward and backward at best, 31.2% as measured" in text
    assert "tensor          2 ranks share each matrix: each sends 1.50 GiB for that in a step" in text
    assert "samples         2 copies of the model: each sees 16 of the 32 sequences of a step" in text


def test_a_bubble_that_was_not_measured_is_left_out() -> None:
    text = "\n".join(lines([None, None], {}, pipeline=2))
    assert "ranks wait 11.1% of forward and backward at best\n" in text  # (2 - 1) / (8 + 2 - 1)
    assert "samples" not in text  # there is one copy
    assert "tensor" not in text


def test_a_small_volume_is_in_mib() -> None:
    text = lines([None, None], {"tensor_volume_bytes": 3 * 2**19}, tensor=2)
    assert "tensor          2 ranks share each matrix: each sends 1.50 MiB for that in a step" in text


def test_a_model_that_is_not_divided_says_nothing_of_it() -> None:
    text = "\n".join(lines([split(0.01)] * 4, {}))
    assert [word for word in ("pipeline", "tensor", "samples", "exchange", "stage") if word in text] == []
    assert "  of which      forward 100.0, backward 200.0, update 30.0 ms (timed apart)\n" in text


def test_a_pipeline_is_taken_apart_stage_by_stage() -> None:
    text = lines([split(0.01, exchange_s=0.004), split(0.05, exchange_s=0.007)], {}, pipeline=2)
    parts = "forward 100.0, backward 200.0, exchange"
    assert f"  of which      stage 0: {parts} 4.0, update 30.0 ms (timed apart)" in text
    assert f"                stage 1: {parts} 7.0, update 30.0 ms (timed apart)" in text
    assert [line for line in text if "slowest" in line] == []  # each stage has work of its own


def test_ranks_are_compared_with_those_of_their_stage() -> None:
    splits: list[StepSplit | None] = [split(0.010), split(0.012), split(0.050), split(0.045)]
    (line,) = [line for line in lines(splits, {}, pipeline=2) if "slowest" in line]
    behind = "1.20 times that of the fastest rank with the same work"
    assert line == f"  slowest rank  rank 1: 12.0 ms to the end of its first forward pass, {behind}"


# ---------------------------------------------------------------- what was expected of it


def expected(trial: Trial) -> list[str]:
    """The line on what was expected, and the one that follows it."""
    row = TrialRow(number=1, state=trial.state, origin=trial.origin, strategy="zero2")
    stream = io.StringIO()
    show_trial(trial, row, stream)
    text = stream.getvalue().splitlines()
    places = [place for place, line in enumerate(text) if line.startswith("estimate")]
    return [line for place in places for line in text[place : place + 2]]


def measured_after(estimate: Estimate | None, **changes: Any) -> Trial:
    """3 GiB and 250 ms."""
    outcome = a_measurement(ranks=(a_rank_measurement(),))
    return a_measured_trial(estimate=estimate, outcome=outcome, **changes)


def test_what_was_expected_stands_below_what_was_measured_with_the_error() -> None:
    line, after = expected(measured_after(an_estimate(observations=4)))
    assert (
        line == "estimate        peak 3.30 GiB (+10.0%), step 300.0 ms (+20.0%), from formulas and 4 trials"
    )
    assert after.startswith("run it again: ")


def test_a_step_that_was_timed_beside_another_trial_is_not_compared() -> None:
    line, _ = expected(measured_after(an_estimate(), is_shared=True))
    assert line == "estimate        peak 3.30 GiB (+10.0%), step 300.0 ms, from formulas alone"


def test_a_plan_that_was_launched_in_spite_of_doubts_says_so() -> None:
    estimate = too_large(fit=Fit.BORDERLINE, observations=1)
    line, doubt = expected(measured_after(estimate))
    assert line.endswith("from formulas and 1 trial")
    assert doubt.split(": ", 1) == [f"{'':<16}borderline", "needs 50.00 GiB (first_step) of 40.00 GiB, H100"]


def test_a_trial_that_was_not_launched_shows_its_estimate() -> None:
    line, doubt = expected(a_refused_trial(1))
    assert line == "estimate        peak 45.00 GiB, step 300.0 ms, from formulas alone"
    assert doubt.strip().startswith("cannot fit: needs 50.00 GiB")


def test_a_trial_without_an_estimate_expects_nothing() -> None:
    assert expected(measured_after(None)) == []


# ---------------------------------------------------------------- a trial of a search


def alone(row_changes: dict[str, Any] | None = None, **seen: Any) -> str:
    """Return the estimate's lines of a trial that the loader has read."""
    trial = a_measured_trial(outcome=a_measurement(ranks=(a_rank_measurement(),), **seen))
    row = TrialRow(
        number=1, state=trial.state, strategy="zero2", **{"origin": trial.origin, **(row_changes or {})}
    )
    stream = io.StringIO()
    show_trial(trial, row, stream)
    return stream.getvalue()


def test_an_early_end_of_timing_says_why_and_what_it_spared() -> None:
    text = alone(ended=TimingEnd.PRECISE, spared_steps=12, relative_error=0.0042)
    assert "over 10 steps, accurate to 0.42%; as precise as asked, 12 steps skipped" in text
    assert "stopped: slower than the best, 9 steps skipped" in alone(ended=TimingEnd.FUTILE, spared_steps=9)
    assert "interquartile range 2.0%, over 10 steps\n" in alone()


def test_cards_that_were_slowed_are_told_with_clocks_and_temperature() -> None:
    cards = CardHealth(
        throttled=("sw_power_cap",), clock_mhz=1410, max_clock_mhz=1980, temperature_c=87, power_w=640.4
    )
    text = alone({"cards": cards})
    assert "GPUs            1,410 of 1,980 MHz, the slowest; up to 87 °C; 640 W on average" in text
    assert "; slowed by sw_power_cap" in text
    assert "cards" not in alone()


def test_a_trial_of_the_baselines_says_so() -> None:
    baseline = {"origin": Origin.BASELINE, "baseline": "zero2 x4"}
    assert alone(baseline).startswith("trial 0001 (zero2): measured (baseline)\n")


def test_a_trial_of_a_scheduler_says_where_its_time_went() -> None:
    seen = a_measurement(ranks=(a_rank_measurement(),))
    elapsed = Elapsed(queue_s=61.0, startup_s=32.0, run_s=18.0)
    attempt = Attempt(number=1, kind=AttemptKind.FIRST, outcome=seen, elapsed=elapsed)
    trial = a_measured_trial(attempts=(attempt,))
    row = TrialRow(number=1, state=trial.state, origin=trial.origin, strategy="zero2")
    stream = io.StringIO()
    show_trial(trial, row, stream)
    assert "clock           61 s in the queue, 32 s start-up, 18 s running" in stream.getvalue()
