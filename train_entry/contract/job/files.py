"""The files of one attempt: who writes which."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class AttemptDir:
    """One launch. The job writes all but spec, config, `stop` and what a scheduler says."""

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
        """Its presence asks the job to time no further step. The orchestrator writes it."""
        return self.path / "stop"

    @property
    def rendezvous(self) -> Path:
        return self.path / "rendezvous"

    @property
    def address(self) -> Path:
        """Where ranks on several hosts meet."""
        return self.path / "address.json"

    @property
    def submission(self) -> Path:
        return self.path / "submission.json"

    @property
    def scheduler(self) -> Path:
        """The scheduler's word on how the job ended."""
        return self.path / "scheduler.json"

    @property
    def submitit(self) -> Path:
        return self.path / "submitit"

    @property
    def launcher(self) -> Path:
        """The process that started the ranks over ssh."""
        return self.path / "launcher.json"

    def node(self, number: int) -> Path:
        """What leads the ranks of one host, where they were started over ssh."""
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
        """Python stacks of a rank that was ended for being silent."""
        return self.path / f"stacks.rank{rank}.txt"
