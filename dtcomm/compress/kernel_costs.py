"""What a scheme's kernels cost here, and what one encoding loses of a gradient: measured, for "auto"."""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable

import torch

from dtcomm.compress.powersgd import PowerSGD
from dtcomm.compress.spec import Scheme, wire_codec
from dtcomm.device.streams import Streams, copy_to_device, streams_of
from dtcomm.kernels import low_rank, ops

SAMPLE = 1 << 16  # elements of one gradient that errors and kernels are measured on


def kernel_seconds(
    chosen: Scheme, elements: int = SAMPLE, device: torch.device | None = None
) -> tuple[float, float]:
    """Seconds an element to encode, with a residual, and to decode, on this core; a few milliseconds of it.

    ``device``: on that, for which the host waits then.
    """
    x = torch.randn(elements, generator=torch.Generator().manual_seed(0))
    x = x if device is None else copy_to_device(x, device)
    lost = torch.zeros_like(x)
    fastest = _fastest if device is None else functools.partial(_fastest_there, streams_of(device))
    if isinstance(chosen, PowerSGD):
        side = math.isqrt(elements)
        left, right = x[: 2 * chosen.rank * side].clone().view(2, chosen.rank, side)
        square = side * side

        def passes() -> None:
            low_rank.project_rows(x[:square], lost[:square], right, left)
            if not chosen.alternate:
                low_rank.project_columns(x[:square], lost[:square], left, right)
            low_rank.expand(x[:square], lost[:square], left, right)

        return fastest(passes) / square, 0.0
    codec = wire_codec(chosen)
    payload = ops.encode(codec, x)
    out = torch.empty_like(x)
    feeds = None if codec.lossless(x.dtype) else lost
    encode = fastest(lambda: ops.encode(codec, x, residual=feeds, out=payload))
    return encode / elements, fastest(lambda: ops.decode(codec, payload, elements, out=out)) / elements


def relative_error(chosen: Scheme, gradient: torch.Tensor) -> float:
    """|what one encoding loses| / |gradient| of whole rows [rows, columns]; 0 where the gradient is 0 or not finite."""
    x = gradient.float().contiguous()
    norm = float(torch.linalg.vector_norm(x))
    if not 0 < norm < math.inf:
        return 0.0
    lost = torch.zeros(x.numel())
    if isinstance(chosen, PowerSGD):
        rows, columns = x.shape
        rank = min(chosen.rank, rows, columns)
        right = torch.randn(rank, columns, generator=torch.Generator().manual_seed(0))
        left = torch.empty(rank, rows)
        x = x.clone().view(-1)
        for _ in range(2):  # the second one stands for what a warm start brings
            low_rank.project_rows(x, lost, right, left)
            low_rank.orthonormalise(left)
            low_rank.project_columns(x, lost, left, right)
        low_rank.expand(x, lost, left, right)
    else:
        ops.encode(wire_codec(chosen), x.view(-1), residual=lost)
    return float(torch.linalg.vector_norm(lost)) / norm


def _fastest(call: Callable[[], object]) -> float:
    """Seconds of this thread; what others do on the core in between does not count."""
    call()
    times = []
    for _ in range(5):
        start = time.thread_time()
        call()
        times.append(time.thread_time() - start)
    return max(sorted(times)[1], 1e-9)


def _fastest_there(streams: Streams, call: Callable[[], object]) -> float:
    """Seconds of the device."""
    call()
    marks = [streams.mark()]
    for _ in range(5):
        call()
        marks.append(streams.mark())
    if not streams.query(marks[-1]):
        streams.synchronize(marks[-1])
    times = [streams.elapsed(*pair) for pair in itertools.pairwise(marks)]
    return max(sorted(times)[1], 1e-9)
