"""Ask Slurm about nodes and partitions, and about all our jobs in one query."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from sweeps.cluster.node.environment import is_foreign
from sweeps.errors import SweepError

PATIENCE = 10  # times longer than `gone_after_s` we wait while the accounting is down
LIMIT_S = 60.0  # Slurm's own commands give up on a silent controller sooner

SQUEUE = "%i|%T|%r|%M|%l|%j|%k"  # id, state, why it waits, time used, time limit, name, comment
ROW = re.compile(r"\d[^|]*\|[A-Z_]+(\|[^|]*){4}\|")
SACCT = "JobID,State,ExitCode,Elapsed,Timelimit"
OVER = frozenset(
    (
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "GONE",  # our own: Slurm no longer knows the job
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "REVOKED",
        "TIMEOUT",
    )
)
WAITING = frozenset(("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT"))


class SlurmError(SweepError):
    """A command of Slurm failed. The text is Slurm's own."""


class SlurmSilence(SlurmError):
    """Slurm could not be asked: its command is missing, or does not answer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class JobFacts:
    """A job of ours, as Slurm sees it."""

    job_id: str
    state: str
    reason: str = ""  # why it waits
    name: str = ""
    comment: str = ""
    exit_code: str = ""
    ran_out_of_memory: bool = False  # a step of it did; Slurm calls the job FAILED, or lets it go on
    used_s: int = 0
    limit_s: int | None = None  # None: no limit

    @property
    def is_over(self) -> bool:
        return self.state in OVER

    @property
    def is_ending(self) -> bool:
        """True while Slurm ends its processes or cleans its nodes up, which a site's epilog may make long."""
        return self.state == "COMPLETING"

    @property
    def is_waiting(self) -> bool:
        return self.state in WAITING


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeFacts:
    """A node, within one partition."""

    name: str
    cores: int
    memory_bytes: int
    gpus: Mapping[str, int]  # by type, "" where the site names none
    features: frozenset[str]
    state: str
    partition: str
    is_default: bool
    longest_min: int | None  # the partition's time limit; None: no limit

    @property
    def gpu_count(self) -> int:
        return sum(self.gpus.values())

    @property
    def is_up(self) -> bool:
        return not self.state.rstrip("*~#!%$@^-+").startswith(
            ("down", "drain", "drng", "fail", "futr", "maint", "unk", "inval")
        )


