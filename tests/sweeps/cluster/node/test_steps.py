"""Steps start their parts, tell them to end, and kill those that do not listen."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import pytest

from sweeps.cluster.node.steps import Part, Step

DEADLINE_S = 30.0


def python(code: str, log: Path, order: str | None = None) -> Part:
    return Part(command=(sys.executable, "-c", code), log=log, order=order)


def ended(step: Step, tells: bool = False) -> list[int | None]:
    """Wait until all parts have ended, and return their statuses."""
    deadline = time.monotonic() + DEADLINE_S
    while not step.reap() and time.monotonic() < deadline:
        if tells:
            step.end()
        time.sleep(0.02)
    return [part.status for part in step.parts]


def until_ready(log: Path) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while "ready" not in log.read_text() and time.monotonic() < deadline:
        time.sleep(0.02)


def test_a_step_is_over_when_all_of_its_parts_are(tmp_path: Path) -> None:
    quick, slow = python("exit(3)", tmp_path / "quick"), python("input()", tmp_path / "slow", order="")
    step = Step.start([quick, python("import time; time.sleep(0.3)", tmp_path / "other"), slow], 5.0)
    assert ended(step) == [3, 0, 0]
    assert [part.over_at is not None for part in step.parts] == [True, True, True]


def test_a_part_reads_its_order_and_writes_into_its_log(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "part"
    assert ended(Step.start([python("print('got', input())", log, order="the order")], 5.0)) == [0]
    assert log.read_text() == "got the order\n"


def test_a_part_with_an_order_is_told_by_the_end_of_its_input(tmp_path: Path) -> None:
    code = "import sys; input(); print('ready', flush=True); sys.stdin.read(); exit(7)"
    step = Step.start([python(code, tmp_path / "log", order="go")], 60.0)
    until_ready(tmp_path / "log")
    assert ended(step, tells=True) == [7]


def test_a_part_without_an_order_is_told_by_a_signal(tmp_path: Path) -> None:
    code = "import time; print('ready', flush=True); time.sleep(60)"
    step = Step.start([python(code, tmp_path / "log")], 60.0)
    until_ready(tmp_path / "log")
    assert ended(step, tells=True) == [-signal.SIGTERM]


@pytest.mark.parametrize("last_word", [signal.SIGKILL, signal.SIGQUIT])
def test_a_part_that_does_not_listen_gets_its_last_word(tmp_path: Path, last_word: signal.Signals) -> None:
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "print('ready', flush=True); time.sleep(60)"
    )
    log = tmp_path / "log"
    part = Part(command=(sys.executable, "-c", code), log=log, last_word=last_word)
    step = Step.start([part], patience_s=0.2)
    until_ready(log)
    assert ended(step, tells=True) == [-last_word]


def test_an_order_to_a_process_that_is_gone_is_no_error(tmp_path: Path) -> None:
    assert ended(Step.start([python("exit(2)", tmp_path / "log", order="x" * 1_000_000)], 5.0)) == [2]
