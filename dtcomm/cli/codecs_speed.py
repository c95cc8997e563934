"""How fast one core encodes and decodes: a short measurement on this machine, by the thread's own clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from dtcomm.cli.codecs_error import KEY
from dtcomm.codecs import Codec
from dtcomm.kernels.ops import decode, encode

#: Seconds for each of the two figures of a codec; a reference kernel needs longer for its three calls.
SECONDS = 0.03
FEWEST_CALLS = 3


@dataclass(frozen=True, kw_only=True)
class Speed:
    """GB/s (1e9 bytes) of the fp32 side, whatever the payload's size."""

    encode: float
    decode: float


def measure(codec: Codec, size: int, seconds: float = SECONDS) -> Speed:
    """The median speed at `size` bytes of fp32 in reused buffers, as hot paths have them."""
    x = torch.randn(max(1, size // 4), generator=torch.Generator().manual_seed(0))
    payload = encode(codec, x, key=KEY)
    out = torch.empty_like(x)
    bytes_ = x.numel() * 4
    return Speed(
        encode=bytes_ / _median(lambda: encode(codec, x, key=KEY, out=payload), seconds) / 1e9,
        decode=bytes_ / _median(lambda: decode(codec, payload, x.numel(), out=out), seconds) / 1e9,
    )


def _median(call: Callable[[], object], seconds: float) -> float:
    """Seconds of one call. What others do on this core in between does not count."""
    call()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < FEWEST_CALLS or time.perf_counter() < end:
        start = time.thread_time()
        call()
        times.append(time.thread_time() - start)
    return max(statistics.median(times), 1e-9)
