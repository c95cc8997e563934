"""Sparse codecs: which elements are kept, where they are placed, and that the residual holds all others."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dtcomm import _C
from dtcomm.codecs import RandK, TopK
from dtcomm.codecs import codec as parse
from dtcomm.codecs.base import FLOAT_TYPES
from dtcomm.kernels import available, current, use
from dtcomm.kernels.ops import decode, encode, reduce, reduce_encode
from dtcomm.kernels.reference import sparse
from tests.unit.codecs.cases import codecs_with_option_sets
from tests.unit.kernels.inputs import KINDS, floats

SPARSE = [codec for codec in codecs_with_option_sets() if isinstance(codec, (TopK, RandK))]
EXACT = [codec for codec in SPARSE if codec.values == "fp32"]
NAN, INF = float("nan"), float("inf")


every_kernel = pytest.mark.parametrize("kernel", available(), indirect=True)
pytestmark = pytest.mark.usefixtures("kernel")


def round_trip(codec: TopK | RandK | str, x: torch.Tensor, key: int = 0) -> torch.Tensor:
    return decode(codec, encode(codec, x, key), x.numel())


def indices_of_largest(x: torch.Tensor, kept: int) -> list[int]:
    """Return the indices by descending magnitude; of equal ones the lowest index first, NaN before all numbers."""
    size = [int(word) & 0x7FFFFFFF for word in x.view(torch.int32)]
    return sorted(sorted(range(len(size)), key=lambda i: (-size[i], i))[:kept])


@every_kernel
@pytest.mark.parametrize("ratio", [0.0003, 0.01, 0.02, 0.03, 0.1, 0.3, 0.5, 0.99])
def test_the_largest_elements_are_kept(ratio: float) -> None:
    codec = TopK(ratio=ratio, values="fp32")
    for kind, n in zip(KINDS, itertools.cycle([4096, 700])):
        x = floats(kind, n, seed=5)
        y = round_trip(codec, x)
        kept = indices_of_largest(x, codec.layout().kept_of(n))
        expected = torch.zeros(n)
        expected[kept] = x[kept]
        assert torch.equal(y.nan_to_num(7, 8, 9), expected.nan_to_num(7, 8, 9))
        assert torch.equal(y.isnan(), expected.isnan())


@every_kernel
@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(
        st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, 2.5, -2.5, 1e-45, INF, -INF, NAN]), max_size=60
    ),
    ratio=st.floats(0.001, 1),
    repeats=st.integers(1, 90),
)
def test_ties_go_to_the_lowest_index(values: list[float], ratio: float, repeats: int) -> None:
    x = torch.tensor(values).repeat(repeats)[:4096]
    if x.numel():
        payload = encode(TopK(ratio=ratio, values="fp32"), x)
        codec = TopK(ratio=ratio, values="fp32")
        y = decode(codec, payload, x.numel())
        kept = indices_of_largest(x, codec.layout().kept_of(x.numel()))
        dropped = torch.ones(x.numel(), dtype=torch.bool)
        dropped[kept] = False
        assert torch.equal(y[kept].nan_to_num(7), x[kept].nan_to_num(7)) and not y[dropped].any()


@every_kernel
def test_known_bytes() -> None:
    """Five of 16 elements by the document: values, then positions 12 bits each, the low bits first."""
    x = torch.zeros(16)
    for at, value in ((1, -3.0), (4, 1.5), (9, 2.0), (10, -2.0), (15, 8.0), (2, 1.0)):
        x[at] = value
    payload = encode("topk:ratio=0.3", x)  # 1229 of 4096: a bitmap
    assert bytes(payload[:10].tolist()) == bytes.fromhex("40c0c03f004000c00041")
    assert bytes(payload[10:12].tolist()) == bytes([0b0001_0010, 0b1000_0110]) and not payload[12:].any()
    payload = encode("topk:ratio=0.08", x)  # 328 of 4096: 2 of 16, a list
    assert bytes(payload.tolist()) == bytes.fromhex("40c0004101f000") + bytes(9)


@every_kernel
def test_positions_are_those_of_the_first_version() -> None:
    """Peers of two versions must draw the same positions."""
    key = 0x0123456789ABCDEF
    payload = encode("randk:ratio=0.001", torch.arange(4096.0), key, 2**32 - 500, residual=torch.zeros(4096))
    assert payload[:8].tolist() == [40, 152, 33, 10, 242, 25, 143, 124]
    assert payload[8:].view(torch.bfloat16).tolist() == [50.0, 804.0, 2384.0, 2592.0]
    assert sparse.positions(
        int.from_bytes(bytes([40, 152, 33, 10, 242, 25, 143, 124]), "little"), 4096, 4
    ).tolist() == [50, 805, 2383, 2586]
    assert sparse.positions(key, 1000, 4).tolist() == [194, 191, 665, 121]


@every_kernel
@pytest.mark.parametrize("spec", ["topk:ratio=0.02", "randk:ratio=0.02", "topk:ratio=0.2,values=int4"])
def test_nan_and_inf_are_kept(spec: str) -> None:
    for bad in (NAN, INF, -INF):
        x = floats("normal", 3 * 4096)
        x[4096 + 1234] = bad
        y = round_trip(spec, x)
        assert y[:4096].isfinite().all() and y[8192:].isfinite().all()
        middle = y[4096:8192]
        assert middle.isnan().all() if spec.startswith("randk") else not middle[1234].isfinite()


@every_kernel
@pytest.mark.parametrize(
    "spec", ["topk:ratio=0.01,values=fp32", "topk:ratio=0.1", "randk:ratio=0.1,values=int8"]
)
def test_residuals_of_nan_and_inf_stay(spec: str) -> None:
    """topk keeps the residuals of these elements and of those that share their NaN, randk those of the granule."""
    n = 2 * 4096
    x, old = floats("normal", n), floats("normal", n, seed=3)
    x[[5, 4000]] = torch.tensor([NAN, INF])
    residual = old.clone()
    y = decode(spec, encode(spec, x, residual=residual), n)
    error = x + old - y
    assert torch.equal(residual, torch.where(error.isfinite(), error, old))
    assert torch.equal(residual[[5, 4000]], old[[5, 4000]]) and residual.isfinite().all()
    if spec.startswith("randk"):
        assert torch.equal(residual[:4096], old[:4096])


@pytest.mark.parametrize("codec", EXACT, ids=str)
def test_mass_is_conserved_exactly(codec: TopK | RandK) -> None:
    """With fp32 values decoded + new residual is x + old residual, element by element and bit by bit."""
    for n in (4096, 3 * 4096 + 5, 77):
        x, old = floats("wide", n).clamp(-1e37, 1e37), floats("normal", n, seed=4)
        residual = old.clone()
        y = decode(codec, encode(codec, x, residual=residual, key=n), n)
        assert torch.equal(y + residual, x + old)
        assert not (y * residual).any()  # the residual is zero where an element was sent


@pytest.mark.parametrize("codec", EXACT, ids=str)
def test_mass_of_a_sum_is_conserved_exactly(codec: TopK | RandK) -> None:
    """The same of reduce_encode: the sum of the decodings, encoded anew, and what that leaves out. Small integers, so
    that fp32 sums are exact; divided by a power of two, of which the residual counts times the divisor."""
    n = 2 * 4096 + 9
    terms = [floats("normal", n, seed=seed).mul(64).round() for seed in range(4)]
    payloads = [encode(codec, term, key=seed) for seed, term in enumerate(terms[:3])]
    if isinstance(codec, RandK):  # unscaled: n / k is no power of two
        payloads = [encode(codec, t, key=i, residual=torch.zeros(n)) for i, t in enumerate(terms[:3])]
    decoded = [decode(codec, payload, n) for payload in payloads]
    assert torch.equal(reduce(codec, payloads, n), decoded[0] + decoded[1] + decoded[2])
    for divisor in (1, 4):
        residual = floats("normal", n, seed=9).mul(16).round()
        total = decoded[0] + decoded[1] + decoded[2] + (terms[3] + residual)
        out = reduce_encode(codec, payloads, n, terms[3], divisor=divisor, residual=residual, key=11)
        result = decode(codec, out, n)
        assert torch.equal(result * divisor + residual, total)
        if isinstance(codec, TopK):
            assert torch.equal(out, encode(codec, total / divisor, key=11))


@pytest.mark.parametrize("codec", SPARSE, ids=str)
def test_mass_is_conserved_over_steps(codec: TopK | RandK) -> None:
    """Every input is either decoded or in the residual: to the rounding of the sums where values are rounded."""
    n = 4096 + 100
    residual, out, into = (
        torch.zeros(n),
        torch.zeros(n, dtype=torch.float64),
        torch.zeros(n, dtype=torch.float64),
    )
    for step in range(6):
        x = floats("normal", n, seed=step)
        into += x
        out += decode(codec, encode(codec, x, key=step, residual=residual), n)
    assert torch.allclose(out + residual, into, rtol=0, atol=1e-5)


@every_kernel
@pytest.mark.parametrize(
    ("spec", "dtype"),
    list(zip(["topk", "topk:ratio=0.02,values=int4,round=stochastic", "topk:values=fp16"], FLOAT_TYPES)),
)
def test_the_fast_path_with_feedback_gives_the_same_bytes(spec: str, dtype: torch.dtype) -> None:
    """Whole granules with a small ratio have a fast path if their sums are small numbers."""
    n = 3 * 4096 + 50
    for kind, size in itertools.product(KINDS, (1.0, 3e4)):
        x, old = (floats(kind, n, seed=1) * size).to(dtype), floats("ties", n, seed=2) * size
        results = []
        for name in ("reference", current()):
            with use(name):
                residual = old.clone()
                wire = encode(spec, x, 7, 100, residual)
                wire2 = encode(spec, x, 8, 100, residual)
                results.append((wire, wire2, residual.view(torch.int32)))
        assert all(torch.equal(expected, result) for expected, result in zip(*results, strict=True)), (
            kind,
            size,
        )


def test_feedback_sends_every_element_after_enough_steps() -> None:
    """After twice n/k steps with the same x every element was sent."""
    x = floats("normal", 4096).abs() + 0.5
    for spec in ("topk:ratio=0.05,values=fp32", "randk:ratio=0.05,values=fp32"):
        residual, received = torch.zeros(4096), torch.zeros(4096)
        for step in range(60 if spec.startswith("topk") else 400):
            received += decode(spec, encode(spec, x, key=step, residual=residual), 4096)
        assert (received > 0).all()


@pytest.mark.parametrize("n", [4096, 1000, 37, 3])
@pytest.mark.parametrize("values", ["fp32", "int8,round=stochastic"])
def test_randk_is_unbiased(n: int, values: str) -> None:
    """Means over keys lie within five standard errors of x, of each element and of all together."""
    spec, keys = f"randk:ratio=0.25,values={values}", 3000
    kept = -(-1024 * n // 4096)
    x = floats("normal", n, seed=1) + 0.3
    decoded = torch.stack([round_trip(spec, x, key=_C.mix_key(5, 1, step)) for step in range(keys)]).double()
    error = decoded.mean(0) - x.double()
    deviation = x.double().abs() * math.sqrt((n / kept - 1) / keys)
    assert (error.abs() <= 5 * deviation + n / kept * 4 / keys * x.abs().max()).all()
    totals = decoded.sum(1)
    assert (totals.mean() - x.double().sum()).abs() <= 5 * totals.std() / math.sqrt(keys) + 1e-6 * n
    if n < 40:  # every element is sent as often as any other
        share = (decoded != 0).double().mean(0)
        assert ((share - kept / n).abs() <= 5 * math.sqrt(kept / n / keys) + 4 / keys).all()


@pytest.mark.parametrize("n", [1, 2, 3, 5, 31, 32, 33, 1000, 4095, 4096])
def test_positions_are_a_permutation(n: int) -> None:
    for key in (0, 1, 2**64 - 1, 0x0123456789ABCDEF):
        assert sorted(sparse.positions(key, n, n).tolist()) == list(range(n))
        few = sparse.positions(key, n, -(-n // 3))
        assert few.tolist() == sparse.positions(key, n, n)[: len(few)].tolist()


def test_keys_and_offsets_draw_different_positions() -> None:
    """Granules, and calls with other keys, keep unrelated positions."""
    position_sets = set()
    for key, offset in itertools.product((0, 1, 2**40), (0, 4096, 2**33)):
        y = decode("randk", encode("randk", torch.ones(4096), key, offset), 4096)
        position_sets.add(tuple(y.nonzero().flatten().tolist()))
    assert len(position_sets) == 9
    two_granules = round_trip("randk:ratio=0.1", torch.ones(8192))
    shared = ((two_granules[:4096] != 0) & (two_granules[4096:] != 0)).sum()
    assert 15 <= shared <= 80  # 41 expected of unrelated ones, 410 of equal ones


def test_randk_scales_unless_the_error_is_fed_back() -> None:
    x = torch.ones(4096)
    for ratio, factor in ((0.25, 4.0), (1.0, 1.0), (0.01, float(torch.tensor(4096.0) / 41))):
        spec = f"randk:ratio={ratio},values=fp32"
        y = round_trip(spec, x)
        assert set(y.tolist()) <= {0.0, factor}
        y = decode(spec, encode(spec, x, residual=torch.zeros(4096)), 4096)
        assert set(y.tolist()) <= {0.0, 1.0}


@pytest.mark.parametrize("codec", SPARSE, ids=str)
def test_a_short_granule_keeps_its_share(codec: TopK | RandK) -> None:
    for n in (1, 2, 15, 100, 4095, 4096):
        x = torch.full((n,), 3.0)
        assert int((round_trip(codec, x) != 0).sum()) == -(-codec.kept * n // 4096)


def test_a_ratio_of_one_keeps_every_element() -> None:
    x = floats("wide", 5000).clamp(-1e37, 1e37)
    for name in ("topk", "randk"):
        assert torch.equal(round_trip(f"{name}:ratio=1,values=fp32", x), x)
    assert parse("topk:ratio=1,values=fp32").lossless(torch.float32)
    assert parse("topk:ratio=1").lossless(torch.bfloat16) and not parse("topk:ratio=1").lossless(
        torch.float32
    )
    assert not parse("randk:ratio=1,values=fp32").lossless(torch.float32)  # an Inf takes its granule along
