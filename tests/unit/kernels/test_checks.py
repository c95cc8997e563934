"""Errors for wrong arguments name the argument, its value and the valid ones; nothing is written before them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dtcomm.codecs import codec
from dtcomm.kernels import available, use
from dtcomm.kernels.ops import decode, encode, reduce, reduce_encode

X = torch.ones(100)
P = encode("int8", X)
META = torch.empty(100, device="meta")
APART = torch.ones(200)[::2]
LONGS = torch.ones(100, dtype=torch.int64)
F64 = torch.ones(100, dtype=torch.float64)
LONG_PAYLOAD = encode("none", LONGS)
HALVES = encode("fp16", X)


@pytest.fixture(params=available(), autouse=True)
def kernel(request: pytest.FixtureRequest):  # type: ignore[no-untyped-def]
    with use(request.param):
        yield request.param


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: encode("int9", X), ValueError, r"codec.*int9.*none, fp16, bf16, .*int8"),
        (lambda: encode(8, X), TypeError, r"codec.*int"),
        (lambda: encode("int8", [1.0]), TypeError, r"x: expected a tensor, got list"),
        (lambda: encode("int8", LONGS), TypeError, r"x: .*int8.*int64; valid: float32, float16, bfloat16"),
        (lambda: encode("fp16", F64), TypeError, r"x: .*float64"),
        (
            lambda: encode("none", torch.ones(2, dtype=torch.complex64)),
            TypeError,
            r"x: .*complex64.*valid: .*bool",
        ),
        (lambda: encode("int8", META), ValueError, r"x: .*cpu.*meta"),
        (lambda: encode("int8", APART), ValueError, r"x: .*contiguous.*\(2,\)"),
        (lambda: encode("int8", X.to_sparse()), ValueError, r"x: .*dense.*sparse"),
        (lambda: encode("int8", X, key=-1), ValueError, r"key: .*-1"),
        (lambda: encode("int8", X, key=2**64), ValueError, r"key: .*2\*\*64"),
        (lambda: encode("int8", X, key=0.5), TypeError, r"key: .*float"),
        (lambda: encode("int8", X, offset=-1), ValueError, r"offset: .*-1"),
        (lambda: encode("int8", X, residual=X[:99]), ValueError, r"residual: expected 100 elements, got 99"),
        (
            lambda: encode("int8", X, residual=X.half()),
            TypeError,
            r"residual: expected float32, got torch.float16",
        ),
        (lambda: encode("none", LONGS, residual=X), TypeError, r"residual: .*int64"),
        (
            lambda: encode("int8", X, out=P[:-1]),
            ValueError,
            r"out: 100 elements .*'int8' are 144 bytes, got 143",
        ),
        (lambda: encode("int8", X, out=X), TypeError, r"out: expected uint8"),
        (lambda: encode("int8", X, decoded=X.half()), TypeError, r"decoded: expected float32"),
        (lambda: decode("int8", P, 99 + 32), ValueError, r"payload: 131 elements .*got 144"),
        (lambda: decode("int8", P.to(torch.int8), 100), TypeError, r"payload: expected uint8"),
        (lambda: decode("int8", P, -1), ValueError, r"numel: .*-1"),
        (lambda: decode("int8", P, 100.0), TypeError, r"numel: .*float"),
        (lambda: decode("int8", P, 100, torch.int64), TypeError, r"dtype: .*int64"),
        (lambda: decode("int8", P, 100, out=X.half()), TypeError, r"out: expected float32"),
        (
            lambda: decode("int8", P, 100, out=torch.ones(99)),
            ValueError,
            r"out: expected 100 elements, got 99",
        ),
        (lambda: reduce("int8", [], 100), ValueError, r"payloads: .*at least one"),
        (lambda: reduce("int8", [P, P[:-16]], 100), ValueError, r"payloads\[1\]: .*144 bytes, got 128"),
        (lambda: reduce("int8", [P, None], 100), TypeError, r"payloads\[1\]: .*NoneType"),
        (
            lambda: reduce("int8", [P], 100, torch.ones(99)),
            ValueError,
            r"local: expected 100 elements, got 99",
        ),
        (lambda: reduce("int8", [P], 100, X, position=2), ValueError, r"position: expected 0 to 1, got 2"),
        (lambda: reduce("int8", [P], 100, X, position=-1), ValueError, r"position: .*-1"),
        (lambda: reduce("int8", [P], 100, divisor=0), ValueError, r"divisor: .*at least 1, got 0"),
        (lambda: reduce("int8", [P], 100, divisor=2.0), TypeError, r"divisor: .*float"),
        (lambda: reduce("none", [LONG_PAYLOAD], 100, LONGS, divisor=2), TypeError, r"divisor: .*int64"),
        (lambda: reduce("int8", [P], 100, op="max"), ValueError, r"op: .*'int8'.*'max'; valid: sum"),
        (
            lambda: reduce("fp16", [HALVES], 100, op="prod"),
            ValueError,
            r"op: unknown 'prod'; valid: sum, min, max",
        ),
        (
            lambda: reduce("int8", [P], 100, X.half(), dtype=torch.bfloat16),
            TypeError,
            r"local: expected bfloat16",
        ),
        (lambda: reduce("int8", [P], 100, X, out=X.half()), TypeError, r"out: expected float32, got"),
        (lambda: reduce_encode("int8", [P], 100, X, residual=F64), TypeError, r"residual: .*float64"),
        (lambda: reduce_encode("int8", [P], 100, X, out=P[:16]), ValueError, r"out: .*144 bytes, got 16"),
        (lambda: reduce_encode("int8", [P], 100, X, decoded=LONGS), TypeError, r"decoded|dtype"),
    ],
)
def test_wrong_arguments_are_refused(
    call: Callable[[], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("spec", ["none", "fp16", "bf16", "int8"])
def test_empty_tensors_are_accepted(spec: str) -> None:
    empty = torch.empty(0)
    payload = encode(spec, empty, residual=torch.empty(0), decoded=torch.empty(0))
    assert payload.numel() == 0 and decode(spec, payload, 0).numel() == 0
    assert reduce(spec, [payload], 0, empty, 0, 2).numel() == 0
    assert reduce_encode(spec, [payload], 0, empty).numel() == 0


def test_results_are_written_to_out() -> None:
    wire, floats, sums = torch.empty_like(P), torch.empty(10, 10), torch.empty(4, 25)
    assert encode("int8", X, out=wire) is wire and torch.equal(wire, P)
    assert decode("int8", P, 100, out=floats) is floats and torch.equal(
        floats.view(-1), decode("int8", P, 100)
    )
    assert reduce("int8", [P, P], 100, out=sums) is sums and torch.equal(sums.view(-1), floats.view(-1) * 2)
    assert reduce_encode("int8", [P], 100, X, out=wire) is wire


def test_tensors_of_any_shape_and_with_gradients_are_accepted() -> None:
    x = torch.ones(10, 10, requires_grad=True)
    assert torch.equal(encode(codec("int8"), x), P)
    assert encode("int8", torch.tensor(3.0)).numel() == codec("int8").wire_bytes(1)
