"""Payloads that no encoder writes: the verbs refuse them; kernels stay within their memory and agree on the result."""

from __future__ import annotations

import random

import pytest
import torch

from dtcomm import _C
from dtcomm.codecs import Codec, codec
from dtcomm.errors import PayloadCorrupt
from dtcomm.kernels import available, reference, use
from dtcomm.kernels.ops import decode, encode, reduce, reduce_encode
from dtcomm.kernels.types import Combine
from tests.unit.codecs.cases import everything
from tests.unit.kernels.inputs import floats
from tests.unit.kernels.test_memory import Room, combine

FAST = [name for name in available() if name != "reference"]
LIST, BITMAP = "topk:ratio=0.01", "topk:ratio=0.3"
SPARSE = [each for each in everything() if each.layout().kept]


def put(payload: torch.Tensor, at: int, value: int) -> torch.Tensor:
    changed = payload.clone()
    changed[at] = value
    return changed


def list_of(positions: list[int]) -> torch.Tensor:
    bits = [position >> bit & 1 for position in positions for bit in range(12)]
    bits += [0] * (-len(bits) % 8)
    return torch.tensor(
        [sum(bit << i for i, bit in enumerate(bits[at : at + 8])) for at in range(0, len(bits), 8)]
    )


def with_positions(each: Codec, n: int, positions: list[int]) -> torch.Tensor:
    """A payload of a single granule whose list of positions is this one."""
    layout = each.layout()
    payload = encode(each, floats("normal", n))
    raw = list_of(positions)
    payload[layout.values(n) : layout.values(n) + len(raw)] = raw.to(torch.uint8)
    return payload


def refusals(each: Codec | str, payload: torch.Tensor, n: int, says: str) -> None:
    good = encode(each, torch.ones(n))
    calls = [
        lambda: decode(each, payload, n),
        lambda: reduce(each, [payload], n),
        lambda: reduce(each, [good, payload], n, torch.ones(n)),
        lambda: reduce_encode(each, [payload], n, torch.ones(n), residual=torch.zeros(n)),
    ]
    for name in available():
        with use(name):
            for call in calls:
                with pytest.raises(PayloadCorrupt, match=says):
                    call()


def test_positions_outside() -> None:
    refusals(
        LIST, with_positions(codec(LIST), 300, [1, 7, 299, 300]), 300, "granule 0: position 3 is 300 of 300"
    )
    refusals(
        LIST, with_positions(codec(LIST), 300, [1, 7, 299, 4095]), 300, "granule 0: position 3 is 4095 of 300"
    )


def test_positions_that_do_not_ascend() -> None:
    refusals(
        LIST, with_positions(codec(LIST), 300, [7, 7, 8, 9]), 300, "position 1 is 7 after 7: not ascending"
    )
    refusals(
        LIST, with_positions(codec(LIST), 300, [0, 9, 8, 10]), 300, "position 2 is 8 after 9: not ascending"
    )


def test_bitmaps_of_another_count() -> None:
    n, each = 4096 + 100, codec(BITMAP)
    payload = encode(each, floats("normal", n))
    last = each.wire_bytes(4096) + each.layout().values(100)
    refusals(
        each,
        put(payload, last, int(payload[last]) ^ 1),
        n,
        "granule 1: the bitmap has 3[02] bits set for 31 values",
    )
    empty = payload.clone()
    empty[last : last + 13] = 0
    refusals(each, empty, n, "granule 1: the bitmap has 0 bits set for 31 values")
    # Bits of elements that do not exist count nothing and are not read.
    assert each.layout().positions(100) == 13
    same = put(payload, last + 12, int(payload[last + 12]) | 0xF0)
    assert torch.equal(decode(each, same, n), decode(each, payload, n))


def test_the_payload_and_the_granule_are_named() -> None:
    n, each = 3 * 4096, codec(LIST)
    payload = encode(each, floats("normal", n))
    at = 2 * each.wire_bytes(4096) + each.layout().values(4096)
    with pytest.raises(PayloadCorrupt, match=r"payload 1 in codec 'topk', granule 2: position 1"):
        reduce(each, [payload, put(put(payload, at + 1, 0), at + 2, 0)], n)


def test_what_encoders_make_is_fine() -> None:
    for each in SPARSE:
        for n in (0, 1, 2, 7, 8, 9, 4095, 4096, 4097, 9000):
            payload = encode(each, floats("bits", n, seed=n), key=n)
            assert _C.payload_error(each.native(), payload.data_ptr(), n) == ""


def read(kernel: str, each: Codec, payload: torch.Tensor, n: int) -> list[bytes]:
    """What a kernel makes of a payload by every way of reading one, past the verbs' refusal."""
    x, room = floats("normal", n, seed=2), Room(len(payload), 3, payload)
    results = []
    if kernel == "reference":
        out, total, error = torch.empty(n), torch.empty(n), x.clone()
        wire = torch.empty_like(payload)
        reference.decode(each, payload, n, torch.float32, out)
        call = {"codec": each, "numel": n, "dtype": torch.float32, "payloads": (payload, payload), "local": x}
        reference.combine(Combine(**call, out=total))
        reference.combine(Combine(**call, residual=error, payload_out=wire, key=5, offset=3))
        results = [out, total, wire, error]
    else:
        local = Room(4 * n, 0, x)
        for stream in (False, True):
            out, total, error, wire = Room(4 * n, 0), Room(4 * n, 4), Room(4 * n, 8, x), Room(len(payload), 1)
            _C.decode(kernel, each.native(), room.address, n, 0, out.address, 0, stream)
            terms = {"payloads": [room, room], "local": local}
            combine(kernel, each, torch.float32, n, **terms, out=total, stream=(False, stream))  # type: ignore[arg-type]
            combine(kernel, each, torch.float32, n, **terms, residual_in=error, residual_out=error, payload_out=wire,
                    stream=(stream, False))  # type: ignore[arg-type]  # fmt: skip
            assert all(each.intact() for each in (out, total, error, wire, room, local))
            results = [out.bytes, total.bytes, wire.bytes, error.bytes]
    return [result.view(torch.uint8).numpy().tobytes() for result in results]


@pytest.mark.parametrize("each", SPARSE, ids=str)
def test_any_bytes_stay_within_memory_and_mean_the_same(each: Codec) -> None:
    """Random payloads, and honest ones with a few bytes changed, in every kernel."""
    rng = random.Random(str(each))
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    for n in (1, 3, 100, 4095, 4096, 4096 + 33):
        honest = encode(each, floats("normal", n), key=n)
        for attempt in range(4):
            payload = torch.randint(0, 256, (len(honest),), generator=generator, dtype=torch.uint8)
            if attempt % 2:
                payload = honest.clone()
                for _ in range(5):
                    payload[rng.randrange(len(payload))] = rng.randrange(256)
            expected = read("reference", each, payload, n)
            for kernel in FAST:
                assert read(kernel, each, payload, n) == expected, (kernel, n, attempt)
