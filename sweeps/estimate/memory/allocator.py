"""What torch's CUDA allocator takes for a tensor: a block, a little larger. Pure.

c10/cuda/CUDACachingAllocator.cpp: sizes are multiples of 512 bytes; from 10 MiB on a tensor gets memory of
its own, in multiples of 2 MiB, and of what is left over only more than 1 MiB is split off for others. Of
states that lie in one flat tensor it is nothing; of a model's 219 matrices, each with a gradient, it may be
1%.
"""

from __future__ import annotations

import math
from functools import lru_cache

SMALLEST_BYTES = 512
OWN_BYTES = 10 * 2**20
OWN_STEP_BYTES = 2 * 2**20
NOT_SPLIT_BYTES = 2**20

Tensors = tuple[tuple[int, float], ...]  # how many, and elements of each


def block_bytes(size: float) -> float:
    """Of a tensor of that many bytes."""
    if size >= OWN_BYTES:
        whole = OWN_STEP_BYTES * math.ceil(size / OWN_STEP_BYTES)
        if whole - size <= NOT_SPLIT_BYTES:
            return float(whole)
    return float(SMALLEST_BYTES * math.ceil(size / SMALLEST_BYTES))


@lru_cache(maxsize=1024)
def allocated(tensors: Tensors, element_bytes: int) -> float:
    """Bytes of tensors that are allocated one by one."""
    return sum([count * block_bytes(elements * element_bytes) for count, elements in tensors])
