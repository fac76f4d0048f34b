"""`python -m sweeps why` on studies that the real loop made with scripted jobs."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sweeps.__main__ import main
from sweeps.commands.why import composer_for
from sweeps.config.compose import Composer, register_resolvers
from sweeps.errors import ConfigError
from tests.support.dry_runs import too_large
from tests.support.examples import (
    a_measured_trial,
    a_measurement,
    a_rank_measurement,
    a_study_record,
    an_attempt,
)
from tests.support.fake_cluster import Script, crash, measured, oom
from tests.support.studies import Bench
from train_entry.contract import Closing, Estimate, Failure, FailureKind, Fit, Goal, dump, write_atomic

# These overrides make the same plan on any machine.
HERE = ("space=none", "search=grid", "cluster.device=cpu", "cluster.gpus_per_node=2", "ranks=2")
GIB = 2**30


@pytest.fixture(autouse=True)
def resolver() -> Iterator[None]:
    """Restore the resolver that other tests need: the command registers one for the study's machine."""
    yield
    register_resolvers(lambda: False)


@pytest.fixture
def study(bench: Callable[..., Bench]) -> Callable[..., Bench]:
    """A function that runs a study with scripts by plan, over these dimensions."""

    def make(scripts: dict[str, list[Script]], *dimensions: str, **record: Any) -> Bench:
        made = bench(scripts)
        made.start(*HERE, *dimensions)
        varied = dict(text.split("=", 1) for text in dimensions)
        asked = dataclasses.replace(
            made.record(), overrides=(*HERE, *dimensions), dimensions=varied, **record
        )
        write_atomic(made.directory.record, dump(asked))
        return made

    return make


Said = dict[str, str]
Why = Callable[..., Said]


@pytest.fixture
def why(capsys: pytest.CaptureFixture[str]) -> Why:
    """A function that returns the command's lines by the word that each begins with."""

    def run(study: Bench, *overrides: str) -> Said:
        assert main(["why", str(study.directory.path), *overrides]) == 0
        lines = capsys.readouterr().out.splitlines()
        return {line.partition(":")[0]: line.partition(":")[2].strip() for line in lines}

    return run


def refused(study: Bench, number: int = 4, then: Estimate | None = None) -> Bench:
    """Change a trial of the study to one that was refused by this estimate."""
    estimate = then or too_large(12.0)
    failure = Failure(kind=FailureKind.INFEASIBLE, message=f"not launched: {estimate.why}")
    closing = Closing(at=0.0, outcome=failure)
    study.amend(number, attempts=(), closing=closing, estimate=estimate, advice=None)
    return study


SPEEDS: dict[str, list[Script]] = {
    "ddp x1": [measured(100.0)],
    "ddp x2": [measured(200.0)],
    "zero1 x1": [measured(150.0)],
    "zero1 x2": [oom],
}
FOUR = ("strategy=ddp,zero1", "micro_batch=1,2")


def test_a_measured_configuration_has_its_rank_and_its_distance(
    study: Callable[..., Bench], why: Why
) -> None:
    said = why(study(SPEEDS, *FOUR), "strategy=zero1", "micro_batch=1")
    assert said["strategy=zero1 micro_batch=1"] == "zero1 on 2 ranks, micro_batch=1, accumulation 8"
    assert said["answer"].startswith("measured as trial 0003: 150 tokens/s, ")
    assert said["place"] == "2 of 3 measured: 25.0% below the best, trial 0002 (200 tokens/s)"


def test_a_time_is_above_that_of_the_best(study: Callable[..., Bench], why: Why) -> None:
    goal = Goal(name="time_to_tokens", tokens=360_000.0)
    said = why(study(SPEEDS, *FOUR, goals=(goal,)), "strategy=zero1", "micro_batch=1")
    assert said["answer"].startswith("measured as trial 0003: 40.0 min, ")
    assert said["place"] == "2 of 3 measured: 33.3% above the best, trial 0002 (30.0 min)"


def test_the_best_is_named_so(study: Callable[..., Bench], why: Why) -> None:
    said = why(study(SPEEDS, *FOUR), "strategy=ddp", "micro_batch=2")
    assert said["place"] == "1 of 3 measured: the best"


def test_a_plan_that_ran_out_of_memory_is_infeasible_in_bytes(study: Callable[..., Bench], why: Why) -> None:
    made = study(SPEEDS, *FOUR)
    said = why(made, "strategy=zero1", "micro_batch=2")
    assert said["answer"] == "trial 0004 is infeasible: gpu_oom: a GPU ran out of memory"
    assert said["memory"].startswith("peak ")
    assert re.search(r"process 0\.\d\d", said["parts"])
    assert said["next"] == f"python -m sweeps advise {made.directory.path} 4"


