"""We tell live processes from dead ones, and end whole jobs: tested on small real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest

from sweeps.cluster.node.processes import end_session, is_alive, start_ticks

SLEEP = "import time; time.sleep(60)"
# A leader with a child, and a grandchild that left the session; it prints their pids.
FAMILY = f"""
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {SLEEP!r}])
left = subprocess.Popen([sys.executable, "-c", {SLEEP!r}], start_new_session=True)
print(child.pid, left.pid, flush=True)
time.sleep(60)
"""
# It ends in order when asked to, and says so.
POLITE = """
import signal, sys, time
signal.signal(signal.SIGINT, lambda *_: sys.exit(print("in order")))
print("ready", flush=True)
time.sleep(60)
"""
STUBBORN = POLITE.replace('lambda *_: sys.exit(print("in order"))', "signal.SIG_IGN")
# A parent whose child asked the kernel to die with it; it prints the child's pid.
DIES_WITH_PARENT = '''
import subprocess, sys, time
code = """
import time
from sweeps.cluster.node.processes import die_with_parent
die_with_parent()
print("ready", flush=True)
time.sleep(60)
"""
child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(60)
'''
# The parent of its grandchild ends at once; end_descendants must reach the grandchild all the same.
ADOPTS = '''
import subprocess, sys
from sweeps.cluster.node.processes import adopt_orphans, end_descendants
adopt_orphans()
code = """
import subprocess, sys
sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
print(subprocess.Popen(sleep, start_new_session=True, stdout=subprocess.DEVNULL).pid)
"""
pid = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True).stdout
end_descendants()
print(pid, flush=True)
'''

Start = Callable[[str], subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Start Python code as the leader of a session."""
    started: list[subprocess.Popen[str]] = []

    def begin(code: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", code]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        started.append(process)
        return process

    yield begin
    for process in started:
        with process:  # this closes its pipe, and waits
            process.kill()


def rest(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.read()


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def gone(pid: int, within_s: float = 10.0) -> bool:
    deadline = time.monotonic() + within_s
    while start_ticks(pid) is not None and time.monotonic() < deadline:
        time.sleep(0.02)
    return start_ticks(pid) is None


def test_a_process_is_named_by_pid_and_start(start: Start) -> None:
    process = start(SLEEP)
    ticks = start_ticks(process.pid)
    assert ticks is not None
    assert is_alive(process.pid, ticks)
    assert not is_alive(process.pid, ticks - 1)


def test_a_zombie_is_not_alive_nor_is_a_pid_that_nobody_has(start: Start) -> None:
    process = start("pass")
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert start_ticks(process.pid) is None
    process.wait()
    assert start_ticks(process.pid) is None


def test_a_command_name_with_spaces_and_brackets_is_read(start: Start) -> None:
    name = 'import ctypes; ctypes.CDLL(None).prctl(15, b"a) R 1 (b", 0, 0, 0)'
    process = start(f"{name}\nprint('ready', flush=True)\n{SLEEP}")
    assert line(process) == "ready"
    assert start_ticks(process.pid) == pytest.approx(start_ticks(os.getpid()), abs=10**7)


def test_ending_a_session_ends_children_and_grandchildren_that_left_it(start: Start) -> None:
    leader = start(FAMILY)
    child, left = map(int, line(leader).split())
    end_session(leader.pid, patience_s=0.2)
    assert gone(leader.pid)
    assert gone(child)
    assert gone(left)


def test_a_leader_has_time_to_end_in_order(start: Start) -> None:
    leader = start(POLITE)
    line(leader)
    end_session(leader.pid, patience_s=10)
    assert rest(leader) == "in order\n"


def test_a_leader_that_does_not_listen_is_killed(start: Start) -> None:
    leader = start(STUBBORN)
    line(leader)
    end_session(leader.pid, patience_s=0.2)
    assert rest(leader) == ""
    assert gone(leader.pid)


def test_members_are_ended_though_their_leader_is_gone(start: Start) -> None:
    leader = start(FAMILY)
    child, left = map(int, line(leader).split())
    leader.kill()
    leader.wait()
    end_session(leader.pid, patience_s=0.2)
    assert gone(child)
    os.kill(left, signal.SIGKILL)  # it left the session, so nothing knows it any more


def test_other_sessions_are_left_alone(start: Start) -> None:
    ours, others = start(SLEEP), start(SLEEP)
    end_session(ours.pid, patience_s=0.2)
    ours.wait(10)
    assert others.poll() is None


def test_ending_what_has_ended_does_nothing(start: Start) -> None:
    leader = start("pass")
    leader.wait(10)
    end_session(leader.pid, patience_s=0.2)


def test_a_child_dies_with_its_parent_however_that_ends(start: Start) -> None:
    parent = start(DIES_WITH_PARENT)
    child = int(line(parent))
    assert start_ticks(child) is not None
    parent.kill()
    parent.wait()
    assert gone(child)


def test_orphans_are_adopted_and_ended(start: Start) -> None:
    process = start(ADOPTS)
    assert gone(int(line(process)))
