"""Attention of one block: the reference beside torch's kernels, and the merging of blocks."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from dtcomm.context_parallel import block_attention
from dtcomm.context_parallel.layout import Visible

SCALE = 0.3


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tokens", [1, 7, block_attention.QUERIES + 3])
def test_the_fused_kernels_equal_the_reference(causal: bool, tokens: int) -> None:
    q, k, v, gradient = tensors(*[(1, 2, tokens, 8)] * 4)
    everything = Visible(slice(0, tokens), slice(0, tokens), causal)
    out, lse = block_attention.forward(q, k, v, everything, SCALE)
    expected_out, expected_lse = block_attention.reference_forward(q, k, v, causal, SCALE)
    assert relative(out, expected_out) < 1e-6
    assert relative(lse, expected_lse) < 1e-6
    actual = block_attention.backward(gradient, q, k, v, out, lse, everything, SCALE)
    expected = block_attention.reference_backward(gradient, q, k, v, out, lse, causal, SCALE)
    for a, b in zip(actual, expected, strict=True):
        # A difference of products of the gradient, which is zero but for rounding where there is a single token.
        assert (a - b).norm() <= 2e-6 * max(b.norm(), gradient.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("v_dim", [8, 5])
def test_merged_blocks_equal_attention_to_all_keys(dtype: torch.dtype, v_dim: int) -> None:
    """Two blocks of keys, of which the second is seen by the second half of the queries only; grouped queries."""
    q, k, v, gradient = tensors((2, 4, 6, 8), (2, 2, 9, 8), (2, 2, 9, v_dim), (2, 4, 6, v_dim), dtype=dtype)
    parts = [Visible(slice(0, 6), slice(0, 5), False), Visible(slice(3, 6), slice(5, 9), False)]
    total = block_attention.Accumulator(q, v_dim)
    for part in parts:
        total.merge(part.queries, *block_attention.forward(q, k, v, part, SCALE))
    mask = torch.ones(6, 9, dtype=torch.bool)
    mask[:3, 5:] = False
    exact = [x.float().clone().requires_grad_() for x in (q, k, v)]
    expected = functional.scaled_dot_product_attention(*exact, attn_mask=mask, scale=SCALE, enable_gqa=True)
    assert relative(total.out, expected.detach()) < 1e-6
    expected.backward(gradient.float())
    sums = [torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v)]
    for part in parts:
        block = block_attention.backward(gradient, q, k, v, total.out, total.lse, part, SCALE)
        sums[0][:, :, part.queries] += block.q
        sums[1][:, :, part.keys] += block.k
        sums[2][:, :, part.keys] += block.v
    for actual, reference in zip(sums, exact, strict=True):
        assert reference.grad is not None
        assert relative(actual, reference.grad) < 2e-6
