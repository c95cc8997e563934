"""A product of shared columns and the sum of its parts over ranks, overlapped: chunks of tokens in turn.

While one chunk's sum is on its way the next is multiplied. ``chunks="auto"``: inside a host, whose cores move the bytes
themselves, there is nothing to overlap with, so one; between hosts as many as leave each chunk's payload at least
`CHUNK_BYTES`, so that a message's fixed cost stays small beside its bytes, and at most `MOST_CHUNKS`.
"""

from __future__ import annotations

import torch

from dtcomm.codecs import Codec
from dtcomm.collectives import Work, all_reduce, info
from dtcomm.collectives.reduce_ops import supports_two_shot_symmetric
from dtcomm.tp.comm_config import SMALL_BYTES, Wire
from dtcomm.tp.flash_all_reduce import Epilogue, Result, TwoStep, following

CHUNK_BYTES, MOST_CHUNKS = 128 * 1024, 8


def row_linear(
    x: torch.Tensor, weight: torch.Tensor, wire: Wire, chunks: int | str, after: Epilogue
) -> Result:
    """``x weight'`` [..., features] summed over ranks, with what follows. Nothing here has a gradient."""
    tokens = x.detach().reshape(-1, x.shape[-1])
    features = len(weight)
    y = torch.empty((len(tokens), features), dtype=x.dtype, device=x.device)
    normed = None if after.norm is None else torch.empty_like(y)
    codec = wire.codec_for(y.numel(), y.dtype)
    count = automatic(wire, y, codec) if isinstance(chunks, str) else chunks
    wire.traffic.count(y.numel(), codec.wire_bytes(y.numel(), y.dtype))
    parts = _parts(len(tokens), count)
    algorithm: str | None = wire.shots(codec, y.dtype)
    if wire.algorithm == "two_shot_symmetric" and not codec.lossless(y.dtype):
        algorithm = wire.algorithm if supports_two_shot_symmetric(y, codec, wire.group) else None
    if algorithm is None:
        steps = [
            TwoStep(tokens[start:stop] @ weight.detach().t(), wire) for start, stop in parts if start < stop
        ]
        for step in steps:
            step.gather()
        for step, (start, stop) in zip(steps, parts, strict=False):
            step.finish(
                y[start:stop], None if normed is None else normed[start:stop], after.rows(start, stop)
            )
    else:
        _all_reduced(tokens, weight, wire, codec, algorithm, parts, y, normed, after)
    shape = (*x.shape[:-1], features)
    return Result(y.view(shape), None if normed is None else normed.view(shape))


def _all_reduced(
    tokens: torch.Tensor,
    weight: torch.Tensor,
    wire: Wire,
    codec: Codec,
    algorithm: str,
    parts: list[tuple[int, int]],
    y: torch.Tensor,
    normed: torch.Tensor | None,
    after: Epilogue,
) -> None:
    # A few tokens are in the cache anyway, and for one term torch's own addition, with the same bits, begins sooner.
    terms = [each for each in (after.bias, after.residual) if each is not None]
    at_once = y.is_cpu and y.nbytes <= SMALL_BYTES and len(terms) == 1 and after.norm is None
    works: list[Work | None] = []
    for start, stop in parts:
        mine = y[start:stop]
        torch.mm(tokens[start:stop], weight.detach().t(), out=mine)
        then = None
        if after and not at_once and start < stop:
            then = following(mine, None if normed is None else normed[start:stop], after.rows(start, stop))
        works.append(
            all_reduce(
                mine,
                codec=codec,
                algorithm=algorithm,
                group=wire.group,
                async_op=len(parts) > 1,
                epilogue=then,
            )
        )
    for work in works:
        if work is not None:
            work.wait()
    if at_once:
        y.add_(terms[0].detach().reshape(-1, y.shape[-1]))


def automatic(wire: Wire, y: torch.Tensor, codec: Codec) -> int:
    """How many chunks of tokens."""
    most = min(MOST_CHUNKS, len(y), codec.wire_bytes(y.numel(), y.dtype) // CHUNK_BYTES)
    return 1 if most <= 1 or info(wire.group)["hosts"] == 1 else most


def _parts(tokens: int, chunks: int) -> list[tuple[int, int]]:
    length = max(1, -(-tokens // chunks))
    return [(start, min(start + length, tokens)) for start in range(0, tokens, length)] or [(0, 0)]
