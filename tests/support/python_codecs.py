"""Codecs written in Python that have the bytes of dtcomm's own, for tests that compare the two."""

from __future__ import annotations

import torch

from dtcomm import codecs
from dtcomm.codecs import PythonCodec

BLOCK, GRANULE = 32, 1024
GRANULE_BYTES = GRANULE + 2 * GRANULE // BLOCK
TINY = torch.finfo(torch.float32).tiny
NAN_BITS = torch.tensor(0x7FC0, dtype=torch.int16)  # torch gives a NaN other bits in a vector
# The largest bf16 that times 127 is finite.
LARGEST_SCALE = (torch.tensor(torch.finfo(torch.float32).max / 127).view(torch.int32) & -65536).view(
    torch.float32
)


def encode_bf16(x: torch.Tensor) -> torch.Tensor:
    """Return the bytes of codec bf16."""
    halves = x.to(torch.bfloat16).view(torch.int16)
    return torch.where(x.isnan(), NAN_BITS.to(x.device), halves).view(torch.uint8)


def decode_bf16(payload: torch.Tensor, n: int) -> torch.Tensor:
    """Return the elements of a payload of codec bf16."""
    return payload.view(torch.bfloat16).float()


def bf16_bytes(n: int) -> int:
    """Return the bytes of n elements in codec bf16, without padding."""
    return 2 * n


def encode_int8(x: torch.Tensor) -> torch.Tensor:
    """Return the bytes of codec int8."""
    n = x.numel()
    rows = torch.cat([x, x[-1:].expand(-n % BLOCK)]).view(-1, BLOCK)
    top = rows.abs().amax(1)
    bad = ~top.isfinite()
    scale = torch.minimum((top / torch.full_like(top, 127)).bfloat16().float(), LARGEST_SCALE.to(x.device))
    scale = torch.where(bad, torch.nan, torch.where(scale < TINY, 0.0, scale))
    inverse = torch.where(scale > 0, 1 / scale, 0.0)
    t = (rows * inverse[:, None]).clamp(-127, 127).round()
    codes = torch.where(bad[:, None], 0.0, t).to(torch.int8).view(-1)
    codes[n:] = 0
    fields, codes = encode_bf16(scale), codes.view(torch.uint8)
    whole = n // GRANULE
    split = whole * GRANULE // BLOCK * 2
    head = torch.cat(
        [fields[:split].view(whole, GRANULE_BYTES - GRANULE), codes[: whole * GRANULE].view(whole, GRANULE)],
        1,
    )
    payload = torch.cat([head.view(-1), fields[split:], codes[whole * GRANULE :]])
    return torch.cat([payload, payload.new_zeros(int8_bytes(n) - payload.numel())])


def decode_int8(payload: torch.Tensor, n: int) -> torch.Tensor:
    """Return the elements of a payload of codec int8."""
    whole, rest = divmod(n, GRANULE)
    blocks = -(-rest // BLOCK)
    head = payload[: whole * GRANULE_BYTES].view(whole, GRANULE_BYTES)
    tail = payload[whole * GRANULE_BYTES :]
    fields = torch.cat([head[:, : 2 * GRANULE // BLOCK].reshape(-1), tail[: 2 * blocks]])
    codes = torch.cat([head[:, 2 * GRANULE // BLOCK :].reshape(-1), tail[2 * blocks : (2 + BLOCK) * blocks]])
    scale = fields.view(torch.bfloat16).float()
    return (codes.view(torch.int8).view(-1, BLOCK).float() * scale[:, None]).view(-1)[:n]


def int8_bytes(n: int) -> int:
    """Return the bytes of n elements in codec int8."""
    whole, rest = divmod(n, GRANULE)
    return whole * GRANULE_BYTES + -(-(2 + BLOCK) * -(-rest // BLOCK) // 16) * 16


def encode_scaled(x: torch.Tensor, key: int) -> torch.Tensor:
    """Return 8 bits of each element relative to the chunk's largest, rounded at random; no granule stands alone."""
    generator = torch.Generator(x.device).manual_seed(key)
    top = x.abs().max().clamp(min=1e-30)
    noise = torch.rand(x.shape, generator=generator, device=x.device)
    codes = (x / top * 127 + noise).floor().clamp(-127, 127).to(torch.int8)
    return torch.cat([top.view(1).view(torch.uint8), codes.view(torch.uint8)])


def decode_scaled(payload: torch.Tensor, n: int) -> torch.Tensor:
    """Return the elements of a payload of `encode_scaled`."""
    return payload[4:].view(torch.int8).float() * (payload[:4].view(torch.float32) / 127)


def scaled_bytes(n: int) -> int:
    """Return the bytes of n elements by `encode_scaled`."""
    return 4 + n


def register() -> dict[str, PythonCodec]:
    """Register the codecs; return them by the name of the codec of dtcomm that has the same bytes, or by their own."""
    return {
        "bf16": codecs.custom("python_bf16", encode_bf16, decode_bf16, bf16_bytes),
        "int8": codecs.custom("python_int8", encode_int8, decode_int8, int8_bytes),
        "scaled": codecs.custom("scaled", encode_scaled, decode_scaled, scaled_bytes),
    }
