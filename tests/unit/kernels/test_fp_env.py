"""The caller's floating-point environment does not change a byte, and is restored after a call."""

from __future__ import annotations

import ctypes
import ctypes.util
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from dtcomm.codecs import Codec
from dtcomm.kernels import available, use
from dtcomm.kernels.ops import decode, encode, reduce
from tests.unit.codecs.cases import few
from tests.unit.kernels.inputs import floats

FAST = [name for name in available() if name != "reference"]
LIBM = ctypes.CDLL(ctypes.util.find_library("m"))
ROUNDINGS = (0x400, 0x800, 0xC00)  # x86's fenv.h: down, up, towards zero


@pytest.fixture
def flushing() -> Iterator[None]:
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormal numbers")
    yield
    torch.set_flush_denormal(False)


def inputs_are_made_first(codec: Codec, kernel: str) -> tuple[list[torch.Tensor], list[bytes]]:
    x, y = floats("wide", 3000) * 1e-20, floats("extremes", 3000)
    with use(kernel):
        return [x, y], run(codec, x, y)


def run(codec: Codec, x: torch.Tensor, y: torch.Tensor) -> list[bytes]:
    payloads = [encode(codec, x, key=3), encode(codec, y, key=4)]
    residual = y.clone()
    results = [*payloads, decode(codec, payloads[0], 3000), reduce(codec, payloads, 3000, x, 1, 3)]
    results += [encode(codec, x, key=5, residual=residual), residual]
    return [result.view(torch.uint8).numpy().tobytes() for result in results]


@pytest.mark.parametrize("kernel", FAST)
@pytest.mark.parametrize("codec", few(), ids=str)
def test_flushed_subnormals(codec: Codec, kernel: str, request: pytest.FixtureRequest) -> None:
    (x, y), expected = inputs_are_made_first(codec, kernel)
    request.getfixturevalue("flushing")
    with use(kernel):
        assert run(codec, x, y) == expected
    assert (torch.tensor([1e-40]) * 1).item() == 0  # still flushing


@pytest.mark.parametrize("kernel", FAST)
@pytest.mark.parametrize("codec", few(), ids=str)
def test_rounding_modes(codec: Codec, kernel: str) -> None:
    (x, y), expected = inputs_are_made_first(codec, kernel)
    for mode in ROUNDINGS:
        before = LIBM.fegetround()
        try:
            assert LIBM.fesetround(mode) == 0
            with use(kernel):
                got = run(codec, x, y)
            after = LIBM.fegetround()
        finally:
            LIBM.fesetround(before)
        assert got == expected and after == mode


def test_threads_do_not_disturb_each_other() -> None:
    codec = few()[-1]
    (x, y), expected = inputs_are_made_first(codec, available()[0])
    with use(available()[0]), ThreadPoolExecutor(4) as pool:
        assert all(got == expected for got in pool.map(lambda _: run(codec, x, y), range(40)))
