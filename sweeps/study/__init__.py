"""A study from its first proposal to its last result: the loop, the ledger, limits and recovery."""
