"""Payloads that no encoder writes: the verbs refuse them; kernels stay within their memory and agree on the result."""

from __future__ import annotations

import random

import pytest
import torch

from dtcomm import _C
from dtcomm.codecs import Codec
from dtcomm.codecs import codec as parse
from dtcomm.errors import PayloadCorrupt
from dtcomm.kernels import available, reference, use
from dtcomm.kernels.calls import Combine
from dtcomm.kernels.ops import decode, encode, reduce, reduce_encode
from tests.unit.codecs.cases import codecs_with_option_sets
from tests.unit.kernels.inputs import floats
from tests.unit.kernels.test_memory import GuardedMemory, combine

FAST = [name for name in available() if name != "reference"]
LIST, BITMAP = "topk:ratio=0.01", "topk:ratio=0.3"
SPARSE = [codec for codec in codecs_with_option_sets() if codec.layout().kept]


def with_byte(payload: torch.Tensor, at: int, value: int) -> torch.Tensor:
    changed = payload.clone()
    changed[at] = value
    return changed


def packed_positions(positions: list[int]) -> torch.Tensor:
    bits = [position >> bit & 1 for position in positions for bit in range(12)]
    bits += [0] * (-len(bits) % 8)
    return torch.tensor(
        [sum(bit << i for i, bit in enumerate(bits[at : at + 8])) for at in range(0, len(bits), 8)]
    )


def with_positions(codec: Codec, n: int, positions: list[int]) -> torch.Tensor:
    """Return a payload of one granule with this list of positions."""
    layout = codec.layout()
    payload = encode(codec, floats("normal", n))
    raw = packed_positions(positions)
    payload[layout.values(n) : layout.values(n) + len(raw)] = raw.to(torch.uint8)
    return payload


def check_all_verbs_refuse(codec: Codec | str, payload: torch.Tensor, n: int, message: str) -> None:
    good = encode(codec, torch.ones(n))
    calls = [
        lambda: decode(codec, payload, n),
        lambda: reduce(codec, [payload], n),
        lambda: reduce(codec, [good, payload], n, torch.ones(n)),
        lambda: reduce_encode(codec, [payload], n, torch.ones(n), residual=torch.zeros(n)),
    ]
    for name in available():
        with use(name):
            for call in calls:
                with pytest.raises(PayloadCorrupt, match=message):
                    call()


def test_positions_outside_the_granule_are_refused() -> None:
    check_all_verbs_refuse(
        LIST, with_positions(parse(LIST), 300, [1, 7, 299, 300]), 300, "granule 0: position 3 is 300 of 300"
    )
    check_all_verbs_refuse(
        LIST, with_positions(parse(LIST), 300, [1, 7, 299, 4095]), 300, "granule 0: position 3 is 4095 of 300"
    )


def test_positions_that_do_not_ascend_are_refused() -> None:
    check_all_verbs_refuse(
        LIST, with_positions(parse(LIST), 300, [7, 7, 8, 9]), 300, "position 1 is 7 after 7: not ascending"
    )
    check_all_verbs_refuse(
        LIST, with_positions(parse(LIST), 300, [0, 9, 8, 10]), 300, "position 2 is 8 after 9: not ascending"
    )


def test_bitmaps_with_a_wrong_number_of_bits_are_refused() -> None:
    n, codec = 4096 + 100, parse(BITMAP)
    payload = encode(codec, floats("normal", n))
    last = codec.wire_bytes(4096) + codec.layout().values(100)
    check_all_verbs_refuse(
        codec,
        with_byte(payload, last, int(payload[last]) ^ 1),
        n,
        "granule 1: the bitmap has 3[02] bits set for 31 values",
    )
    empty = payload.clone()
    empty[last : last + 13] = 0
    check_all_verbs_refuse(codec, empty, n, "granule 1: the bitmap has 0 bits set for 31 values")
    # Bits of elements that do not exist count nothing and are not read.
    assert codec.layout().positions(100) == 13
    same = with_byte(payload, last + 12, int(payload[last + 12]) | 0xF0)
    assert torch.equal(decode(codec, same, n), decode(codec, payload, n))


def test_the_error_names_the_payload_and_the_granule() -> None:
    n, codec = 3 * 4096, parse(LIST)
    payload = encode(codec, floats("normal", n))
    at = 2 * codec.wire_bytes(4096) + codec.layout().values(4096)
    with pytest.raises(PayloadCorrupt, match=r"payload 1 in codec 'topk', granule 2: position 1"):
        reduce(codec, [payload, with_byte(with_byte(payload, at + 1, 0), at + 2, 0)], n)


def test_payloads_of_encoders_are_accepted() -> None:
    for codec in SPARSE:
        for n in (0, 1, 2, 7, 8, 9, 4095, 4096, 4097, 9000):
            payload = encode(codec, floats("bits", n, seed=n), key=n)
            assert _C.payload_error(codec.native(), payload.data_ptr(), n) == ""


def read_with(kernel: str, codec: Codec, payload: torch.Tensor, n: int) -> list[bytes]:
    """Return the results of every operation of a kernel that reads the payload, without the verbs' checks."""
    x, area = floats("normal", n, seed=2), GuardedMemory(len(payload), 3, payload)
    results = []
    if kernel == "reference":
        out, total, error = torch.empty(n), torch.empty(n), x.clone()
        wire = torch.empty_like(payload)
        reference.decode(codec, payload, n, torch.float32, out)
        call = {
            "codec": codec,
            "numel": n,
            "dtype": torch.float32,
            "payloads": (payload, payload),
            "local": x,
        }
        reference.combine(Combine(**call, out=total))
        reference.combine(Combine(**call, residual=error, payload_out=wire, key=5, offset=3))
        results = [out, total, wire, error]
    else:
        local = GuardedMemory(4 * n, 0, x)
        for stream in (False, True):
            out, total, error, wire = (
                GuardedMemory(4 * n, 0),
                GuardedMemory(4 * n, 4),
                GuardedMemory(4 * n, 8, x),
                GuardedMemory(len(payload), 1),
            )
            _C.decode(kernel, codec.native(), area.address, n, 0, out.address, 0, stream)
            terms = {"payloads": [area, area], "local": local}
            combine(kernel, codec, torch.float32, n, **terms, out=total, stream=(False, stream))  # type: ignore[arg-type]
            combine(kernel, codec, torch.float32, n, **terms, residual_in=error, residual_out=error, payload_out=wire,
                    stream=(stream, False))  # type: ignore[arg-type]  # fmt: skip
            assert all(memory.intact() for memory in (out, total, error, wire, area, local))
            results = [out.bytes, total.bytes, wire.bytes, error.bytes]
    return [result.view(torch.uint8).numpy().tobytes() for result in results]


@pytest.mark.parametrize("codec", SPARSE, ids=str)
def test_kernels_agree_on_random_bytes_and_stay_within_memory(codec: Codec) -> None:
    """The payloads are random bytes, or encoded ones with a few bytes changed."""
    rng = random.Random(str(codec))
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    for n in (1, 3, 100, 4095, 4096, 4096 + 33):
        honest = encode(codec, floats("normal", n), key=n)
        for attempt in range(4):
            payload = torch.randint(0, 256, (len(honest),), generator=generator, dtype=torch.uint8)
            if attempt % 2:
                payload = honest.clone()
                for _ in range(5):
                    payload[rng.randrange(len(payload))] = rng.randrange(256)
            expected = read_with("reference", codec, payload, n)
            for kernel in FAST:
                assert read_with(kernel, codec, payload, n) == expected, (kernel, n, attempt)
