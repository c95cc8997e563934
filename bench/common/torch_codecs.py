"""The peers of `bench.kernels`: codecs as a competent user writes them with torch's operations.

Vectorised, without Python loops over elements or blocks, and with the same result up to rounding: block-wise scales in
bf16, codes to nearest, clamped, and packed into bytes, of odd widths into planes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from dtcomm.codecs import Codec, Integer


def pack(codes: torch.Tensor, bits: int) -> list[torch.Tensor]:
    """Pack uint8 codes into one tensor of bytes for each plane of `bits`."""
    if bits == 8:
        return [codes]
    planes, low = [], 0
    for unit in (4, 2, 1):
        if bits & unit:
            digits = (codes >> low & (1 << unit) - 1).view(-1, 8 // unit)
            packed = digits[:, 0]
            for i in range(1, 8 // unit):
                packed = packed | digits[:, i] << i * unit
            planes.append(packed)
            low += unit
    return planes


def unpack(planes: list[torch.Tensor], bits: int) -> torch.Tensor:
    """Return the codes that `pack` packed."""
    if bits == 8:
        return planes[0]
    codes, low = None, 0
    for unit, plane in zip([unit for unit in (4, 2, 1) if bits & unit], planes, strict=True):
        shifts = torch.arange(0, 8, unit, dtype=torch.uint8)
        digits = (plane[:, None] >> shifts & (1 << unit) - 1).view(-1)
        codes = digits if codes is None else codes | digits << low
        low += unit
    assert codes is not None
    return codes


def integer_encode(codec: Integer, x: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Return planes and scales of symmetric block-scaled codes; zero blocks are allowed."""
    blocks = x.view(-1, codec.block)
    scale = (blocks.abs().amax(1, keepdim=True) / codec.levels).to(torch.bfloat16)
    inverse = torch.where(scale > 0, 1 / scale.float(), 0.0)
    codes = torch.clamp(torch.round(blocks * inverse), -codec.levels, codec.levels).to(torch.int8)
    return pack(codes.view(torch.uint8).view(-1), codec.bits), scale


def integer_decode(codec: Integer, planes: list[torch.Tensor], scale: torch.Tensor) -> torch.Tensor:
    """Return the values that `integer_encode` encoded."""
    codes = unpack(planes, codec.bits).view(torch.int8)
    if codec.bits < 8:
        codes = codes << 8 - codec.bits >> 8 - codec.bits  # the sign
    return codes.view(-1, codec.block) * scale.float()


def peers(codec: Codec, x: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Return the torch version of each verb, for codecs and verbs that have a plain form in torch."""
    name = str(codec)
    if name in ("fp16", "bf16"):
        dtype = torch.float16 if name == "fp16" else torch.bfloat16
        half, back = torch.empty(x.shape, dtype=dtype), torch.empty_like(x)
        return {"encode": lambda: half.copy_(x), "decode": lambda: back.copy_(half)}
    if isinstance(codec, Integer) and name == codec.name:
        encoded = integer_encode(codec, x)
        return {
            "encode": lambda: integer_encode(codec, x),
            "decode": lambda: integer_decode(codec, *encoded),
        }
    if codec.name == "topk":
        # As many of each granule, in any order: what the codec sends.
        granules = x[: x.numel() // codec.granularity * codec.granularity].view(-1, codec.granularity)
        kept = codec.layout().kept_of(codec.granularity)
        return {"encode with residual": lambda: torch.topk(granules.abs(), kept, sorted=False)}
    return {}
