"""`python -m sweeps advise` on studies that the real loop made with scripted jobs."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from sweeps.__main__ import main
from tests.support.examples import an_attempt
from tests.support.fake_cluster import Script, crash, failing, measured, oom
from tests.support.studies import Bench
from train_entry.contract import Attempt, Closing, Failure, FailureKind, State, dump, write_atomic

# These overrides make the same plan on any machine.
HERE = ("space=none", "search=grid", "cluster.device=cpu", "cluster.gpus_per_node=2", "ranks=2")


@pytest.fixture
def study(bench: Callable[..., Bench]) -> Callable[..., Bench]:
    """A function that runs a study with scripts by plan, over these dimensions."""

    def make(scripts: dict[str, list[Script]], *dimensions: str) -> Bench:
        made = bench(scripts)
        made.start(*HERE, *dimensions)
        write_atomic(made.directory.record, dump(made.record()))
        return made

    return make


@pytest.fixture
def advise(capsys: pytest.CaptureFixture[str]) -> Callable[[Bench, int], dict[str, str]]:
    """A function that returns the command's lines on a trial, by the word that each begins with."""

    def run(study: Bench, number: int) -> dict[str, str]:
        assert main(["advise", str(study.directory.path), str(number)]) == 0
        lines = capsys.readouterr().out.splitlines()
        return {line.partition(":")[0]: line.partition(":")[2].strip() for line in lines}

    return run


Advise = Callable[[Bench, int], dict[str, str]]


def test_it_says_why_and_what_is_next_and_how_to_try_it(study: Callable[..., Bench], advise: Advise) -> None:
    made = study({"*": [oom]}, "micro_batch=2,2")
    said = advise(made, 1)
    assert said["trial 0001, zero1 micro_batch=2"] == "infeasible"
    assert said["why"] == "gpu_oom: a GPU ran out of memory"
    assert said["where"] == "rank 1, after 0 steps"
    assert said["next"] == "activation_checkpointing=full"
    assert re.fullmatch(r"saves about \d+ KiB a rank: each block keeps only its input", said["because"])
    assert re.match(r"fits: peak 0\.\d+ GiB \(loss\), needed 0\.\d+ of [\d,.]+ GiB a rank$", said["expected"])
    assert said["it costs"].startswith("one more forward pass")
    assert said["try it"].endswith(
        "ranks=2 micro_batch=2 activation_checkpointing=full study=mine "
        f"studies_dir={made.directory.path.parent}"
    )


def test_it_judges_by_what_the_study_has_tried_since(study: Callable[..., Bench], advise: Advise) -> None:
    made = study({"*": [oom]}, "activation_checkpointing=none,full", "micro_batch=2")
    assert made.trials[0].advice is not None
    assert made.trials[0].advice.changes == {"activation_checkpointing": "full"}
    said = advise(made, 1)
    assert said["tried"] == "activation_checkpointing=full: trial 0002 ended with gpu_oom"
    assert said["next"] == "activation_checkpointing=full micro_batch=1"


def test_it_names_a_trial_that_fits(study: Callable[..., Bench], advise: Advise) -> None:
    scripts = {"zero1 x2": [oom], "*": [measured(80.0)]}
    said = advise(study(scripts, "activation_checkpointing=full", "micro_batch=2,1"), 1)
    assert said["tried"] == "micro_batch=1: trial 0002 fits, 40 tokens/s/GPU"
    assert said["next"] == "strategy=zero2"


def test_it_says_what_a_remedy_came_to_that_failed_otherwise(
    study: Callable[..., Bench], advise: Advise
) -> None:
    scripts = {"zero1 x2": [oom], "*": [crash]}
    said = advise(study(scripts, "activation_checkpointing=full", "micro_batch=2,1"), 1)
    assert said["tried"] == "micro_batch=1: trial 0002 ended with crashed"
    assert said["next"] == "strategy=zero2"


