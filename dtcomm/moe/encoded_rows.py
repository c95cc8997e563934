"""Rows that are encoded one by one, so that a row's bytes do not depend on the rows beside it.

A collective encodes a message as one tensor, whose granules cross its rows. Here the payload of a row is that of the
row alone: rows can be chosen, reordered, sent to several ranks and passed on by a rank between them as bytes, and a
token's numbers do not depend on which other tokens are sent with it. All rows are encoded in one pass nevertheless: a
granule's fields are cut at the rows' ends and put together again as granules of rows.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from dtcomm.codecs import Codec
from dtcomm.codecs.base import Layout
from dtcomm.kernels import counter_rng, ops
from dtcomm.torch_compat import autograd_apply

_calls = itertools.count()


@dataclass(frozen=True, kw_only=True)
class EncodedRows:
    """Rows for experts as they arrived: encoded.

    `dtcomm.moe.dispatch` and `dispatch_padded` return them with ``encoded=True``, for experts that compute with the
    codec's bytes, such as a matrix multiplication of fp8 numbers with scales. docs/reference/wire-format.md says where
    scales and codes are. Gradients that the expert gives to ``gradient_edge`` reach the tokens.

    Attributes:
        payload: uint8, [..., rows, bytes]. ``dtcomm.decode(codec, payload[..., i, :], features, dtype)`` is row i.
        codec: The codec.
        features: Number of features of a row.
        dtype: The dtype of the tokens.
        gradient_edge: [..., rows, features] in this dtype: zeros that take no memory, through which gradients flow.

    Example::

        rows, route = dtcomm.moe.dispatch(x, experts, 64, codec="fp8_e4m3", encoded=True)
        outputs = fp8_expert(rows.payload, route.counts)   # or expert(rows.decode())
    """

    payload: torch.Tensor
    codec: Codec
    features: int
    dtype: torch.dtype
    gradient_edge: torch.Tensor

    def decode(self) -> torch.Tensor:
        """Return the rows, [..., rows, features]. Differentiable: gradients flow to the tokens."""
        decoded: torch.Tensor = autograd_apply(_Decode, self.gradient_edge, self)
        return decoded


class _Decode(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, edge: torch.Tensor, rows: EncodedRows) -> torch.Tensor:
        return decode_rows(rows.payload, rows.codec, rows.features, rows.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None


def gradient_edge(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """Return zeros of a shape that take the memory of one number, of the dtype and device of ``like``."""
    return like.new_zeros(()).expand(shape)


def encode_rows(x: torch.Tensor, codec: Codec, rank: int = 0) -> torch.Tensor:
    """Encode each row of ``x`` [rows, features] by itself, as uint8 [rows, ``codec.wire_bytes(features, x.dtype)``].

    Stochastic rounding draws other numbers at each call and on each rank. The result is the memory of ``x`` itself if
    nothing is to be done.
    """
    rows, features = x.shape
    x = x.detach().contiguous()
    row_bytes = codec.wire_bytes(features, x.dtype)
    if not x.numel():
        return x.new_zeros((rows, row_bytes), dtype=torch.uint8)
    if _is_plain(codec, features, x.dtype):
        return x.view(torch.uint8)
    key = counter_rng.mix_key(next(_calls), rank, 0)
    layout = None if codec.in_python else codec.layout(x.dtype)
    if layout is None or not _can_be_cut(codec, layout, features):
        return torch.stack([ops.encode(codec, row, key, number * features) for number, row in enumerate(x)])
    whole = features - features % layout.granule
    if whole == features:
        return ops.encode(codec, x, key).view(rows, row_bytes)
    parts = []
    if whole:
        parts.append(ops.encode(codec, x[:, :whole].contiguous(), key).view(rows, -1))
    parts += _encode_rest(x[:, whole:], codec, layout, key, rows * whole)
    missing = row_bytes - sum(part.shape[1] for part in parts)
    if missing:
        parts.append(x.new_zeros((rows, missing), dtype=torch.uint8))
    return torch.cat(parts, 1) if len(parts) > 1 else parts[0]


def decode_rows(
    payload: torch.Tensor, codec: Codec, features: int, dtype: torch.dtype, *, zero_row: bool = False
) -> torch.Tensor:
    """Decode rows that `encode_rows` encoded: uint8 [..., rows, bytes] to [..., rows, features].

    With ``zero_row`` a row of zeros follows the others, and ``payload`` is [rows, bytes].
    """
    if zero_row:
        rows = len(payload)
        output = payload.new_empty((rows + 1, features), dtype=dtype)
        output[rows].zero_()
        if rows and not codec.in_python and features % codec.layout(dtype).granule == 0:
            ops.decode(codec, payload.reshape(-1), rows * features, dtype, output[:rows].view(-1))
        else:
            output[:rows] = decode_rows(payload, codec, features, dtype)
        return output
    leading, row_bytes = payload.shape[:-1], payload.shape[-1]
    payload = payload.reshape(-1, row_bytes)
    rows = len(payload)
    if not rows * features:
        return payload.new_zeros((*leading, features), dtype=dtype)
    if _is_plain(codec, features, dtype):
        return payload.contiguous().view(dtype).view(*leading, features)
    layout = None if codec.in_python else codec.layout(dtype)
    if layout is None or not _can_be_cut(codec, layout, features):
        decoded = torch.stack([ops.decode(codec, row.clone(), features, dtype) for row in payload])
        return decoded.view(*leading, features)
    whole = features - features % layout.granule
    if whole == features:
        return ops.decode(codec, payload.contiguous(), rows * features, dtype).view(*leading, features)
    parts = []
    whole_bytes = layout.payload_bytes(whole)
    if whole:
        parts.append(
            ops.decode(codec, payload[:, :whole_bytes].contiguous(), rows * whole, dtype).view(rows, whole)
        )
    parts.append(_decode_rest(payload[:, whole_bytes:], codec, layout, features - whole, dtype))
    decoded = torch.cat(parts, 1) if len(parts) > 1 else parts[0]
    return decoded.reshape(*leading, features)


def _is_plain(codec: Codec, features: int, dtype: torch.dtype) -> bool:
    """Return whether a row's payload is the row itself."""
    return codec.name == "none" and codec.wire_bytes(features, dtype) == features * dtype.itemsize


