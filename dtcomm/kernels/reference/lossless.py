"""The lossless codec: exponents as codes of a few bits, signs and mantissas as they are.

Unlike those of other codecs its functions take whole payloads, because the granules have no fixed size.
"""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt

from dtcomm.codecs.base import LOSSLESS_GRANULE as GRANULE
from dtcomm.codecs.cast import LOSSLESS_HEAD_BYTES as HEAD_BYTES
from dtcomm.kernels.reference.floats import Bytes

WIDTHS = (1, 2, 3, 4)  # bits of a code
PLAIN = 8  # the width that stands for exponents without codes
VERBATIM, CODED = 0, 1


def encode(raw: Bytes, size: int) -> Bytes:
    """The payload of elements of `size` bytes, 2 (bf16) or 4 (fp32), whose bytes are `raw`."""
    if not len(raw):
        return raw
    elements = raw.view(np.uint16) if size == 2 else raw.view(np.uint32)
    granules = [_encode_granule(elements[i : i + GRANULE], size) for i in range(0, len(elements), GRANULE)]
    coded = np.concatenate(granules)
    verbatim = len(coded) >= len(raw)
    body = raw if verbatim else coded
    head = struct.pack("<QBB6x", HEAD_BYTES + len(body), VERBATIM if verbatim else CODED, size)
    return np.concatenate([np.frombuffer(head, np.uint8), body])


def decode(payload: Bytes, numel: int, size: int) -> Bytes:
    """The bytes of the `numel` elements of a payload. Raises ValueError, which says what is wrong with it."""
    if numel == 0:
        if len(payload):
            raise ValueError("is not empty")
        return payload
    if len(payload) < HEAD_BYTES:
        raise ValueError("is shorter than its head")
    length, mode, stated_size = struct.unpack("<QBB", payload[:10].tobytes())
    body = payload[HEAD_BYTES:]
    if length != len(payload):
        raise ValueError("has another length than its head states")
    if stated_size != size:
        raise ValueError("holds elements of another size")
    if mode == VERBATIM:
        if len(body) != numel * size:
            raise ValueError("has another number of elements")
        return body
    if mode != CODED:
        raise ValueError("has an unknown mode")
    parts, at = [], 0
    for start in range(0, numel, GRANULE):
        n = min(GRANULE, numel - start)
        elements, used = _decode_granule(body[at:], n, size)
        parts.append(elements)
        at += used
    if at != len(body):
        raise ValueError("goes on behind its last granule")
    return np.concatenate(parts)


def _encode_granule(elements: npt.NDArray[np.uint16] | npt.NDArray[np.uint32], size: int) -> Bytes:
    n = len(elements)
    upper = (elements >> (8 * size - 16)).astype(np.uint16)
    exponents = (upper >> 7 & 0xFF).astype(np.uint8)
    signs = (upper >> 8 & 0x80 | upper & 0x7F).astype(np.uint8)
    lower = elements.astype(np.uint16).view(np.uint8) if size == 4 else np.zeros(0, np.uint8)
    width, base, escapes = _best_code(exponents)
    parts = [np.frombuffer(struct.pack("<BBH", width, base, escapes), np.uint8), lower, signs]
    if width == PLAIN:
        return np.concatenate([*parts, exponents])
    escape = (1 << width) - 1
    codes = np.minimum(np.uint8(base) - exponents, escape).astype(np.uint8)
    planes = [np.packbits(codes >> bit & 1, bitorder="little") for bit in range(width)]
    assert sum(map(len, planes)) == width * -(-n // 8)
    return np.concatenate([*parts, *planes, exponents[codes == escape]])


def _best_code(exponents: Bytes) -> tuple[int, int, int]:
    """Width, base and number of escapes of the shortest code: of equal ones the narrowest, then the largest base."""
    n, counts = len(exponents), np.bincount(exponents, minlength=256)
    best, least = (PLAIN, 0, 0), n
    for width in WIDTHS:
        window = (1 << width) - 1  # base and the exponents below it that have codes
        last = max(int(exponents.min()), window - 1)
        for base in range(max(int(exponents.max()), last), last - 1, -1):
            escapes = n - int(counts[base + 1 - window : base + 1].sum())
            if (cost := width * -(-n // 8) + escapes) < least:
                best, least = (width, base, escapes), cost
    return best


def _decode_granule(body: Bytes, n: int, size: int) -> tuple[Bytes, int]:
    """The bytes of the granule at the beginning of `body`, and how many bytes it takes there."""
    if len(body) < 4:
        raise ValueError("ends within a granule")
    width, base, escapes = struct.unpack("<BBH", body[:4].tobytes())
    if width not in (*WIDTHS, PLAIN):
        raise ValueError("has a granule of unknown width")
    if width == PLAIN and escapes:
        raise ValueError("has a granule with escapes but without codes")
    plane = -(-n // 8)
    signs_at = 4 + n * (size - 2)
    codes_at = signs_at + n
    end = codes_at + (n if width == PLAIN else width * plane + escapes)
    if len(body) < end:
        raise ValueError("ends within a granule")
    signs = body[signs_at:codes_at].astype(np.uint16)
    if width == PLAIN:
        exponents = body[codes_at:end]
    else:
        planes = body[codes_at : codes_at + width * plane].reshape(width, plane)
        bits = np.unpackbits(planes, axis=1, count=n, bitorder="little")
        codes = (bits << np.arange(width, dtype=np.uint8)[:, None]).sum(axis=0).astype(np.uint8)
        exponents = np.uint8(base) - codes
        escaped = codes == (1 << width) - 1
        if escaped.sum() != escapes:
            raise ValueError("has a granule with another number of escapes than its head states")
        exponents[escaped] = body[end - escapes : end]
    upper = (signs & 0x80) << 8 | exponents.astype(np.uint16) << 7 | signs & 0x7F
    if size == 2:
        return upper.view(np.uint8), end
    lower = np.ascontiguousarray(body[4:signs_at]).view(np.uint16)
    elements = upper.astype(np.uint32) << 16 | lower
    return elements.view(np.uint8), end
