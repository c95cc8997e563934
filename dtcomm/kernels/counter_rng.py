"""A counter-based random number generator for stochastic rounding; csrc/codec/counter_rng.h has the same numbers.

A number is a function of a 64-bit key and the index of an element, so neither chunking nor threads change it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_M, _M64 = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF
GOLDEN_RATIO = 0x9E3779B97F4A7C15


def mix32(h: Any) -> Any:
    """Hash 32-bit words (an int, an array of uint32, or a tensor of int64) by a bijection that spreads every bit."""
    h = h ^ (h >> 16)
    h = (h * 0x7FEB352D) & _M
    h = h ^ (h >> 15)
    h = (h * 0x846CA68B) & _M
    return h ^ (h >> 16)


def uniform(key: int, offset: int, count: int) -> npt.NDArray[np.float32]:
    """Random multiples of 2^-24 in [0, 1) of `count` elements, the first of which has index `offset`."""
    index = np.uint64(offset) + np.arange(count, dtype=np.uint64)
    low, high = key & _M, key >> 32 & _M
    between = mix32((high + mix32((low + 0x85EBCA6B) & _M)) & _M)
    pages, page_of = np.unique(index >> np.uint64(32), return_inverse=True)
    starts = [mix32((low + mix32((high + mix32((int(page) + 0x9E3779B9) & _M)) & _M)) & _M) for page in pages]
    before = np.array(starts, np.uint32)[page_of]
    h = index.astype(np.uint32) ^ before
    h ^= h >> np.uint32(16)
    h *= np.uint32(0x7FEB352D)
    h += np.uint32(between)
    h ^= h >> np.uint32(15)
    h *= np.uint32(0x846CA68B)
    h ^= h >> np.uint32(16)
    return (h >> np.uint32(8)).astype(np.float32) * np.float32(2**-24)


def absorb(h: int, *words: int) -> int:
    """A 64-bit hash of `h` and the words, in order."""
    for word in words:
        h = (h + word) & _M64
        h ^= h >> 30
        h = (h * 0xBF58476D1CE4E5B9) & _M64
        h ^= h >> 27
        h = (h * 0x94D049BB133111EB) & _M64
        h ^= h >> 31
    return h


def mix_key(seed: int, rank: int, step: int) -> int:
    """The key of one encoding: the seed of the call, the rank, and the number of the rank's encoding."""
    return absorb(seed, GOLDEN_RATIO, rank, step)