def test_what_was_predicted_not_to_fit_shows_the_numbers_of_then(
    study: Callable[..., Bench], why: Why
) -> None:
    made = refused(study(SPEEDS, *FOUR))
    said = why(made, "strategy=zero1", "micro_batch=2")
    assert said["answer"] == "trial 0004 is infeasible: the plan cannot fit; it was not launched"
    assert "message" not in said  # it would repeat `too much`
    assert said["memory"] == "peak 8.50 GiB (loss), needed 12.00 GiB of 10.00 GiB"
    assert said["parts"] == "activations 6.00, weights 1.50, moments 1.00 GiB"
    assert said["too much"] == "needs 12.00 GiB (loss) of 10.00 GiB, a card"
    assert said["try it"].startswith("python sweep.py ")


def test_what_was_refused_and_would_not_be_today_shows_the_estimate_of_today(
    study: Callable[..., Bench], why: Why
) -> None:
    said = why(refused(study(SPEEDS, *FOUR)), "strategy=zero1", "micro_batch=2")
    assert said["memory"] == "peak 8.50 GiB (loss), needed 12.00 GiB of 10.00 GiB"
    assert re.match(r"fits: peak \d\.\d+ GiB \(\w+\), needed ", said["now"])
    assert said["estimates"].startswith("learned from 3 trials; CPU")
    assert said["next"] == "the study's next start launches it"


def test_what_was_refused_and_would_be_today_shows_the_estimate_of_then_alone(
    study: Callable[..., Bench], why: Why
) -> None:
    made = study({}, "strategy=zero1", "micro_batch=1")
    fits = dataclasses.replace(too_large(12.0), fit=Fit.FITS)  # the same verdict as today's
    said = why(refused(made, 1, fits), "strategy=zero1", "micro_batch=1")
    assert "now" not in said
    assert "next" not in said


def test_another_margin_may_be_asked_for(study: Callable[..., Bench], why: Why) -> None:
    made = study(SPEEDS, *FOUR)
    said = why(made, "strategy=ddp", "micro_batch=2", "gate.quantile=0.7")
    assert said["place"] == "1 of 3 measured: the best"
    assert said["now"].startswith("fits: peak ")
    assert said["estimates"].endswith("a safety margin that suffices in 70% of cases")
    said = why(refused(made), "strategy=zero1", "micro_batch=2", "gate.quantile=0.6")
    assert said["next"] == "the study's next start with gate.quantile=0.6 launches it"


def test_a_rejected_one_names_every_rule(study: Callable[..., Bench], why: Why) -> None:
    said = why(study(SPEEDS, *FOUR), "micro_batch=3")
    assert said["micro_batch=3"] == "rejected: it makes no legal plan"
    assert said["rule"].startswith("batches_divide: global_batch=16 is not a multiple of micro_batch=3")
    assert said["source"].startswith("deepspeed/")


def test_a_failed_one_has_its_kind_and_message(study: Callable[..., Bench], why: Why) -> None:
    said = why(study({"zero1": [crash]}, *FOUR), "strategy=zero1", "micro_batch=1")
    assert said["answer"] == "trial 0003 is failed: crashed: a rank ended with an error of its own"
    assert said["message"]


def test_one_that_was_not_measured_by_itself_names_the_trial_it_shares(
    study: Callable[..., Bench], why: Why
) -> None:
    made = study({}, "strategy=zero1,zero2", "zero.stage=1,2")
    said = why(made, "strategy=zero1", "zero.stage=2")
    assert said["answer"].startswith("measured as trial 0002: 100 tokens/s")
    assert said["reused"] == "trial 0004 would run the same job, and shares its result"


def test_one_that_runs_has_no_result_yet_but_an_estimate(study: Callable[..., Bench], why: Why) -> None:
    made = study(SPEEDS, *FOUR)
    made.amend(3, attempts=(an_attempt(),))
    said = why(made, "strategy=zero1", "micro_batch=1")
    assert said["answer"] == "trial 0003 is running: no result yet"
    assert said["formulas"].startswith("fits, ")


def test_an_untried_one_is_predicted_before_and_after_learning(study: Callable[..., Bench], why: Why) -> None:
    made = study({"*": [measured(1.0)]}, *FOUR)
    said = why(made, "strategy=zero2", "micro_batch=1")
    assert said["answer"] == "not tried yet"
    assert said["formulas"] != said["learned"]
    assert said["estimates"].startswith("learned from 4 trials; CPU")
    assert said["try it"].endswith(
        f"ranks=2 strategy=zero2 micro_batch=1 study=mine studies_dir={made.directory.path.parent}"
    )


def test_an_untried_one_that_needs_more_than_what_ran_out_is_dominated(
    study: Callable[..., Bench], why: Why
) -> None:
    said = why(study({"*": [oom]}, "strategy=zero1", "micro_batch=2"), "strategy=zero1", "micro_batch=4")
    assert said["answer"] == "dominated: not tried, and not expected to win"
    assert "trial 0001 needs" in said["because"]
    assert said["because"].endswith("and ran out of memory (both estimated)")


