"""Runs codecs that are written in Python: the sums and the error feedback around their functions, in torch.

The arithmetic is that of `reference`, for tensors of any device, on the current stream. Callers have checked the
arguments.
"""

from __future__ import annotations

from typing import cast

import torch

from dtcomm.codecs import Codec
from dtcomm.codecs.base import RunsInTorch
from dtcomm.kernels import counter_rng
from dtcomm.kernels.types import Combine


def combine(call: Combine) -> None:
    """Run one call (see :class:`Combine`)."""
    codec, numel = cast(RunsInTorch, call.codec), call.numel
    # Outputs may be inference tensors, which only inference mode writes.
    with torch.inference_mode():
        terms = [_decode(codec, payload, numel) for payload in call.payloads]
        local = None if call.local is None else call.local.reshape(-1).float()
        residual = None if call.residual is None else call.residual.view(-1)
        if residual is not None:
            local = residual if local is None else local + residual
        if local is not None:
            terms.insert(call.position, local)
        total = terms[0]
        for term in terms[1:]:
            total = total + term
        if call.divisor != 1:
            # A tensor, because CUDA multiplies by the reciprocal of a number.
            total = total / total.new_full((1,), float(call.divisor))
        if call.payload_out is None:
            if call.out is not None:
                call.out.view(-1).copy_(total)
            if residual is not None:
                residual.zero_()
            return
        size = codec.payload_bytes(numel)
        call.payload_out[:size].copy_(codec.encode(total, counter_rng.absorb(call.key, call.offset)))
        call.payload_out[size:].zero_()
        if residual is None and call.out is None:
            return
        decoded = _decode(codec, call.payload_out, numel)
        if residual is not None:
            error = (total - decoded) * call.divisor
            residual.copy_(torch.where(error.isfinite(), error, residual))
        if call.out is not None:
            call.out.view(-1).copy_(decoded)


def decode(codec: Codec, payload: torch.Tensor, numel: int, out: torch.Tensor) -> None:
    """`out` <- the `numel` elements of the payload."""
    with torch.inference_mode():
        out.view(-1).copy_(_decode(cast(RunsInTorch, codec), payload, numel))


def _decode(codec: RunsInTorch, payload: torch.Tensor, numel: int) -> torch.Tensor:
    return codec.decode(payload[: codec.payload_bytes(numel)], numel)