def clean_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of a login shell, even if we run inside a job. Slurm then prints times as seconds."""
    return {name: value for name, value in environ.items() if not is_foreign(name)} | {
        "SLURM_TIME_FORMAT": "%s"
    }


def ask(*command: str) -> str:
    """Run a command of Slurm and return what it prints. Raises SlurmError with Slurm's own words."""
    try:
        done = subprocess.run(
            command,
            env=clean_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
    except OSError as error:
        reason = f"{command[0]} cannot be run here ({error.strerror}); start this on a host with Slurm"
        raise SlurmSilence(reason) from error
    except subprocess.TimeoutExpired as error:
        raise SlurmSilence(f"{command[0]} did not answer within {LIMIT_S:.0f} s") from error
    if done.returncode != 0:
        raise SlurmError(said(done.stderr) or f"{command[0]}: status {done.returncode}")
    return done.stdout


def said(stderr: str) -> str:
    """Slurm's complaint as one line, without its prefixes."""
    lines = [re.sub(r"^(\w+: )?(error: )?", "", line).strip() for line in stderr.splitlines()]
    return "; ".join(dict.fromkeys(filter(None, lines)))


def parse_squeue(text: str) -> dict[str, JobFacts]:
    found = {}
    for line in filter(ROW.match, text.splitlines()):  # somebody's comment may span several lines
        job_id, state, reason, used, limit, name, comment = line.split("|", 6)  # a comment may contain |
        found[job_id] = JobFacts(
            job_id=job_id,
            state=state,
            reason=reason,
            name=name,
            comment=comment,
            used_s=parse_seconds(used) or 0,
            limit_s=parse_seconds(limit),
        )
    return found


def parse_sacct(text: str) -> dict[str, JobFacts]:
    """Jobs by id. Each tells whether one of its steps ran out of memory."""
    found: dict[str, JobFacts] = {}
    for line in text.splitlines():
        row, state, exit_code, used, limit = line.split("|")
        state = state.split()[0] if state else "UNKNOWN"  # "CANCELLED by 0"
        job_id, _, step = row.partition(".")
        if not step:
            found[job_id] = JobFacts(
                job_id=job_id,
                state=state,
                exit_code=exit_code,
                used_s=parse_seconds(used) or 0,
                limit_s=parse_seconds(limit),
            )
        elif state == "OUT_OF_MEMORY" and job_id in found:
            found[job_id] = dataclasses.replace(found[job_id], ran_out_of_memory=True)
    return found


def parse_sinfo(text: str) -> list[NodeFacts]:
    return [_node(line.split("|")) for line in text.splitlines()]


SINFO = "%N|%c|%m|%G|%f|%t|%P|%l"  # name, CPUs, MiB, gres, features, state, partition, time limit


def _node(cells: Sequence[str]) -> NodeFacts:
    name, cores, memory_mib, gres, features, state, partition, limit = cells
    return NodeFacts(
        name=name,
        cores=int(cores.rstrip("+")),
        memory_bytes=int(memory_mib.rstrip("+")) * 2**20,
        gpus=parse_gres(gres),
        features=frozenset() if features == "(null)" else frozenset(features.split(",")),
        state=state,
        partition=partition.rstrip("*"),
        is_default=partition.endswith("*"),
        longest_min=None if (limit_s := parse_seconds(limit)) is None else limit_s // 60,
    )


def parse_gres(text: str) -> dict[str, int]:
    """GPUs by type: `gpu:a100:8(S:0-1),nvme:1`."""
    found: dict[str, int] = {}
    for part in re.sub(r"\([^)]*\)", "", text).split(","):
        words = part.split(":")
        if words[0] == "gpu" and len(words) > 1 and words[-1].isdigit():
            kind = words[1] if len(words) > 2 else ""
            found[kind] = found.get(kind, 0) + int(words[-1])
    return found


def parse_seconds(text: str) -> int | None:
    """Parse a time as Slurm prints it, days-hours:minutes:seconds; None if unlimited or unknown."""
    if not text or not text[0].isdigit():
        return None
    days, _, clock = text.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    hours, minutes, seconds = ([0] * (3 - len(parts)) + parts)[:3]
    return int(days or 0) * 86_400 + hours * 3600 + minutes * 60 + seconds


@dataclass
class JobWatch:
    """The states of all our jobs, from one rare query for all of them: the controller serves a whole site.

    squeue comes first: it also knows jobs that ended minutes ago. Jobs that have left it are looked up in the
    accounting, if there is any. Nothing is concluded from a query that failed.
    """

    ask: Callable[..., str] = ask
    now: Callable[[], float] = time.monotonic
    squeue_every_s: float = 2.0
    sacct_every_s: float = 5.0
    gone_after_s: float = 60.0  # for a job that neither lists: sbatch answers before they do
    queries: int = 0
    has_accounting: bool = True
    answered_at: float = float("-inf")  # when squeue was last asked and did answer
    _queue: dict[str, JobFacts] = field(default_factory=dict)
    _final: dict[str, JobFacts] = field(default_factory=dict)  # from the accounting
    _missed_at: dict[str, float] = field(default_factory=dict)  # jobs to look up there, and since when
    _asked_at: float = float("-inf")
    _accounted_at: float = float("-inf")
    _told_at: float = float("-inf")  # when the accounting last answered

    @property
    def is_silent(self) -> bool:
        """True if squeue did not answer when it was last asked, or was never asked."""
        return self.answered_at < self._asked_at or self._asked_at == float("-inf")

    def facts(self, job_id: str) -> JobFacts | None:
        """Return the job as last seen; None if it was not seen yet."""
        self._refresh()
        if found := self._queue.get(job_id):
            if found.state != "FAILED":  # else the accounting is asked as well
                self._missed_at.pop(job_id, None)
            return found
        return self._left(job_id)

    def final(self, job_id: str) -> JobFacts | None:
        """Return a job that is over, with all that Slurm knows of its end; None while more may come."""
        found = self.facts(job_id)
        if found is None or not found.is_over:
            return None
        if found.state != "FAILED" or not self.has_accounting:
            return found
        told = self._left(job_id)  # tells which of its steps failed, and how
        return found if told is not None and told.state == "GONE" else told

    def named(self, name: str, comment: str) -> JobFacts | None:
        """Return a job by its name and comment; None if squeue listed none when it last answered."""
        self._refresh()
        return next(
            (job for job in self._queue.values() if job.name == name and job.comment == comment), None
        )

    def forget(self, job_id: str) -> None:
        self._missed_at.pop(job_id, None)
        self._final.pop(job_id, None)

    def expire(self) -> None:
        """Ask squeue again soon: after half the usual interval at most."""
        self._asked_at = min(self._asked_at, self.now() - self.squeue_every_s / 2)

    def _left(self, job_id: str) -> JobFacts | None:
        """Look up a job that squeue does not list, or does not tell all about."""
        if job_id in self._final:
            return self._final[job_id]
        if self.is_silent:
            return None
        self._missed_at.setdefault(job_id, self.now())
        self._account()
        if job_id in self._final:
            return self._final[job_id]
        return JobFacts(job_id=job_id, state="GONE") if self._is_gone(job_id) else None

    def _is_gone(self, job_id: str) -> bool:
        """True if neither squeue nor the accounting has known the job for long.

        While the accounting is down it may still come to tell more, so we wait longer, but not forever.
        """
        missed_at = self._missed_at.get(job_id, self.now())
        has_told = not self.has_accounting or self._told_at > missed_at
        return self.now() - missed_at > self.gone_after_s * (1 if has_told else PATIENCE)

    def _refresh(self) -> None:
        if self.now() - self._asked_at < self.squeue_every_s:
            return
        self._asked_at = self.now()
        self.queries += 1
        try:
            self._queue = parse_squeue(self.ask("squeue", "--me", "--states=all", "--noheader", "-o", SQUEUE))
            self.answered_at = self._asked_at
        except SlurmError:  # the controller may be restarting; jobs run on, and so do we
            pass

    def _account(self) -> None:
        due = self.now() - self._accounted_at >= self.sacct_every_s
        if not due or not self.has_accounting or not self._missed_at:
            return
        self._accounted_at = self.now()
        self.queries += 1
        jobs = ",".join(sorted(self._missed_at))
        try:
            text = self.ask("sacct", "--noheader", "--parsable2", f"--format={SACCT}", f"--jobs={jobs}")
        except SlurmError as error:
            self.has_accounting = "disabled" not in str(error)
            return
        self._told_at = self.now()
        over = {job_id: found for job_id, found in parse_sacct(text).items() if found.is_over}
        self._final |= over
        for job_id in over:
            self._missed_at.pop(job_id, None)
