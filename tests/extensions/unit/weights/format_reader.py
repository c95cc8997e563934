"""A decoder written from docs/reference/weights-format.md alone, to prove that the text suffices: plain Python."""

from __future__ import annotations

import struct

KINDS = {0: (1, 0), 1: (2, 7), 2: (2, 10), 3: (4, 23), 4: (1, 3), 5: (1, 2)}
GRANULE = 65_536
SAME, STEPS, VALUES, DENSE = range(4)


def crc32c(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


class Bits:
    def __init__(self, data: bytes) -> None:
        self.value, self.left = int.from_bytes(data, "little"), 8 * len(data)

    def take(self, count: int) -> int:
        assert count <= self.left
        taken = self.value & ((1 << count) - 1)
        self.value >>= count
        self.left -= count
        return taken

    def number(self) -> int:
        return self.take(self.take(5))

    def rice(self, count: int, parameter_bits: int) -> list[int]:
        k = self.take(parameter_bits)
        values = [0] * count
        for bit in range(k):
            for i in range(count):
                values[i] |= self.take(1) << bit
        for i in range(count):
            zeros = 0
            while self.take(1) == 0:
                zeros += 1
            values[i] |= zeros << k
        return values


def places(gaps: list[int]) -> list[int]:
    found, at = [], 0
    for gap in gaps:
        found.append(at + gap)
        at += gap + 1
    return found


def unzigzag(code: int) -> int:
    return code // 2 if code % 2 == 0 else -(code + 1) // 2


def class_steps(bits: Bits, width: int) -> dict[int, int]:
    """The steps of a class by the place of the element in its class."""
    mode = bits.take(2)
    if mode == SAME:
        return {}
    n = bits.number()
    if mode == DENSE:
        return dict(enumerate(map(unzigzag, bits.rice(n, 5))))
    at = places(bits.rice(n, 4))
    if mode == VALUES:
        return {place: bits.take(width) for place in at}
    signs = [bits.take(1) for _ in range(n)]
    steps = [1 if sign else -1 for sign in signs]
    longer = bits.number()
    if longer:
        which = places(bits.rice(longer, 4))
        for place, length in zip(which, bits.rice(longer, 5), strict=True):
            steps[place] = unzigzag(2 * (length + 1) + signs[place] + 1)
    return dict(zip(at, steps, strict=True))


def read_granule(data: bytes, old: list[int], size: int, mantissa: int) -> list[int]:
    if not data:
        return old
    classes, width = data[0], 8 * size
    if classes == 0:
        return [int.from_bytes(data[1 + i * size : 1 + (i + 1) * size], "little") for i in range(len(old))]
    members: list[list[int]] = [[] for _ in range(classes)]
    for i, element in enumerate(old):
        exponent = (element & ((1 << (width - 1)) - 1)) >> mantissa
        members[min(max(data[1] - exponent, 0), classes - 1) if classes > 1 else 0].append(i)
    bits = Bits(data[2 if classes > 1 else 1 :])
    new = list(old)
    for own in members:
        for place, step in class_steps(bits, width).items():
            new[own[place]] = (new[own[place]] + step) % (1 << width)
    assert bits.left < 8 and bits.value == 0
    return new


def read(payload: bytes, old: bytes) -> bytes:
    magic, version, kind, zero, numel, total, zeros, checksum = struct.unpack_from("<4sBBHQQII", payload)
    assert (magic, version, zero, zeros, total) == (b"DTWD", 1, 0, 0, len(payload))
    size, mantissa = KINDS[kind]
    granules = -(-numel // GRANULE)
    at = 32 + 8 * granules
    assert checksum == crc32c(struct.pack("<II", crc32c(payload[:28]), crc32c(payload[32:at])))
    elements = [int.from_bytes(old[i : i + size], "little") for i in range(0, len(old), size)]
    assert len(elements) == numel
    new: list[int] = []
    for g in range(granules):
        length, sum_ = struct.unpack_from("<II", payload, 32 + 8 * g)
        data = payload[at : at + length]
        assert crc32c(data) == sum_
        new += read_granule(data, elements[g * GRANULE : (g + 1) * GRANULE], size, mantissa)
        at += length
    assert payload[at:] == bytes(16)
    return b"".join(element.to_bytes(size, "little") for element in new)
