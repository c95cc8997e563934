"""topk:scope=tensor: the largest elements of everything that is encoded together."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import dtcomm
from dtcomm.kernels.reference import sparse

SPECS = (
    "topk:scope=tensor",
    "topk:ratio=0.3,values=fp32,scope=tensor",
    "topk:ratio=1.0,values=fp16,scope=tensor",
)
SPECIAL = (0.0, -0.0, 1.0, -1.0, 1e-40, float("inf"), float("-inf"), float("nan"), 3e38)


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # of the reference, to Inf
@given(
    spec=st.sampled_from(SPECS),
    values=st.lists(st.sampled_from(SPECIAL) | st.floats(width=32), min_size=1, max_size=300),
)
def test_the_payload_is_that_of_the_reference(spec: str, values: list[float]) -> None:
    codec = dtcomm.codec(spec)
    x = torch.tensor(values)
    expected = sparse.encode_whole(codec, x.numpy())
    payload = dtcomm.encode(codec, x)
    assert payload.numel() == codec.wire_bytes(len(values)) == -(-len(expected) // 16) * 16
    assert np.array_equal(payload.numpy()[: len(expected)], expected)
    assert not payload[len(expected) :].any()
    decoded = dtcomm.decode(codec, payload, len(values))
    kept = max(1, round(codec.ratio * len(values)))
    assert int((decoded != 0).sum()) <= kept
    if codec.ratio == 1:
        same = (decoded == x.half().float()) | (decoded.isnan() & x.isnan())
        assert same.all()


def test_the_first_of_equal_elements_are_sent() -> None:
    decoded = dtcomm.decode(SPECS[0], dtcomm.encode(SPECS[0], torch.full((1000,), -2.0)), 1000)
    assert decoded[:10].tolist() == [-2.0] * 10 and not decoded[10:].any()


def test_it_keeps_what_granules_lose_where_large_elements_lie_close_together() -> None:
    x = torch.full((64 * 4096,), 0.01)
    x[:2600] = 10 + torch.arange(2600.0)  # 1 % of the tensor, all in the first granule
    energies = [
        float(dtcomm.decode(spec, dtcomm.encode(spec, x), x.numel()).square().sum() / x.square().sum())
        for spec in ("topk:values=fp32", "topk:values=fp32,scope=tensor")
    ]
    assert energies[0] < 0.1 and energies[1] > 0.999


def test_positions_outside_the_tensor_are_ignored() -> None:
    payload = dtcomm.encode(SPECS[0], torch.arange(1000.0))
    payload[:8] = torch.tensor([5000, -7], dtype=torch.int32).view(torch.uint8)
    decoded = dtcomm.decode(SPECS[0], payload, 1000)
    assert int((decoded != 0).sum()) == 8


def test_residuals_keep_what_is_not_sent() -> None:
    generator = torch.Generator().manual_seed(1)
    x, residual = torch.randn(5000, generator=generator), torch.zeros(5000)
    sent = torch.zeros(5000)
    for _ in range(20):
        payload = dtcomm.encode(SPECS[0], x, residual=residual)
        sent += dtcomm.decode(SPECS[0], payload, 5000)
    assert torch.allclose(sent + residual, 20 * x, atol=1e-2)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("topk:scope=row", "option 'scope' is row; valid: granule, tensor"),
        (
            "topk:scope=tensor,values=int8",
            "option 'values' is int8; valid with scope=tensor: bf16, fp16, fp32",
        ),
    ],
)
def test_wrong_options_are_named(spec: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dtcomm.codec(spec)


def test_where_a_kernel_is_needed_the_error_says_so() -> None:
    with pytest.raises(ValueError, match=r"executed by torch.*scope=granule"):
        dtcomm.codec(SPECS[0]).layout()
    with pytest.raises(ValueError, match=r"less than 2\*\*31"):
        dtcomm.codec(SPECS[0]).wire_bytes(2**31)
