"""Read how the ranks of an attempt ended, as their supervisors wrote it."""

from __future__ import annotations

import os

from train_entry.contract import AttemptDir, ContractError, RankExit, read_document


def rank_exits(attempt: AttemptDir, ranks: int) -> list[RankExit]:
    """The exits of the ranks that have ended."""
    try:
        there = set(os.listdir(attempt.path))  # one listing, which NFS answers afresh
    except FileNotFoundError:
        return []
    found = []
    for rank in range(ranks):
        if attempt.exit(rank).name in there:
            found.append(_exit(attempt, rank))
    return [ended for ended in found if ended is not None]


def _exit(attempt: AttemptDir, rank: int) -> RankExit | None:
    try:
        return read_document(attempt.exit(rank), RankExit)
    except ContractError:  # the file is not complete here yet
        return None
