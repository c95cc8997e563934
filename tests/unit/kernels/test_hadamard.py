"""Option rotate=hadamard: an orthogonal transform around the codec, the same in all verbs and kernels."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from dtcomm.codecs import Codec
from dtcomm.codecs import codec as parse
from dtcomm.codecs.base import FLOAT_TYPES
from dtcomm.kernels import reference
from dtcomm.kernels.ops import decode, encode, reduce, reduce_encode
from tests.unit.codecs.cases import codecs_with_option_sets
from tests.unit.kernels.inputs import floats

ROTATING = [codec for codec in codecs_with_option_sets() if reference.rotates(codec)]
NAN, INF = float("nan"), float("inf")


pytestmark = pytest.mark.usefixtures("kernel")


def without_rotation(codec: Codec) -> Codec:
    return dataclasses.replace(codec, rotate="none")  # type: ignore[call-arg]


def rotate(codec: Codec, x: torch.Tensor) -> torch.Tensor:
    with np.errstate(all="ignore"):
        return torch.from_numpy(reference.rotate(codec, x.numpy()))


def rotate_back(codec: Codec, x: torch.Tensor, numel: int) -> torch.Tensor:
    with np.errstate(all="ignore"):
        return torch.from_numpy(reference.rotate_back(codec, x.numpy(), numel))


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view(torch.int32)


@pytest.mark.parametrize("block", (16, 32, 64, 512, 2048))
def test_the_matrix_is_a_hadamard_matrix(block: int) -> None:
    """It is Sylvester's matrix with signs: orthogonal, and its own inverse up to the signs."""
    codec = parse(f"int8:block={block},rotate=hadamard")
    matrix = np.ones((1, 1))
    while len(matrix) < block:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    signs = rotate(codec, torch.eye(block).reshape(-1)).view(block, block)[:, 0].sign().double().numpy()
    x = floats("normal", block)
    exact = matrix @ (x.double().numpy() * signs) / block**0.5
    assert np.abs(rotate(codec, x).numpy() - exact).max() < 4e-6
    assert (rotate_back(codec, rotate(codec, x), block) - x).abs().max() < 4e-6


@pytest.mark.parametrize(("block", "max_sum"), [(16, 4), (32, 8), (64, 12), (128, 36), (4096, 204)])
def test_rotation_spreads_a_constant_block(block: int, max_sum: int) -> None:
    """The signs correlate with no row of the matrix, so that no element gets most of a constant block."""
    codec = parse(f"int8:block={block},rotate=hadamard")
    spread = rotate(codec, torch.ones(block)) * block**0.5
    assert spread.abs().max().round() == max_sum


@pytest.mark.parametrize(
    ("codec", "kind"), list(zip(ROTATING, itertools.cycle(["normal", "nonfinite", "wide"]))), ids=str
)
def test_rotation_equals_the_plain_codec_of_rotated_blocks(codec: Codec, kind: str) -> None:
    """The payload and the decoded floats are those of the plain codec for rotated blocks, whole and cut."""
    for n in (codec.granularity, codec.granularity + 5, 2 * codec.layout().block - 1, 1):
        x, y = floats(kind, n, seed=1), floats(kind, n, seed=2)
        rotated_numel = rotate(codec, x).numel()
        p, q = encode(codec, x, 5, 3), encode(codec, y, 6, 3)
        assert torch.equal(p, encode(without_rotation(codec), rotate(codec, x), 5, 3))
        assert torch.equal(
            bits(decode(codec, p, n)),
            bits(rotate_back(codec, decode(without_rotation(codec), p, rotated_numel), n)),
        )
        total = reduce(without_rotation(codec), [p, q], rotated_numel, rotate(codec, y), 1, 3)
        assert torch.equal(bits(reduce(codec, [p, q], n, y, 1, 3)), bits(rotate_back(codec, total, n)))
        assert torch.equal(
            reduce_encode(codec, [p, q], n, y, 1, 3, key=7),
            reduce_encode(without_rotation(codec), [p, q], rotated_numel, rotate(codec, y), 1, 3, key=7),
        )


@pytest.mark.parametrize("codec", ROTATING, ids=str)
def test_a_sum_in_the_rotated_domain_is_the_sum_of_the_decodings(codec: Codec) -> None:
    """The sum in the rotated domain is the sum of what the payloads decode to."""
    n = codec.granularity + 77
    x, y, z = (floats("normal", n, seed=seed) for seed in range(3))
    p, q = encode(codec, x), encode(codec, y)
    expected = decode(codec, p, n).double() + decode(codec, q, n).double() + z.double()
    assert (reduce(codec, [p, q], n, z, 0) - expected).abs().max() < 1e-5


@pytest.mark.parametrize(("codec", "dtype"), list(zip(ROTATING, itertools.cycle(FLOAT_TYPES))), ids=str)
def test_decoding_plus_residual_equals_input(codec: Codec, dtype: torch.dtype) -> None:
    n = codec.granularity + 77
    x, old = floats("normal", n, seed=1).to(dtype), floats("normal", n, seed=2)
    residual = old.clone()
    decoded = decode(codec, encode(codec, x, residual=residual), n)
    assert (decoded.double() + residual - x.double() - old).abs().max() < 5e-6


@pytest.mark.parametrize("codec", ROTATING, ids=str)
def test_nan_and_inf_make_their_block_nan(codec: Codec) -> None:
    block = codec.layout().block
    for bad in (NAN, INF, -INF):
        x, old = floats("normal", 3 * block), floats("normal", 3 * block, seed=1)
        x[block + 3] = bad
        residual = old.clone()
        y = decode(codec, encode(codec, x, residual=residual), 3 * block)
        assert y[block : 2 * block].isnan().all()
        assert y[:block].isfinite().all() and y[2 * block :].isfinite().all()
        assert torch.equal(residual[block : 2 * block], old[block : 2 * block])
        assert not torch.equal(residual[:block], old[:block])


def test_rotated_sums_beyond_fp32_are_nan() -> None:
    x = torch.full((64,), 1e38)
    x[32:] = 3.3e38
    y = decode("int8:rotate=hadamard", encode("int8:rotate=hadamard", x), 64)
    assert y[:32].isfinite().all() and y[32:].isnan().all()


def test_extremes_survive_in_blocks_of_their_own() -> None:
    for value in (1e-30, 1e30):
        x = torch.full((32,), value)
        y = decode("int8:rotate=hadamard", encode("int8:rotate=hadamard", x), 32)
        assert torch.allclose(y, x, rtol=2**-6, atol=0)


def test_a_single_element_uses_the_whole_block() -> None:
    """Every code of the padded block contributes to it, so that the error of the mean is small."""
    x = torch.tensor([1.25, -3.0])[:1]
    y = decode("int8:block=256,rotate=hadamard", encode("int8:block=256,rotate=hadamard", x), 1)
    assert (y - x).abs() < 1.25 * 2**-8
