"""Size of the block that torch's CUDA allocator hands out for a tensor, a little larger than it. Pure.

c10/cuda/CUDACachingAllocator.cpp: sizes are multiples of 512 bytes. A tensor of 10 MiB or more gets its own
memory in multiples of 2 MiB; a remainder is split off for others only if it is more than 1 MiB. For states in
one flat tensor the difference is nothing; for a model's 219 matrices, each with a gradient, it may be 1%.
"""

from __future__ import annotations

import math
from functools import lru_cache

SMALLEST_BYTES = 512
OWN_BYTES = 10 * 2**20
OWN_STEP_BYTES = 2 * 2**20
NOT_SPLIT_BYTES = 2**20

Tensors = tuple[tuple[int, float], ...]  # (number of tensors, elements of each)


def block_bytes(size: float) -> float:
    """Bytes of the block for a tensor of `size` bytes."""
    if size >= OWN_BYTES:
        whole = OWN_STEP_BYTES * math.ceil(size / OWN_STEP_BYTES)
        if whole - size <= NOT_SPLIT_BYTES:
            return float(whole)
    return float(SMALLEST_BYTES * math.ceil(size / SMALLEST_BYTES))


@lru_cache(maxsize=1024)
def allocated(tensors: Tensors, element_bytes: int) -> float:
    """Total bytes of tensors that are allocated one by one."""
    return sum([count * block_bytes(elements * element_bytes) for count, elements in tensors])