def test_an_untried_one_that_is_estimated_slower_is_dominated(study: Callable[..., Bench], why: Why) -> None:
    said = why(study({"*": [measured(1e9)]}, *FOUR), "strategy=zero3", "micro_batch=1")
    assert said["answer"].startswith("dominated")
    assert "% below trial 0001, which was measured at 1,000,000,000" in said["because"]


def test_a_knob_that_the_study_varied_and_nobody_names_has_its_default(
    study: Callable[..., Bench], why: Why
) -> None:
    said = why(study(SPEEDS, *FOUR), "strategy=ddp")
    assert said["answer"].startswith("measured as trial 0001")


def test_of_a_study_on_other_cards_the_machine_is_put_together_from_its_record(
    study: Callable[..., Bench], why: Why
) -> None:
    made = study(SPEEDS, *FOUR, versions={"device": "NVIDIA H200"}, asked={"ranks": 2})
    record = dataclasses.replace(
        a_study_record(name="mine", versions={"device": "NVIDIA H200"}, model=made.model),
        overrides=("space=none",),
        asked={"ranks": 2},
    )
    write_atomic(made.directory.record, dump(record))
    rank = a_rank_measurement(device_total_bytes=100 * GIB)
    made.ledger().put(a_measured_trial(number=9, outcome=a_measurement(ranks=(rank,))))
    said = why(made, "strategy=zero3")
    assert said["note"] == "estimated for NVIDIA H200, 100.00 GiB, where the study ran"
    assert said["strategy=zero3"].startswith("zero3 on 2 ranks")
    assert "NVIDIA H200: figures from its data sheet; limit 100.00 GiB" in said["estimates"]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("micro_batch=0", "micro_batch: 0 is too small; at least 1 (override 'micro_batch=0')"),
        ("model=llama_7b", "model: fixed within study mine; leave it out"),
        ("strategy=zero9", "strategy=zero9: no such choice; there are "),
        ("micro_batch=1,2", "Ambiguous value for argument 'micro_batch=1,2'"),
        ("micro_bach=1", "did you mean micro_batch?"),
    ],
)
def test_a_bad_override_is_one_line_and_status_2(
    study: Callable[..., Bench], capsys: pytest.CaptureFixture[str], override: str, message: str
) -> None:
    made = study(SPEEDS, "micro_batch=1")
    assert main(["why", str(made.directory.path), override]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert message in error


def test_another_limit_of_memory_is_asked_of_the_card_the_study_ran_on(
    study: Callable[..., Bench], why: Why, capsys: pytest.CaptureFixture[str]
) -> None:
    made = study(SPEEDS, *FOUR)
    record = dataclasses.replace(
        a_study_record(name="mine", versions={"device": "NVIDIA H200"}, model=made.model),
        overrides=("space=none",),
        asked={"ranks": 2},
    )
    write_atomic(made.directory.record, dump(record))
    said = why(made, "strategy=zero3", "cluster.memory_limit_gib=40")
    assert "limit 40.00 GiB per rank (cluster.memory_limit_gib=40)" in said["estimates"]
    for override in ("cluster.memory_limit_gib=200", "gate.headroom_gib=200"):
        assert main(["why", str(made.directory.path), override]) == 2
        assert f"{override}: NVIDIA H200 has 139.8 GiB" in capsys.readouterr().err


@pytest.mark.parametrize("override", ["cluster.memory_limit_gib=8", "gate.headroom_gib=1"])
def test_on_a_cpu_no_such_limit_is_known(
    study: Callable[..., Bench], capsys: pytest.CaptureFixture[str], override: str
) -> None:
    made = study(SPEEDS, *FOUR)
    assert main(["why", str(made.directory.path), override]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"{override}: it applies to GPUs; on a CPU ranks share the host's memory; leave")
    assert len(error.splitlines()) == 1


def test_a_study_of_single_trials_lends_what_all_of_them_share(composer: Composer) -> None:
    record = a_study_record(asked={"model.layers": 9, "data.kind": "text", "seq_len": 64, "ranks": 4})
    assert composer_for(composer, record, ["micro_batch=2"]).fixed == (
        "seq_len=64",
        "ranks=4",
        "micro_batch=2",
    )


def test_an_override_replaces_the_studys_own(composer: Composer) -> None:
    record = a_study_record(overrides=("seq_len=64", "micro_batch=1,2", "precision=fp32"))
    found = composer_for(composer, record, ["seq_len=32", "micro_batch=2"])
    assert found.fixed == ("precision=fp32", "seq_len=32", "micro_batch=2")


def test_what_is_fixed_within_a_study_is_refused_key_by_key(composer: Composer) -> None:
    with pytest.raises(ConfigError) as refused:
        composer_for(composer, a_study_record(), ["model=llama_7b", "cluster.parallel=2"])
    assert len(refused.value.problems) == 2
