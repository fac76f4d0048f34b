"""Python processes that begin with torch, transformers and DeepSpeed imported: forked from one that has them.

    warm = Warm(environment)
    rank = warm.start(("train_entry", "DIR"), environment, log)    # as `python -m train_entry DIR`
    rank.wait(60)

To import them takes a process six seconds, a fork of one that has them a hundredth of one. What tests see of
such a process is what they would see of `python -m`: its own environment, log, signals and exit status.
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
    """The process that others are forked from. Ends them when it is closed."""

    def __init__(self, environment: Mapping[str, str], log: Path) -> None:
        """Wait until it is warm: minutes where it compiles operators, and for nobody else's sake less."""
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
        """How a process ended; None: it runs on at the deadline."""
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
    """What a test needs of subprocess.Popen."""

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
    """Fork a process for each line of standard input; say which, and how each ends."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what imports print is no answer
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
    """What a rank imports before its first step, and the operators that it loads."""
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

    assert build(gpus=False) == 0  # it loads what it has compiled
    warnings.resetwarnings()
    gc.collect()
    gc.freeze()  # a child that collects garbage then looks at its own only


def become(order: Mapping[str, Any]) -> None:
    """Be that process, as if Python had been started for it. Does not return."""
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
