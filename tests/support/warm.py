"""Start Python processes in which torch, transformers and DeepSpeed are already imported, by forking one.

    warm = Warm(environment, log)
    rank = warm.start(("train_entry", "DIR"), environment, log)    # as `python -m train_entry DIR`
    rank.wait(60)

The imports take six seconds, a fork takes a hundredth of a second. To a test, such a process behaves like one
that `python -m` started: it has its own environment, log, signals and exit status.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LOOK_S = 0.02
COMPILING_MAY_TAKE_S = 3600.0
FORKING_MAY_TAKE_S = 60.0


class Warm:
    """The process from which others are forked. It ends them when it is closed."""

    def __init__(self, environment: Mapping[str, str], log: Path) -> None:
        """Start the process and wait until all is imported: for minutes if it has to compile operators."""
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__],
                env={**environment, "DS_ACCELERATOR": "cpu", "HF_HUB_OFFLINE": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=output,
            )
        self._ended: dict[int, int] = {}
        self._partial = b""
        assert self._read(time.monotonic() + COMPILING_MAY_TAKE_S) == {"warm": True}, log.read_text()[-3000:]

    def start(self, module: Sequence[str], environment: Mapping[str, str], log: Path) -> WarmProcess:
        assert self._process.stdin is not None
        order = {"module": list(module), "environment": dict(environment), "log": str(log.absolute())}
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()
        deadline = time.monotonic() + FORKING_MAY_TAKE_S
        while (answer := self._read(deadline)) is not None:
            if "started" in answer:
                return WarmProcess(self, answer["started"])
        raise AssertionError("the warm process is gone")

    def status(self, pid: int, deadline: float) -> int | None:
        """Return a process's exit status, or None if it still runs at the deadline."""
        while pid not in self._ended:
            if self._read(deadline) is None:
                break
        return self._ended.get(pid)

    def _read(self, deadline: float) -> dict[str, Any] | None:
        assert self._process.stdout is not None
        pipe = self._process.stdout.fileno()
        while b"\n" not in self._partial:
            readable, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
            received = os.read(pipe, 65536) if readable else b""
            if not received:
                return None
            self._partial += received
        line, _, self._partial = self._partial.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        if "ended" in answer:
            self._ended[answer["ended"]] = answer["status"]
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


class WarmProcess:
    """A forked process, with the part of subprocess.Popen's interface that tests need."""

    def __init__(self, warm: Warm, pid: int) -> None:
        self._warm = warm
        self.pid = pid

    def poll(self) -> int | None:
        return self._warm.status(self.pid, time.monotonic())

    def wait(self, timeout: float = float("inf")) -> int:
        status = self._warm.status(self.pid, time.monotonic() + min(timeout, 1e6))
        if status is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def serve() -> None:
    """Fork a process for each line of standard input, and print its pid and later its exit status."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # output of imports must not mix with the answers
    import_all()
    print(json.dumps({"warm": True}), file=answers)
    running: set[int] = set()
    partial = b""
    while True:
        readable, _, _ = select.select([0], [], [], LOOK_S if running else None)
        received = os.read(0, 65536) if readable else b""
        if readable and not received:
            break
        *lines, partial = (partial + received).split(b"\n")
        for line in lines:
            order = json.loads(line)
            if (pid := os.fork()) == 0:
                become(order)
            running.add(pid)
            print(json.dumps({"started": pid}), file=answers)
        for pid in list(running):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                running.remove(pid)
                print(json.dumps({"ended": pid, "status": os.waitstatus_to_exitcode(status)}), file=answers)
    answers.close()
    for pid in running:
        os.kill(pid, signal.SIGKILL)


def import_all() -> None:
    """Import the modules and load the operators that a rank needs before its first step."""
    import gc
    import warnings

    warnings.simplefilter("ignore")
    import transformers.models.gpt2.modeling_gpt2
    import transformers.models.llama.modeling_llama  # noqa: F401

    import train_entry.data
    import train_entry.engines.ddp
    import train_entry.engines.deepspeed
    import train_entry.engines.pipeline
    import train_entry.main
    import train_entry.measure.clock
    import train_entry.measure.devices
    import train_entry.measure.memory
    import train_entry.model.build  # noqa: F401
    from train_entry.install.operators import build

    assert build(gpus=False) == 0  # build() also loads the operators
    warnings.resetwarnings()
    gc.collect()
    gc.freeze()  # a child's garbage collection then only looks at the child's own objects


def become(order: Mapping[str, Any]) -> None:
    """Turn this fork into the ordered process, as if `python -m` had started it. Never return."""
    import runpy

    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.environ.clear()
    os.environ.update(order["environment"])
    status = 1
    try:
        sys.argv = list(order["module"])
        runpy.run_module(order["module"][0], run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else int(left.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    serve()
