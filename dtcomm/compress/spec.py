"""What a tensor may be compressed with: a codec, which any collective takes, or a compressor with a memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TypeAlias

import torch

from dtcomm.codecs import Codec, RandK, TopK, codec
from dtcomm.compress import dgc, powersgd
from dtcomm.compress.dgc import DGC
from dtcomm.compress.powersgd import PowerSGD

Scheme: TypeAlias = Codec | PowerSGD | DGC

#: Compressors, by the name that their specs start with.
COMPRESSORS: dict[str, Callable[[str], PowerSGD | DGC]] = {powersgd.NAME: PowerSGD.parse, dgc.NAME: DGC.parse}


def scheme(spec: str | Scheme) -> Scheme:
    """What `spec` describes; a scheme is returned unchanged. Raises TypeError or ValueError as `codec` does.

    ``A/B``: what A sends of a tensor travels in codec B: the factors of ``powersgd:rank=4/int8``, the values of
    ``topk:ratio=0.01/fp16``.
    """
    if isinstance(spec, PowerSGD | DGC):
        return spec
    if not isinstance(spec, str):
        return codec(spec)
    head, slash, tail = spec.strip().partition("/")
    name = head.partition(":")[0]
    if name in COMPRESSORS:
        return COMPRESSORS[name](spec)
    if not slash:
        return codec(spec)
    outer = codec(head)
    if not isinstance(outer, TopK | RandK):
        raise ValueError(
            f"{spec}: {head} leaves nothing for another codec; valid: topk, randk, powersgd, dgc"
        )
    return dataclasses.replace(outer, values=tail)


def wire(chosen: Scheme) -> Codec:
    """The codec that a scheme other than PowerSGD travels in."""
    assert not isinstance(chosen, PowerSGD)
    return chosen.topk if isinstance(chosen, DGC) else chosen


def matrix_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Rows and columns of a gradient as compressors see it: the first dimension by all others."""
    rows = tensor.shape[0]
    return rows, tensor.numel() // rows if rows else 0