def test_it_skips_what_is_not_expected_to_fit_and_says_why(
    study: Callable[..., Bench], advise: Advise
) -> None:
    prime = 4_194_301  # so many sequences that their logits fill any host; only divisible into single ones
    script = {"*": [failing(FailureKind.HOST_OOM)]}
    said = advise(study(script, f"micro_batch={prime},{prime}", f"global_batch={2 * prime}"), 1)
    assert re.match(r"activation_checkpointing=full: needs [\d,.]+ GiB", said["skipped"])
    assert said["next"] == "activation_checkpointing=full micro_batch=1"
    assert said["expected"].startswith("fits: ")


@pytest.mark.parametrize(
    ("attempts", "state"), [((), State.QUEUED), ((an_attempt(),), State.RUNNING)], ids=["queued", "running"]
)
def test_it_says_where_the_next_plan_is_under_way(
    study: Callable[..., Bench], advise: Advise, attempts: tuple[Attempt, ...], state: State
) -> None:
    made = study({"*": [oom]}, "activation_checkpointing=full", "micro_batch=2,1")
    made.amend(2, attempts=attempts)
    said = advise(made, 1)
    assert said["next"] == "micro_batch=1"
    assert said["now"] == f"trial 0002 is {state} with this plan: wait, or resume the study"
    assert "try it" not in said


def test_where_the_study_cannot_be_composed_any_more_the_stored_advice_counts(
    study: Callable[..., Bench], advise: Advise
) -> None:
    made = study({"*": [oom]}, "micro_batch=2,2")
    overrides = (*made.trials[0].overrides, "model=a_file_that_is_gone")
    made.amend(1, overrides=overrides)
    said = advise(made, 1)
    assert said["note"].startswith(
        "stored advice, since it cannot be recomputed: model=a_file_that_is_gone: no such choice"
    )
    assert said["next"] == "activation_checkpointing=full"


def test_where_the_overrides_make_another_plan_the_stored_advice_counts(
    study: Callable[..., Bench], advise: Advise
) -> None:
    made = study({"*": [oom]}, "micro_batch=2,2")
    made.amend(1, fingerprint="another", advice=None)
    said = advise(made, 1)
    assert said["note"].endswith("here (CPU) its overrides make another plan")
    assert said["next"] == "no advice is on record"


def test_of_a_trial_that_did_not_run_out_of_memory_it_says_so(
    study: Callable[..., Bench], advise: Advise
) -> None:
    said = advise(study({"*": [crash]}, "micro_batch=2,2"), 1)
    assert said["why"] == "crashed: a rank ended with an error of its own"
    assert "it did not run out of memory; docs/failures.md, at `crashed`, says what to do" in said


def test_of_a_plan_that_was_refused_it_says_that_nothing_ran(
    study: Callable[..., Bench], advise: Advise
) -> None:
    made = study({"*": [oom]}, "micro_batch=2,2")
    failure = Failure(kind=FailureKind.INFEASIBLE, message="not launched: needs 9.00 GiB of 8.00 GiB")
    made.amend(1, attempts=(), closing=Closing(at=0.0, outcome=failure), advice=None)
    said = advise(made, 1)
    assert said["why"] == "infeasible: the plan cannot fit; it was not launched"
    assert "it was not launched; docs/failures.md, at `infeasible`, says what to do" in said
    assert "where" not in said
    assert "next" not in said


def test_a_measured_trial_needs_no_advice(study: Callable[..., Bench], advise: Advise) -> None:
    said = advise(study({}, "micro_batch=2,2"), 1)
    assert "it was measured" in said


def test_a_rejected_trial_shows_its_reasons(study: Callable[..., Bench], advise: Advise) -> None:
    made = study({}, "micro_batch=3,2")
    assert made.states[0] is State.REJECTED
    assert "micro_batch may be 1, 2, 4 or 8" in advise(made, 1)["rejected"]


@pytest.mark.parametrize(
    ("dimension", "others"), [("micro_batch=1,2", "there are 1 to 2"), ("micro_batch=1", "there is only 1")]
)
def test_a_number_that_no_trial_has_is_one_line_and_status_2(
    study: Callable[..., Bench], capsys: pytest.CaptureFixture[str], dimension: str, others: str
) -> None:
    made = study({}, dimension)
    assert main(["advise", str(made.directory.path), "7"]) == 2
    assert capsys.readouterr().err == f"{made.directory.path}: no trial 7; {others}\n"
