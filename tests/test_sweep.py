"""Real studies from the command line: Hydra, Optuna, submitit, DeepSpeed on two ranks, MLflow, table."""

from __future__ import annotations

import csv
import os
import re
import shlex
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import QUICK, CommandLine
from train_entry.contract import (
    Failure,
    FailureKind,
    Goal,
    Heartbeat,
    Measurement,
    Ranking,
    State,
    StudyDir,
    Trial,
    Winner,
    read_document,
    read_trial,
)

pytestmark = [pytest.mark.slow, pytest.mark.jobs]

FOUR = ("-m", "strategy=zero1,zero2", "micro_batch=choice(1,2)", "limits.trials=4", "study=x", *QUICK)
NO_MLFLOW = "tracking=none"
Wait = Callable[[Callable[[], bool], float], None]


def trials(line: CommandLine, study: str = "x") -> list[Trial]:
    found = [read_trial(place) for place in StudyDir(line.studies / study).trials()]
    return [trial for trial in found if trial is not None]


def heartbeat(
    line: CommandLine, trial: int, rank: int, attempt: int = 1, study: str = "x"
) -> Heartbeat | None:
    place = StudyDir(line.studies / study).trial(trial).attempt(attempt)
    return read_document(place.heartbeat(rank), Heartbeat)


