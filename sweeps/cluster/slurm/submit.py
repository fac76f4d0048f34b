"""Submit jobs to Slurm, with retries, and cancel them: submitit's sbatch, and scancel."""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from submitit.core.utils import FailedJobError, FailedSubmissionError
from submitit.slurm.slurm import SlurmExecutor

from sweeps.cluster.node.environment import is_foreign
from sweeps.cluster.slurm.queries import JobFacts, JobWatch, SlurmError, ask, said
from sweeps.errors import SweepError

RESEND_S = 15.0  # after sbatch has refused: this user has too many jobs, or the controller restarts
REFUSED_S = 600.0  # of refusals before we give up
CANCEL_S = 120.0  # for a cancelled job to be gone; Slurm itself waits KillWait, 30 s, before it kills
ENDING_S = 10.0  # before an ending job counts as gone: its ranks write how they ended within seconds
AGAIN_S = 15.0  # before repeating a scancel that Slurm may not have heard
UNLISTED_S = 2.0  # after a scancel that Slurm heard, for squeue to list a job that is still there
LOOK_S = 0.2
# scancel's complaint about a job that is long over, or already ending.
PAST = re.compile(r"job id (\S+?):? (?:Invalid job id|Job/step already complet)")


class Executor(SlurmExecutor):  # type: ignore[misc]  # submitit is not followed by mypy
    """submitit's Slurm executor, with our own pace of submissions and our own environment for sbatch.

    -P keeps Python from importing a directory `sweeps` in the user's working directory instead of ours.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, python=f"{shlex.quote(sys.executable)} -P")

    def send(self, function: Callable[..., None], *arguments: str) -> str:
        """Submit a job and return its id. Raises SweepError with Slurm's words."""
        try:
            return str(self.submit(function, *arguments).job_id)
        except (FailedJobError, FailedSubmissionError) as error:
            name = self.parameters.get("job_name", "")
            raise SweepError(f"sbatch refused {name}: {_refusal(str(error))}") from error

    def script(self) -> str:
        """The script that sbatch would be given."""
        return str(self._make_submission_file_text(self._submitit_command_str, ""))

    def _throttle(self) -> None:
        """Do not wait: submitit allows 5 jobs a second, a controller takes hundreds, and we send few."""

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        unset = [word for name in os.environ if is_foreign(name) for word in ("-u", name)]
        return ["env", *unset, "sbatch", str(submission_file_path)]


def _refusal(text: str) -> str:
    """Extract Slurm's words from submitit's."""
    lines = [line for line in text.splitlines() if "error:" in line or "failure:" in line]
    return said("\n".join(lines)) or text.strip()


@dataclass
class Sending:
    """A job on its way to Slurm: if Slurm refuses it for a while, it is sent again.

    sbatch may fail although its job exists, if only the answer was lost. So a job is sent again only after
    squeue has answered and listed no such job.
    """

    send: Callable[[], str]
    find: Callable[[], str | None]  # the job's id, by its name
    watch: JobWatch
    say: Callable[[str], None]
    sent_at: float = float("-inf")
    refused_since: float | None = None

    def job_id(self) -> str | None:
        """Return the job's id; None: not yet. Raises SweepError with Slurm's words if it keeps refusing."""
        if self.refused_since is not None:
            if time.monotonic() - self.sent_at < RESEND_S:
                return None
            if found := self.find():
                return found
            if self.watch.answered_at <= self.sent_at:
                return None
        self.sent_at = time.monotonic()
        try:
            return self.send()
        except SweepError as error:
            if self.refused_since is None:
                self.refused_since = self.sent_at
                self.say(f"{error}; trying again for {REFUSED_S / 60:.0f} minutes")
            if self.sent_at - self.refused_since > REFUSED_S:
                raise
            return None


def scancel(job_ids: Sequence[str]) -> tuple[set[str], str]:
    """Tell jobs to end. Return the jobs that had already ended, and Slurm's refusal, if any."""
    try:
        ask("scancel", *job_ids)
    except SlurmError as error:
        past = set(PAST.findall(str(error))) & set(job_ids)
        return past, "" if past else str(error)
    return set(), ""


def cancel_jobs(job_ids: Sequence[str], watch: JobWatch) -> list[str]:
    """End jobs, all at once, and wait until they are gone. Return a line for each that may not be.

    A job that Slurm is ending counts as gone after some seconds: an epilog may take minutes.
    """
    began, told_at, left, refusal = time.monotonic(), float("-inf"), set(job_ids), ""
    while left and time.monotonic() - began < CANCEL_S:
        if time.monotonic() - told_at > AGAIN_S:
            over, refusal = scancel(sorted(left))
            left -= over
            told_at = time.monotonic()
            watch.expire()
        may_be_ending = time.monotonic() - began > ENDING_S
        seen = {job_id: watch.facts(job_id) for job_id in left}
        was_heard = not refusal and watch.answered_at - told_at > UNLISTED_S
        left -= {job_id for job_id, facts in seen.items() if _is_gone(facts, may_be_ending, was_heard)}
        if left:
            time.sleep(LOOK_S)
    why = refusal or f"it is still there {CANCEL_S:.0f} s after scancel"
    return [f"job {job_id} may still run: {why}; try `scancel {job_id}` later" for job_id in sorted(left)]


def _is_gone(facts: JobFacts | None, may_be_ending: bool, was_heard: bool) -> bool:
    """True if the job is gone. `was_heard`: Slurm heard scancel before squeue last listed the jobs."""
    if facts is None:
        return was_heard
    return facts.is_over or (may_be_ending and facts.is_ending)
