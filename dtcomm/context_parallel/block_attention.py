"""Attention of one block of queries to one block of keys, and the merging of the blocks of one query.

A block's result is its output, normalised over the block's own keys, and the logarithm of the sum of the exponentials
of its scores (the log-sum-exp). Two blocks with outputs o1, o2 and log-sum-exps l1, l2 give

    l = log(exp(l1) + exp(l2)),    o = o1 · exp(l1 - l) + o2 · exp(l2 - l)

which is exact up to fp32 rounding; this is the online softmax of Milakov and Gimelshein 2018 (arXiv:1805.02867). The
backward pass of a block needs only the final output and the final log-sum-exp, as in FlashAttention-2 (Dao 2023,
arXiv:2307.08691).

Blocks run on torch's fused kernels where these return the log-sum-exp: on the CPU in fp32, whatever the dtype of the
tensors, and on CUDA devices for fp16 and bf16. Otherwise (CUDA with fp32, values whose head dimension is not that of
the keys) `reference_forward` and `reference_backward` compute in fp32, `QUERIES` queries at a time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from dtcomm import torch_compat
from dtcomm.context_parallel.layout import Visible

QUERIES = 1024  # of one piece of the reference, which holds all scores of a piece


class Gradients(NamedTuple):
    """Gradients of one block's queries, keys and values."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


class Accumulator:
    """Merges the blocks of this rank's queries, in fp32."""

    def __init__(self, q: torch.Tensor, v_dim: int) -> None:
        self.out = torch.zeros((*q.shape[:3], v_dim), dtype=torch.float32, device=q.device)
        self.lse = torch.full(q.shape[:3], -torch.inf, dtype=torch.float32, device=q.device)

    def merge(self, queries: slice, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Merge a block's output and log-sum-exp into those of its queries."""
        before = self.lse[:, :, queries]
        merged = torch.logaddexp(before, lse)
        total = self.out[:, :, queries]
        total.mul_((before - merged).exp().unsqueeze(-1)).add_(out * (lse - merged).exp().unsqueeze(-1))
        before.copy_(merged)


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: Visible, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output and the log-sum-exp of the visible part of a block.

    ``q`` are the queries of this rank, ``k`` and ``v`` the keys and values of one rank, [batch, heads, tokens,
    head_dim].

    Returns:
        The output [batch, heads, visible queries, value head_dim] and the log-sum-exp, fp32 [batch, heads, visible
        queries].
    """
    q = q[:, :, visible.queries]
    k, v = (repeat_heads(x[:, :, visible.keys], q.shape[1]) for x in (k, v))
    if _fused_on_cpu(q, v):
        q, k, v = q.float(), k.float(), v.float()
        out, lse = torch_compat.flash_attention_cpu(q, k, v, 0.0, visible.causal, scale=scale)
        return out, lse
    if _fused_on_cuda(q, v):
        out, lse = torch_compat.flash_attention_cuda(q, k, v, 0.0, visible.causal, False, scale=scale)[:2]
        return out.float(), lse
    return reference_forward(q, k, v, visible.causal, scale)


def backward(
    gradient: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    visible: Visible,
    scale: float,
) -> Gradients:
    """Return the gradients of the visible part of a block, fp32.

    ``q``, ``k`` and ``v`` are as in `forward`. ``out`` and ``lse`` are those of all blocks together, [batch, heads,
    tokens, value head_dim] and fp32 [batch, heads, tokens]; ``gradient`` is that of ``out``.
    """
    heads = k.shape[1]
    gradient, q, out, lse = (x[:, :, visible.queries] for x in (gradient, q, out, lse))
    k, v = (repeat_heads(x[:, :, visible.keys], q.shape[1]) for x in (k, v))
    if _fused_on_cpu(q, v):
        gradient, q, k, v, out = (x.float() for x in (gradient, q, k, v, out))
        dq, dk, dv = torch_compat.flash_attention_cpu_backward(
            gradient, q, k, v, out, lse, 0.0, visible.causal, scale=scale
        )
    elif _fused_on_cuda(q, v):
        none = torch.empty(0, device=q.device)
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # of the random numbers of dropout
        dq, dk, dv = torch_compat.flash_attention_cuda_backward(
            gradient, q, k, v, out, lse.contiguous(), none, none, q.shape[2], k.shape[2], 0.0, visible.causal,
            state, none, scale=scale
        )  # fmt: skip
    else:
        dq, dk, dv = reference_backward(gradient, q, k, v, out, lse, visible.causal, scale)
    return Gradients(dq.float(), _sum_heads(dk.float(), heads), _sum_heads(dv.float(), heads))


def reference_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and log-sum-exp in fp32, by the definition of attention."""
    k, v = k.float(), v.float()
    outs, lses = [], []
    for first in range(0, q.shape[2], QUERIES):
        scores = _scores(q[:, :, first : first + QUERIES].float(), k, first, causal, scale)
        lse = torch.logsumexp(scores, -1)
        outs.append((scores - lse.unsqueeze(-1)).exp() @ v)
        lses.append(lse)
    return torch.cat(outs, 2), torch.cat(lses, 2)


def reference_backward(
    gradient: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of queries, keys and values in fp32, by the chain rule."""
    k, v = k.float(), v.float()
    dqs, dk, dv = [], torch.zeros_like(k), torch.zeros_like(v)
    for first in range(0, q.shape[2], QUERIES):
        piece = slice(first, first + QUERIES)
        queries, upstream = q[:, :, piece].float(), gradient[:, :, piece].float()
        probabilities = (_scores(queries, k, first, causal, scale) - lse[:, :, piece, None]).exp()
        dv += probabilities.transpose(-1, -2) @ upstream
        delta = (upstream * out[:, :, piece].float()).sum(-1, keepdim=True)
        d_scores = probabilities * (upstream @ v.transpose(-1, -2) - delta) * scale
        dqs.append(d_scores @ k)
        dk += d_scores.transpose(-1, -2) @ queries
    return torch.cat(dqs, 2), dk, dv


def repeat_heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """Return keys or values with as many heads as the queries: consecutive query heads share one (grouped queries)."""
    if x.shape[1] == heads:
        return x
    batch, own, tokens, dim = x.shape
    return x.unsqueeze(2).expand(batch, own, heads // own, tokens, dim).reshape(batch, heads, tokens, dim)


def _sum_heads(gradient: torch.Tensor, heads: int) -> torch.Tensor:
    """Return the gradient of `repeat_heads`."""
    if gradient.shape[1] == heads:
        return gradient
    batch, _, tokens, dim = gradient.shape
    return gradient.view(batch, heads, -1, tokens, dim).sum(2)


def _scores(q: torch.Tensor, k: torch.Tensor, first: int, causal: bool, scale: float) -> torch.Tensor:
    """Return the scores of a piece of the queries that begins at query ``first``."""
    scores = (q @ k.transpose(-1, -2)) * scale
    if causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(first + 1)
        scores = scores.masked_fill(hidden, -torch.inf)
    return scores


def _fused_on_cpu(q: torch.Tensor, v: torch.Tensor) -> bool:
    return q.is_cpu and v.shape[-1] == q.shape[-1]


def _fused_on_cuda(q: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether torch's FlashAttention takes these tensors: 16-bit, head dimension a multiple of 8 up to 256."""
    dim = q.shape[-1]
    return (
        q.is_cuda
        and q.dtype in (torch.float16, torch.bfloat16)
        and v.shape[-1] == dim
        and dim % 8 == 0
        and dim <= 256
    )
