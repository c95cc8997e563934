"""Measures what the kernels of a scheme cost on this machine, and what one encoding loses, for "auto"."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable

import torch

from dtcomm.compress.powersgd import PowerSGD
from dtcomm.compress.spec import LevelCodecs, Scheme, wire_codec
from dtcomm.device.streams import Streams, copy_to_device, streams_of
from dtcomm.kernels import low_rank, ops

SAMPLE_ELEMENTS = 1 << 16  # of one gradient, on which errors and kernels are measured
CALLS = 5


def kernel_seconds(
    scheme: Scheme, elements: int = SAMPLE_ELEMENTS, device: torch.device | None = None
) -> tuple[float, float]:
    """Return the seconds for each element to encode, with a residual, and to decode; takes a few milliseconds.

    Args:
        scheme: The scheme. PowerSGD's passes count as encoding.
        elements: The size of the tensor.
        device: The device, for which the host waits; None: this CPU core.
    """
    x = torch.randn(elements, generator=torch.Generator().manual_seed(0))
    x = x if device is None else copy_to_device(x, device)
    streams = streams_of(x.device)
    lost = torch.zeros_like(x)
    if isinstance(scheme, PowerSGD):
        side = math.isqrt(elements)
        left, right = x[: 2 * scheme.rank * side].clone().view(2, scheme.rank, side)
        square = side * side

        def run_passes() -> None:
            low_rank.project_rows(x[:square], lost[:square], right, left)
            if not scheme.alternate:
                low_rank.project_columns(x[:square], lost[:square], left, right)
            low_rank.expand(x[:square], lost[:square], left, right)

        return _call_seconds(streams, run_passes) / square, 0.0
    assert not isinstance(scheme, LevelCodecs)  # `AutoConfig` refuses it
    codec = wire_codec(scheme)
    payload = ops.encode(codec, x)
    out = torch.empty_like(x)
    residual = None if codec.lossless(x.dtype) else lost
    encode = _call_seconds(streams, lambda: ops.encode(codec, x, residual=residual, out=payload))
    decode = _call_seconds(streams, lambda: ops.decode(codec, payload, elements, out=out))
    return encode / elements, decode / elements


def relative_error(scheme: Scheme, gradient: torch.Tensor) -> float:
    """Return |what one encoding loses| / |gradient| of whole rows [rows, columns]; 0 if that is 0 or not finite."""
    x = gradient.float().contiguous()
    norm = float(torch.linalg.vector_norm(x))
    if not 0 < norm < math.inf:
        return 0.0
    lost = torch.zeros(x.numel())
    if isinstance(scheme, PowerSGD):
        rows, columns = x.shape
        rank = min(scheme.rank, rows, columns)
        right = torch.randn(rank, columns, generator=torch.Generator().manual_seed(0))
        left = torch.empty(rank, rows)
        x = x.clone().view(-1)
        for _ in range(2):  # the second iteration stands for a warm start
            low_rank.project_rows(x, lost, right, left)
            low_rank.orthonormalise(left)
            low_rank.project_columns(x, lost, left, right)
        low_rank.expand(x, lost, left, right)
    else:
        assert not isinstance(scheme, LevelCodecs)
        ops.encode(wire_codec(scheme), x.view(-1), residual=lost)
    return float(torch.linalg.vector_norm(lost)) / norm


def _call_seconds(streams: Streams, call: Callable[[], object]) -> float:
    """Return the second shortest of some calls: of the device, or of this thread, whose clock stops for others."""
    call()
    if streams.device.type == "cpu":
        marks = [time.thread_time()]
        for _ in range(CALLS):
            call()
            marks.append(time.thread_time())
        seconds = [end - begin for begin, end in itertools.pairwise(marks)]
    else:
        events = [streams.mark()]
        for _ in range(CALLS):
            call()
            events.append(streams.mark())
        if not streams.query(events[-1]):
            streams.synchronize(events[-1])
        seconds = [streams.elapsed(*pair) for pair in itertools.pairwise(events)]
    return max(sorted(seconds)[1], 1e-9)