def rows(line: CommandLine, study: str = "x") -> list[dict[str, str]]:
    with (line.studies / study / "table.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def four(module_command_line: CommandLine) -> tuple[CommandLine, str]:
    """A finished study of four trials, and its output."""
    done = module_command_line.run(*FOUR)
    assert done.returncode == 0, done.stdout + done.stderr
    return module_command_line, done.stdout


def test_a_finite_space_is_measured_once_each(four: tuple[CommandLine, str]) -> None:
    line, _ = four
    found = trials(line)
    assert [trial.state for trial in found] == [State.MEASURED] * 4
    assert {(trial.values["strategy"], trial.values["micro_batch"]) for trial in found} == {
        ("zero1", 1),
        ("zero1", 2),
        ("zero2", 1),
        ("zero2", 2),
    }


def test_every_row_has_throughput_memory_and_loss(four: tuple[CommandLine, str]) -> None:
    line, _ = four
    for row in rows(line):
        assert float(row["tokens_per_s"]) == pytest.approx(2 * float(row["tokens_per_s_per_gpu"]))
        assert float(row["tokens_per_s"]) == pytest.approx(16 * 128 / float(row["step_s"]))
        assert int(row["peak_bytes"]) > 100 * 2**20
        assert 4 < float(row["loss"]) < 6


def test_stages_and_micro_batches_train_alike(four: tuple[CommandLine, str]) -> None:
    line, _ = four
    losses = [float(row["loss"]) for row in rows(line)]
    assert max(losses) == pytest.approx(min(losses), rel=1e-4)


def test_the_table_is_printed_ranked_with_the_best_command(four: tuple[CommandLine, str]) -> None:
    line, out = four
    best = max(rows(line), key=lambda row: float(row["tokens_per_s_per_gpu"]))
    assert rows(line)[0] == best
    assert f"best configuration, trial {int(best['number']):04d}: python sweep.py" in out
    assert "mlflow ui --backend-store-uri sqlite:///" in out
    assert re.search(r"http://127\.0\.0\.1:5000/#/experiments/\d+/runs", out)
    overrides = (line.studies / "x" / "best" / "overrides.txt").read_text().split()
    assert overrides == shlex.split(best["overrides"])


def test_nothing_stray_is_left_behind(four: tuple[CommandLine, str]) -> None:
    line, _ = four
    assert sorted(path.name for path in line.directory.iterdir()) == ["state", "studies"]


def test_the_same_command_again_measures_nothing(four: tuple[CommandLine, str]) -> None:
    line, _ = four
    before = trials(line)
    done = line.run(*FOUR)
    assert done.returncode == 0
    assert "nothing was launched" in done.stdout
    assert trials(line) == before


def test_another_space_under_the_same_name_is_refused(four: tuple[CommandLine, str]) -> None:
    line, _ = four
    done = line.run(*FOUR[:1], "strategy=zero1,zero3", *FOUR[2:])
    assert done.returncode == 2
    assert "the range of strategy was zero1,zero2, now zero1,zero3" in done.stderr


def test_a_rows_command_measures_that_row_again(four: tuple[CommandLine, str]) -> None:
    line, _ = four
    row = rows(line)[0]
    done = line.run(*shlex.split(row["overrides"]), NO_MLFLOW)
    assert done.returncode == 0, done.stderr
    assert f"({row['strategy']}): measured" in done.stdout
    loss = re.search(r"loss +([\d.]+)", done.stdout)
    assert loss is not None
    assert float(loss[1]) == pytest.approx(float(row["loss"]), abs=1e-3)


def test_ctrl_c_cancels_and_the_same_command_finishes(command_line: CommandLine, wait_for: Wait) -> None:
    command = ("-m", "strategy=zero1", "micro_batch=1", "study=x", NO_MLFLOW, *QUICK)
    process = command_line.start(*command)
    wait_for(lambda: heartbeat(command_line, 1, rank=0) is not None, 60)
    beat = heartbeat(command_line, 1, rank=0)
    os.killpg(process.pid, signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "the same command resumes this study" in out
    assert beat is not None and not Path(f"/proc/{beat.pid}").exists()
    assert command_line.run(*command).returncode == 0
    assert [trial.state for trial in trials(command_line)] == [State.MEASURED]


def test_a_trial_outlives_its_orchestrator_and_is_collected_and_the_best_confirmed(
    command_line: CommandLine, wait_for: Wait
) -> None:
    command = ("-m", "strategy=zero1", "micro_batch=1,2", "study=x", NO_MLFLOW, *QUICK)
    process = command_line.start(*command)
    wait_for(lambda: heartbeat(command_line, 1, rank=1) is not None, 60)
    os.killpg(process.pid, signal.SIGHUP)  # the terminal hangs up ...
    process.kill()  # ... and nobody had time to clean up
    process.communicate()
    place = StudyDir(command_line.studies / "x").trial(1).attempt(1)
    wait_for(lambda: place.exit(0).exists() and place.exit(1).exists(), 90)
    confirmed = [word for word in command if word != "confirm.best=0"]
    done = command_line.run(*confirmed, "confirm.best=1", "confirm.rounds=2")
    assert done.returncode == 0, done.stdout + done.stderr
    found = trials(command_line)
    assert [trial.state for trial in found] == [State.MEASURED] * 2
    winner = read_document(StudyDir(command_line.studies / "x").winner, Winner)
    assert winner is not None
    ranking = Ranking(found, Goal(name="tokens_per_s_per_gpu"))
    contenders = {trial.number: trial for trial in (ranking.best, ranking.best_baseline) if trial is not None}
    assert winner.trial in contenders, "the best, and the best baseline if that is another trial"
    assert [len(trial.attempts) for trial in found] == [
        3 if trial.number in contenders else 1 for trial in found
    ]
    assert {standing.trial for standing in winner.standings} == set(contenders)
    for standing in winner.standings:
        repeats = [repeat.outcome for repeat in contenders[standing.trial].repeats]
        values = [seen.tokens_per_s_per_gpu for seen in repeats if isinstance(seen, Measurement)]
        assert min(values) <= standing.value <= max(values)
        assert len(values) == standing.repeats == 2
    assert f"confirmed: trial {winner.trial:04d} reaches" in done.stdout


def test_failing_trials_end_as_what_they_are_and_the_study_goes_on(
    command_line: CommandLine, wait_for: Wait
) -> None:
    """Trial 1 raises (its text is too short), 2 is killed, 3 is frozen by SIGSTOP, 4 is measured."""
    text = command_line.directory / "short.txt"
    text.write_text("to be or not to be " * 200)  # 3,800 bytes: less than a global batch of 16 x 512
    process = command_line.start(
        *("-m", "seq_len=512,128,64,32", "strategy=ddp", "micro_batch=2", "search=grid", "study=x"),
        *("data=text", f"data.path={text}", "limits.step_silence_s=4", "limits.startup_silence_s=60"),
        *(NO_MLFLOW, "model.layers=1", "measure.warmup_steps=1", "measure.steps=600"),
        *("measure.precision=0", "measure.futility=false", "confirm.best=0"),
    )
    ended_s = [
        disturb(command_line, wait_for, 2, signal.SIGKILL),
        disturb(command_line, wait_for, 3, signal.SIGSTOP),
    ]
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, out + err
    found = trials(command_line)
    kinds = [trial.outcome.kind for trial in found[:3] if isinstance(trial.outcome, Failure)]
    assert kinds == [FailureKind.BAD_CONFIG, FailureKind.CRASHED, FailureKind.HUNG]
    assert isinstance(found[3].outcome, Measurement)
    assert "SIGKILL" in out
    assert max(ended_s) < 15


def disturb(line: CommandLine, wait_for: Wait, trial: int, number: signal.Signals) -> float:
    """Signal rank 1 of a trial while it trains. Return the seconds until the trial was closed."""

    def steps() -> bool:
        beat = heartbeat(line, trial, rank=1)
        return beat is not None and beat.step >= 2

    def is_closed() -> bool:
        return trials(line)[trial - 1].closed_at is not None

    wait_for(steps, 120)
    beat = heartbeat(line, trial, rank=1)
    assert beat is not None
    os.kill(beat.pid, number)
    began = os.times().elapsed
    wait_for(is_closed, 60)
    return os.times().elapsed - began


def test_a_trial_over_its_time_limit_is_ended_and_no_feasible_trial_is_status_3(
    command_line: CommandLine,
) -> None:
    done = command_line.run("ranks=1", "limits.startup_s=3", "study=x", NO_MLFLOW, *QUICK)
    assert done.returncode == 3
    (trial,) = trials(command_line)
    assert isinstance(trial.outcome, Failure)
    assert trial.outcome.kind is FailureKind.TIMED_OUT
    assert "was still running after" in trial.outcome.message
