"""Option rotate=hadamard: every block times a random orthogonal matrix, H diag(signs) / sqrt(block)."""

from __future__ import annotations

import numpy as np

from dtcomm.codecs import Codec
from dtcomm.kernels import counter_rng
from dtcomm.kernels.reference.floats import Floats, canonical

SEED = 8135563  # seed of the signs; docs/reference/wire-format.md says why this one


def rotates(codec: Codec) -> bool:
    """Whether terms of the codec are added in the rotated domain."""
    return getattr(codec, "rotate", "none") == "hadamard"


def rotate(codec: Codec, x: Floats) -> Floats:
    """`x` as whole rotated blocks; the last block is padded with zeros."""
    block = codec.layout().block
    rows = np.pad(x, (0, -len(x) % block)).reshape(-1, block)
    return _butterflies(rows * _signs(block) * _norm(block)).reshape(-1)


def rotate_back(codec: Codec, rotated: Floats, numel: int) -> Floats:
    """The `numel` floats whose rotation is `rotated`."""
    block = codec.layout().block
    rows = _butterflies(rotated.reshape(-1, block) * _norm(block)) * _signs(block)
    return canonical(rows.reshape(-1)[:numel])


def _signs(block: int) -> Floats:
    """1 or -1 for each element of a block."""
    negative = counter_rng.mix32(np.arange(block, dtype=np.uint32) + np.uint32(SEED)) >> np.uint32(31) == 1
    return np.where(negative, np.float32(-1), np.float32(1))


def _norm(block: int) -> np.float32:
    return np.float32(1 / np.sqrt(np.float64(block)))


def _butterflies(rows: Floats) -> Floats:
    """Each row times the Hadamard matrix: neighbours first, halves of the block last."""
    shape, half = rows.shape, 1
    while half < shape[1]:
        pairs = rows.reshape(shape[0], shape[1] // (2 * half), 2, half)
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        rows = np.stack([first + second, first - second], axis=2).reshape(shape)
        half *= 2
    return rows
