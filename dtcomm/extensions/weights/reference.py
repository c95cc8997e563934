"""Weight deltas in plain Python, written from docs/reference/weights-format.md: what every kernel must equal.

It is slow. Elements are unsigned integers, and bits are text of 0 and 1, the lowest bit of each byte first.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch

from dtcomm.extensions.weights.slices import checksum

_KINDS = {0: (1, 0), 1: (2, 7), 2: (2, 10), 3: (4, 23), 4: (1, 3), 5: (1, 2)}  # bytes, bits of the mantissa
_GRANULE, _USUAL, _FEW = 65_536, 8, 1024  # elements; classes; changes below which one class may be smaller
_SAME, _STEPS, _VALUES, _DENSE = range(4)
_GAP, _STEP = 4, 5  # bits of a Rice parameter
_HEAD = struct.Struct("<4sBBHQQI")


def encode(kind: int, old: bytes, new: bytes) -> tuple[bytes, int]:
    """Return the payload that turns ``old`` into ``new``, and how many elements differ."""
    size, mantissa = _KINDS[kind]
    before, after = _elements(old, size), _elements(new, size)
    parts = [
        _granule(before[at : at + _GRANULE], after[at : at + _GRANULE], size, mantissa)
        for at in range(0, len(before), _GRANULE)
    ]
    index = b"".join(struct.pack("<II", len(part), _crc(part)) for part in parts)
    body = b"".join(parts) + bytes(16)
    total = _HEAD.size + 4 + len(index) + len(body)
    head = _HEAD.pack(b"DTWD", 1, kind, 0, len(before), total, 0)
    differing = sum(one != other for one, other in zip(before, after))
    return head + struct.pack(
        "<I", _crc(struct.pack("<II", _crc(head), _crc(index)))
    ) + index + body, differing


def decode(kind: int, payload: bytes, old: bytes) -> bytes:
    """Return the new bytes; ValueError if the payload is damaged or for other elements."""
    size, mantissa = _KINDS[kind]
    elements, new = _elements(old, size), list[int]()
    try:
        head, count = payload[: _HEAD.size], -(-len(elements) // _GRANULE)
        at = _HEAD.size + 4 + 8 * count
        index = list(struct.iter_unpack("<II", payload[_HEAD.size + 4 : at]))
        whole = struct.pack("<II", _crc(head), _crc(payload[_HEAD.size + 4 : at]))
        _require(head == _HEAD.pack(b"DTWD", 1, kind, 0, len(elements), len(payload), 0), "the head")
        _require(payload[_HEAD.size : _HEAD.size + 4] == struct.pack("<I", _crc(whole)), "its checksum")
        for number, (length, crc) in enumerate(index):
            part = payload[at : at + length]
            _require(len(part) == length and _crc(part) == crc, f"granule {number}")
            new += _read_granule(part, elements[number * _GRANULE :][:_GRANULE], size, mantissa)
            at += length
        _require(payload[at:] == bytes(16), "the end")
    except (IndexError, struct.error) as error:
        raise ValueError(f"is cut off: {error}") from None
    return b"".join(element.to_bytes(size, "little") for element in new)


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(f"is damaged: {what}")


def _crc(data: bytes) -> int:
    return checksum(torch.frombuffer(bytearray(data), dtype=torch.uint8)) if data else 0


def _elements(data: bytes, size: int) -> list[int]:
    return [int.from_bytes(data[at : at + size], "little") for at in range(0, len(data), size)]


def _exponent(element: int, width: int, mantissa: int) -> int:
    return (element & ((1 << (width - 1)) - 1)) >> mantissa


def _members(old: Sequence[int], classes: int, top: int, width: int, mantissa: int) -> list[list[int]]:
    """Return the elements of each class, by number."""
    members: list[list[int]] = [[] for _ in range(classes)]
    for i, element in enumerate(old):
        members[min(max(top - _exponent(element, width, mantissa), 0), classes - 1)].append(i)
    return members


def _bits(value: int, count: int) -> str:
    return format(value & ((1 << count) - 1), f"0{count}b")[::-1] if count else ""


def _number(value: int) -> str:
    return _bits(value.bit_length(), 5) + _bits(value, value.bit_length())


def _rice(values: Sequence[int], parameter_bits: int) -> str:
    """Return integers with the parameter that takes the fewest bits, the smallest of equal ones."""
    k = min(range(1 << parameter_bits), key=lambda k: len(values) * (k + 1) + sum(v >> k for v in values))
    planes = "".join(str(value >> bit & 1) for bit in range(k) for value in values)
    return _bits(k, parameter_bits) + planes + "".join("0" * (value >> k) + "1" for value in values)


def _gaps(places: Sequence[int]) -> list[int]:
    return [place - before - 1 for before, place in zip((-1, *places), places)]


def _zigzag(step: int) -> int:
    return 2 * step if step >= 0 else -2 * step - 1


def _class(size: int, steps: dict[int, int], width: int) -> str:
    """Return the shortest code of a class of ``size`` elements, of which some change by steps."""
    if not steps:
        return _bits(_SAME, 2)
    codes = [_zigzag(step) - 1 for step in steps.values()]
    places = _number(len(steps)) + _rice(_gaps(list(steps)), _GAP)
    longer = [i for i, code in enumerate(codes) if code > 1]
    signs = "".join(str(code & 1) for code in codes) + _number(len(longer))
    if longer:
        signs += _rice(_gaps(longer), _GAP) + _rice([(codes[i] >> 1) - 1 for i in longer], _STEP)
    coded = [
        _bits(_STEPS, 2) + places + signs,
        _bits(_VALUES, 2) + places + "".join(_bits(step, width) for step in steps.values()),
    ]
    if len(steps) >= size // 8:
        every = _rice([_zigzag(steps.get(i, 0)) for i in range(size)], _STEP)
        coded.append(_bits(_DENSE, 2) + _number(size) + every)
    return min(coded, key=len)


def _granule(old: Sequence[int], new: Sequence[int], size: int, mantissa: int) -> bytes:
    if old == new:
        return b""
    width = 8 * size
    half, whole = 1 << (width - 1), 1 << width
    steps = {i: (b - a + half) % whole - half for i, (a, b) in enumerate(zip(old, new)) if a != b}
    head, body = bytes([1]), _class(len(old), steps, width) if not mantissa or len(steps) < _FEW else ""
    if mantissa:
        looked = sorted((_exponent(element, width, mantissa) for element in old[::16]), reverse=True)
        top = looked[-(-len(looked) // 64) - 1]
        split = "".join(
            _class(len(own), {place: steps[i] for place, i in enumerate(own) if i in steps}, width)
            for own in _members(old, _USUAL, top, width, mantissa)
        )
        if not body or 8 + len(split) < len(body):
            head, body = bytes([_USUAL, top]), split
    data = head + int(body[::-1], 2).to_bytes(-(-len(body) // 8), "little")
    raw = b"".join(element.to_bytes(size, "little") for element in new)
    return data if len(data) <= len(raw) else bytes(1) + raw


class _Reader:
    def __init__(self, data: bytes) -> None:
        self.text = "".join(_bits(byte, 8) for byte in data)
        self.at = 0

    def take(self, count: int) -> int:
        self.at += count
        _require(self.at <= len(self.text), "a granule ends early")
        return int(self.text[self.at - count : self.at][::-1] or "0", 2)

    def number(self) -> int:
        length = self.take(5)
        value = self.take(length)
        _require(length <= 17 and value.bit_length() == length, "a number")
        return value

    def rice(self, count: int, parameter_bits: int) -> list[int]:
        k = self.take(parameter_bits)
        planes = [[self.take(1) for _ in range(count)] for _ in range(k)]
        values = [sum(plane[i] << bit for bit, plane in enumerate(planes)) for i in range(count)]
        for i in range(count):
            one = self.text.find("1", self.at)
            _require(one >= 0, "a granule ends within an integer")
            values[i] |= (one - self.at) << k
            self.at = one + 1
        return values

    def places(self, count: int, size: int) -> list[int]:
        found, at = [], -1
        for gap in self.rice(count, _GAP):
            at += gap + 1
            found.append(at)
        _require(at < size, "a place is outside its class")
        return found

    def steps(self, width: int, size: int) -> dict[int, int]:
        """Return the steps of a class of ``size`` elements, by their places."""
        mode = self.take(2)
        if mode == _SAME:
            return {}
        n = self.number()
        _require(0 < n <= size and (mode != _DENSE or n == size), "the size of a class")
        if mode == _DENSE:
            return dict(enumerate(map(_unzigzag, self.rice(n, _STEP))))
        at = self.places(n, size)
        if mode == _VALUES:
            return {place: self.take(width) for place in at}
        signs = [self.take(1) for _ in range(n)]
        steps, longer = [2 * sign - 1 for sign in signs], self.number()
        if longer:
            which = self.places(longer, n)
            for place, length in zip(which, self.rice(longer, _STEP)):
                steps[place] = _unzigzag(2 * (length + 1) + signs[place] + 1)
        return dict(zip(at, steps))


def _unzigzag(code: int) -> int:
    return code // 2 if code % 2 == 0 else -(code + 1) // 2


def _read_granule(data: bytes, old: list[int], size: int, mantissa: int) -> list[int]:
    if not data:
        return old
    classes, width = data[0], 8 * size
    if classes == 0:
        _require(len(data) == 1 + len(old) * size, "the length of a granule")
        return _elements(data[1:], size)
    _require(classes == 1 or (classes <= 16 and mantissa > 0), "the number of classes")
    top = data[1] if classes > 1 else 0
    _require(top << mantissa < 1 << (width - 1), "the top exponent")
    reader, new = _Reader(data[2 if classes > 1 else 1 :]), list(old)
    for own in _members(old, classes, top, width, mantissa):
        for place, step in reader.steps(width, len(own)).items():
            new[own[place]] = (new[own[place]] + step) % (1 << width)
    _require(len(reader.text) - reader.at < 8 and "1" not in reader.text[reader.at :], "the end of a granule")
    return new
