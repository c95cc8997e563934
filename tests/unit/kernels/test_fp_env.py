"""The caller's floating-point environment does not change a byte, and is restored after a call."""

from __future__ import annotations

import ctypes
import ctypes.util
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from dtcomm.codecs import Codec, names
from dtcomm.codecs import codec as parse
from dtcomm.kernels import available, use
from dtcomm.kernels.ops import decode, encode, reduce, reduce_encode
from tests.unit.kernels.inputs import floats

FAST = [name for name in available() if name != "reference"]
LIBM = ctypes.CDLL(ctypes.util.find_library("m"))
ROUNDINGS = (0x400, 0x800, 0xC00)  # x86's fenv.h: down, up, towards zero


@pytest.fixture
def flush_subnormals() -> Iterator[None]:
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush subnormal numbers")
    yield
    torch.set_flush_denormal(False)


def results_in_the_default_environment(
    codec: Codec, kernel: str
) -> tuple[torch.Tensor, torch.Tensor, list[bytes]]:
    """Return two inputs and the bytes that the verbs make of them in the default environment."""
    x, y = floats("wide", 3000) * 1e-20, floats("extremes", 3000)
    with use(kernel):
        return x, y, bytes_of_verbs(codec, x, y)


def bytes_of_verbs(codec: Codec, x: torch.Tensor, y: torch.Tensor) -> list[bytes]:
    """Return the results of every verb as bytes."""
    payloads = [encode(codec, x, key=3), encode(codec, y, key=4)]
    residual = y.clone()
    results = [*payloads, decode(codec, payloads[0], 3000), reduce(codec, payloads, 3000, x, 1, 3)]
    results += [encode(codec, x, key=5, residual=residual), residual]
    results += [reduce_encode(codec, payloads, 3000, x, 1, 3, key=6)]
    return [result.view(torch.uint8).numpy().tobytes() for result in results]


@pytest.mark.parametrize("kernel", FAST)
def test_flushing_subnormals_changes_no_byte(kernel: str, request: pytest.FixtureRequest) -> None:
    expected = {name: results_in_the_default_environment(parse(name), kernel) for name in names()}
    request.getfixturevalue("flush_subnormals")
    for name, (x, y, results) in expected.items():
        with use(kernel):
            assert bytes_of_verbs(parse(name), x, y) == results, name
        assert (torch.tensor([1e-40]) * 1).item() == 0, f"{name} ended the flushing"


@pytest.mark.parametrize("kernel", FAST)
@pytest.mark.parametrize("name", names())
def test_rounding_modes_change_no_byte(name: str, kernel: str) -> None:
    x, y, expected = results_in_the_default_environment(parse(name), kernel)
    for mode in ROUNDINGS:
        before = LIBM.fegetround()
        try:
            assert LIBM.fesetround(mode) == 0
            with use(kernel):
                result = bytes_of_verbs(parse(name), x, y)
            after = LIBM.fegetround()
        finally:
            LIBM.fesetround(before)
        assert result == expected and after == mode


def test_concurrent_calls_give_the_same_bytes() -> None:
    codec = parse(names()[-1])
    x, y, expected = results_in_the_default_environment(codec, available()[0])
    with use(available()[0]), ThreadPoolExecutor(4) as pool:
        assert all(
            result == expected for result in pool.map(lambda _: bytes_of_verbs(codec, x, y), range(40))
        )
