"""A silent or busy controller harms no study: submissions are retried, and cancellations repeated."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from sweeps.cluster.slurm import submit
from sweeps.cluster.slurm.queries import JobWatch, SlurmError
from sweeps.cluster.slurm.submit import Sending, cancel_jobs, scancel
from sweeps.errors import SweepError
from tests.sweeps.cluster.conftest import Commands

ROW = "{}|{}|None|1:00|30:00|x/0001/1|\n"


def watching(*answers: str | None) -> JobWatch:
    """A squeue that gives these answers one after another, the last forever; None: it does not answer."""
    left = list(answers)

    def ask(*command: str) -> str:
        answer = (left.pop(0) if len(left) > 1 else left[0]) if command[0] == "squeue" else ""
        if answer is None:
            raise SlurmError("Unable to contact slurm controller")
        return answer

    return JobWatch(ask=ask, squeue_every_s=0.0)


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit, "LOOK_S", 0.01)
    monkeypatch.setattr(submit, "UNLISTED_S", 0.0)
    monkeypatch.setattr(submit, "RESEND_S", 0.0)


# ---------------------------------------------------------------- ending


def test_all_jobs_are_told_to_end_before_any_is_waited_for(commands: Commands) -> None:
    watch = watching(ROW.format(7, "RUNNING") + ROW.format(8, "RUNNING"), ROW.format(7, "CANCELLED"))
    assert cancel_jobs(["7", "8"], watch) == []
    assert commands.calls("scancel") == ["7 8"]


def test_a_job_in_a_long_epilog_is_as_good_as_gone(
    commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submit, "ENDING_S", 0.05)
    monkeypatch.setattr(submit, "CANCEL_S", 5.0)
    began = time.monotonic()
    assert cancel_jobs(["7"], watching(ROW.format(7, "COMPLETING"))) == []
    assert 0.05 < time.monotonic() - began < 4.0, "not before its ranks had time to write how they ended"


def test_what_does_not_end_is_named_and_keeps_no_other_from_ending(
    commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submit, "CANCEL_S", 2.0)
    monkeypatch.setattr(submit, "AGAIN_S", 0.0)
    commands.answer("scancel", err="scancel: error: Unable to contact slurm controller\n", status=1)
    (problem,) = cancel_jobs(["7", "8"], watching(ROW.format(7, "RUNNING") + ROW.format(8, "CANCELLED")))
    assert problem.startswith("job 7 may still run: Unable to contact slurm controller; try `scancel 7`")
    assert commands.calls("scancel")[:2] == ["7 8", "7"], "said again to those that may not have heard it"


def test_a_job_over_for_long_is_no_problem(commands: Commands) -> None:
    said = "scancel: error: Kill job error on job id 7: Invalid job id specified\n"
    commands.answer("scancel", err=said, status=1)
    assert scancel(["7"]) == ({"7"}, "")
    assert cancel_jobs(["7"], watching(None)) == []


def test_a_job_that_nobody_lists_after_scancel_is_gone(
    commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(submit, "CANCEL_S", 2.0)
    assert cancel_jobs(["7"], watching("")) == []
    assert len(cancel_jobs(["7"], watching(None))) == 1, "nothing is concluded where squeue is silent"


# ---------------------------------------------------------------- submitting


def refusing(times: int) -> Callable[[], str]:
    refusals = [SweepError("sbatch refused x/0001/1: Socket timed out")] * times

    def send() -> str:
        if refusals:
            raise refusals.pop()
        return "9"

    return send


def test_what_sbatch_refuses_is_said_at_once_and_sent_again() -> None:
    told: list[str] = []
    sending = Sending(send=refusing(2), find=lambda: None, watch=watching(""), say=told.append)
    assert sending.job_id() is None
    assert told == ["sbatch refused x/0001/1: Socket timed out; trying again for 10 minutes"]
    sending.watch.named("", "")
    assert sending.job_id() is None
    sending.watch.named("", "")
    assert sending.job_id() == "9"
    assert len(told) == 1


def test_a_job_whose_answer_was_lost_is_found_and_not_sent_twice() -> None:
    sending = Sending(send=refusing(1), find=lambda: "8", watch=watching(""), say=lambda _: None)
    assert [sending.job_id(), sending.job_id()] == [None, "8"]


def test_nothing_is_sent_again_while_nobody_knows_whether_it_is_there() -> None:
    watch = watching(None)

    def find() -> None:
        watch.named("x/0001/1", "")

    sending = Sending(send=refusing(1), find=find, watch=watch, say=lambda _: None)
    assert [sending.job_id() for _ in range(3)] == [None] * 3


def test_what_sbatch_refuses_for_long_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit, "REFUSED_S", -1.0)
    sending = Sending(send=refusing(1), find=lambda: None, watch=watching(""), say=lambda _: None)
    with pytest.raises(SweepError, match="Socket timed out"):
        sending.job_id()
