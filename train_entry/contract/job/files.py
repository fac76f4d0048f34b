"""The files of one attempt."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class AttemptDir:
    """The directory of one attempt.

    The orchestrator writes spec, ds_config, stop, submission, launcher and scheduler; the job the rest.
    """

    path: Path

    @property
    def spec(self) -> Path:
        return self.path / "spec.json"

    @property
    def ds_config(self) -> Path:
        return self.path / "ds_config.json"

    @property
    def job(self) -> Path:
        return self.path / "job.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.rank0.jsonl"

    @property
    def stop(self) -> Path:
        """The orchestrator creates this file to ask the job to time no further step."""
        return self.path / "stop"

    @property
    def rendezvous(self) -> Path:
        return self.path / "rendezvous"

    @property
    def address(self) -> Path:
        """The address at which ranks on several hosts meet."""
        return self.path / "address.json"

    @property
    def submission(self) -> Path:
        return self.path / "submission.json"

    @property
    def scheduler(self) -> Path:
        """The scheduler's statement on how the job ended."""
        return self.path / "scheduler.json"

    @property
    def submitit(self) -> Path:
        return self.path / "submitit"

    @property
    def launcher(self) -> Path:
        """The process that started the ranks over ssh."""
        return self.path / "launcher.json"

    def node(self, number: int) -> Path:
        """The process that leads the ranks of one host, if they were started over ssh."""
        return self.path / f"node{number}.json"

    def heartbeat(self, rank: int) -> Path:
        return self.path / f"heartbeat.rank{rank}.json"

    def outcome(self, rank: int) -> Path:
        return self.path / f"outcome.rank{rank}.json"

    def exit(self, rank: int) -> Path:
        return self.path / f"exit.rank{rank}.json"

    def log(self, rank: int) -> Path:
        return self.path / f"log.rank{rank}.txt"

    def stacks(self, rank: int) -> Path:
        """Python stacks of a rank that was ended because it was silent for too long."""
        return self.path / f"stacks.rank{rank}.txt"