def _can_be_cut(codec: Codec, layout: Layout, features: int) -> bool:
    """Return whether granules that cross rows can be cut into the granules of rows; else each row is a call."""
    if features % layout.granule == 0:
        return True
    if layout.kept or layout.trailer or codec.blocks_compete:
        return False  # positions, a scale or a budget of the whole granule
    # Zeros behind the last element of a row change a zero point, outliers and a mean, but no largest magnitude.
    return features % layout.block == 0 or (
        layout.fields < 2 and not layout.spike_bytes and layout.code_bits > 1
    )


def _regions(layout: Layout) -> list[int]:
    """Return the bytes per block of each region of a granule, in order: scales, zero points, outliers, bit planes."""
    regions = [layout.field_bytes] * layout.fields
    if layout.spike_bytes:
        regions += [2 * layout.field_bytes, layout.spike_bytes - 2 * layout.field_bytes]
    planes = [bits for bits in (64, 32, 16, 8, 4, 2, 1) if layout.code_bits & bits]
    return regions + [layout.block * bits // 8 for bits in planes]


def _encode_rest(x: torch.Tensor, codec: Codec, layout: Layout, key: int, offset: int) -> list[torch.Tensor]:
    """Return the regions of each row of ``x``, which is shorter than a granule, as [rows, bytes]."""
    rows, blocks = len(x), layout.blocks(x.shape[1])
    flat = functional.pad(x, (0, blocks * layout.block - x.shape[1])).reshape(-1)
    flat = functional.pad(flat, (0, -flat.numel() % layout.granule))
    granules = ops.encode(codec, flat.contiguous(), key, offset).view(flat.numel() // layout.granule, -1)
    per_granule = layout.granule // layout.block
    parts, begin = [], 0
    for unit in _regions(layout):
        region = granules[:, begin : begin + per_granule * unit].reshape(-1, unit)
        parts.append(region[: rows * blocks].reshape(rows, blocks * unit))
        begin += per_granule * unit
    return parts


def _decode_rest(
    payload: torch.Tensor, codec: Codec, layout: Layout, features: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return the rows [rows, features], shorter than a granule, whose regions ``payload`` holds."""
    rows, blocks = len(payload), layout.blocks(features)
    per_granule = layout.granule // layout.block
    count = -(-rows * blocks // per_granule)
    parts, begin = [], 0
    for unit in _regions(layout):
        region = payload[:, begin : begin + blocks * unit].reshape(-1)
        region = functional.pad(region, (0, count * per_granule * unit - region.numel()))
        parts.append(region.view(count, per_granule * unit))
        begin += blocks * unit
    padding = layout.bytes(layout.granule) - sum(part.shape[1] for part in parts)
    granules = functional.pad(torch.cat(parts, 1) if len(parts) > 1 else parts[0], (0, padding))
    flat = ops.decode(codec, granules.contiguous(), count * layout.granule, dtype)
    width = blocks * layout.block
    return flat[: rows * width].view(rows, width)[:, :features]
