"""Option rotate=hadamard: an orthogonal transform around the codec, the same in all verbs and kernels."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from dtcomm.codecs import Codec, codec
from dtcomm.codecs.base import FLOAT_TYPES
from dtcomm.kernels import reference
from dtcomm.kernels.ops import decode, encode, reduce, reduce_encode
from tests.unit.codecs.cases import everything
from tests.unit.kernels.inputs import floats

ROTATING = [each for each in everything() if reference.rotates(each)]
NAN, INF = float("nan"), float("inf")


pytestmark = pytest.mark.usefixtures("kernel")


def plain(each: Codec) -> Codec:
    return dataclasses.replace(each, rotate="none")  # type: ignore[call-arg]


def into(each: Codec, x: torch.Tensor) -> torch.Tensor:
    with np.errstate(all="ignore"):
        return torch.from_numpy(reference.rotate(each, x.numpy()))


def back(each: Codec, x: torch.Tensor, numel: int) -> torch.Tensor:
    with np.errstate(all="ignore"):
        return torch.from_numpy(reference.rotate_back(each, x.numpy(), numel))


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32)


@pytest.mark.parametrize("block", (16, 32, 64, 512, 2048))
def test_the_matrix_is_hadamard_s(block: int) -> None:
    """Sylvester's, with signs; orthogonal, and its own inverse up to them."""
    each = codec(f"int8:block={block},rotate=hadamard")
    matrix = np.ones((1, 1))
    while len(matrix) < block:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    signs = into(each, torch.eye(block).reshape(-1)).view(block, block)[:, 0].sign().double().numpy()
    x = floats("normal", block)
    exact = matrix @ (x.double().numpy() * signs) / block**0.5
    assert np.abs(into(each, x).numpy() - exact).max() < 4e-6
    assert (back(each, into(each, x), block) - x).abs().max() < 4e-6


@pytest.mark.parametrize(("block", "most"), [(16, 4), (32, 8), (64, 12), (128, 36), (4096, 204)])
def test_constants_are_spread(block: int, most: int) -> None:
    """The signs are far from every row of the matrix: no element gathers a constant block."""
    each = codec(f"int8:block={block},rotate=hadamard")
    spread = into(each, torch.ones(block)) * block**0.5
    assert spread.abs().max().round() == most


@pytest.mark.parametrize(
    ("each", "kind"), list(zip(ROTATING, itertools.cycle(["normal", "nonfinite", "wide"]))), ids=str
)
def test_it_is_the_plain_codec_of_rotated_blocks(each: Codec, kind: str) -> None:
    """The payload and the decoded floats are those of the plain codec for rotated blocks, whole and cut."""
    for n in (each.granularity, each.granularity + 5, 2 * each.layout().block - 1, 1):
        x, y = floats(kind, n, seed=1), floats(kind, n, seed=2)
        whole = into(each, x).numel()
        p, q = encode(each, x, 5, 3), encode(each, y, 6, 3)
        assert torch.equal(p, encode(plain(each), into(each, x), 5, 3))
        assert torch.equal(bits(decode(each, p, n)), bits(back(each, decode(plain(each), p, whole), n)))
        total = reduce(plain(each), [p, q], whole, into(each, y), 1, 3)
        assert torch.equal(bits(reduce(each, [p, q], n, y, 1, 3)), bits(back(each, total, n)))
        assert torch.equal(
            reduce_encode(each, [p, q], n, y, 1, 3, key=7),
            reduce_encode(plain(each), [p, q], whole, into(each, y), 1, 3, key=7),
        )


@pytest.mark.parametrize("each", ROTATING, ids=str)
def test_linear(each: Codec) -> None:
    """The sum in the rotated domain is the sum of what the payloads decode to."""
    n = each.granularity + 77
    x, y, z = (floats("normal", n, seed=seed) for seed in range(3))
    p, q = encode(each, x), encode(each, y)
    expected = decode(each, p, n).double() + decode(each, q, n).double() + z.double()
    assert (reduce(each, [p, q], n, z, 0) - expected).abs().max() < 1e-5


@pytest.mark.parametrize(("each", "dtype"), list(zip(ROTATING, itertools.cycle(FLOAT_TYPES))), ids=str)
def test_nothing_is_lost_beside_the_residual(each: Codec, dtype: torch.dtype) -> None:
    n = each.granularity + 77
    x, old = floats("normal", n, seed=1).to(dtype), floats("normal", n, seed=2)
    residual = old.clone()
    decoded = decode(each, encode(each, x, residual=residual), n)
    assert (decoded.double() + residual - x.double() - old).abs().max() < 5e-6


@pytest.mark.parametrize("each", ROTATING, ids=str)
def test_bad_numbers_fill_their_block(each: Codec) -> None:
    block = each.layout().block
    for bad in (NAN, INF, -INF):
        x, old = floats("normal", 3 * block), floats("normal", 3 * block, seed=1)
        x[block + 3] = bad
        residual = old.clone()
        y = decode(each, encode(each, x, residual=residual), 3 * block)
        assert y[block : 2 * block].isnan().all()
        assert y[:block].isfinite().all() and y[2 * block :].isfinite().all()
        assert torch.equal(residual[block : 2 * block], old[block : 2 * block])
        assert not torch.equal(residual[:block], old[:block])


def test_what_fp32_cannot_add_is_nan() -> None:
    x = torch.full((64,), 1e38)
    x[32:] = 3.3e38
    y = decode("int8:rotate=hadamard", encode("int8:rotate=hadamard", x), 64)
    assert y[:32].isfinite().all() and y[32:].isnan().all()


def test_extremes_survive_in_blocks_of_their_own() -> None:
    for value in (1e-30, 1e30):
        x = torch.full((32,), value)
        y = decode("int8:rotate=hadamard", encode("int8:rotate=hadamard", x), 32)
        assert torch.allclose(y, x, rtol=2**-6, atol=0)


def test_a_lone_element_has_the_whole_block() -> None:
    """All codes of the cut block hold a part of it, and the error of their mean is small."""
    x = torch.tensor([1.25, -3.0])[:1]
    y = decode("int8:block=256,rotate=hadamard", encode("int8:block=256,rotate=hadamard", x), 1)
    assert (y - x).abs() < 1.25 * 2**-8
