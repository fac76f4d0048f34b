"""Pass on every change of a trial: first to the record, then to the sampler, then to observers."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from sweeps.cluster.base import JobHandle
from sweeps.search.proposer import Proposer
from sweeps.study.ledger import Ledger
from train_entry.contract import Trial


class Observer(Protocol):
    """A listener that hears of a trial's change after it is on record. It may be slow, but may not raise."""

    def changed(self, trial: Trial) -> None: ...

    def tick(self, running: dict[int, JobHandle]) -> None:
        """Act once in every iteration of the loop."""

    def message(self, text: str) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Clock:
    now: Callable[[], float] = time.time
    sleep: Callable[[float], None] = time.sleep


@dataclass(kw_only=True)
class Journal:
    """A study's ledger, and those who hear of its changes."""

    ledger: Ledger
    proposer: Proposer
    observer: Observer
    clock: Clock
    _said: set[str] = field(default_factory=set)

    def record(self, trial: Trial) -> Trial:
        self.ledger.put(trial)
        self.observer.changed(trial)
        return trial

    def close(self, trial: Trial) -> None:
        """Record a trial that has ended, and let the proposer learn from it."""
        self.ledger.put(trial)
        self.proposer.closed(trial)
        self.observer.changed(trial)

    def say(self, text: str) -> None:
        self.observer.message(text)

    def say_once(self, topic: str, text: str) -> None:
        """Say it, unless something was said on this topic since the topic was last dropped."""
        if topic not in self._said:
            self._said.add(topic)
            self.say(text)

    def drop(self, topic: str) -> None:
        self._said.discard(topic)
