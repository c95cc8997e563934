"""Whole blocks of a transformer, shared out among ranks: they start, load and save as their dense counterparts would.

`ParallelMLP` sends one sum a forward pass and `ParallelAttention` one; both take the residual stream, so that the pass
that decodes the sum adds it (see `RowParallelLinear`). ``dtcomm.tp.full_state_dict`` gives the dense state.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from dtcomm.tp.linear import ColumnParallelLinear, RowParallelLinear

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "relu": F.relu,
    "silu": F.silu,
}


class ParallelMLP(nn.Module):
    """``down(activation(up(x)))``, or, gated, ``down(activation(gate(x)) * up(x))``; hidden features are shared out.

    Parameters are those of nn.Linear layers up, gate and down, made in this order. options: as of the layers: codec,
    backward_codec, algorithm, chunks, latency, sequence_parallel, sequence_dim, group, device, dtype.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        *,
        activation: str = "gelu",
        gated: bool = False,
        bias: bool = True,
        **options: Any,
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation: {activation!r}; valid: {', '.join(ACTIVATIONS)}")
        self.activation = activation
        inner = _column(options)
        self.up = ColumnParallelLinear(width, hidden, bias, **inner)
        self.gate = ColumnParallelLinear(width, hidden, bias, **inner) if gated else None
        self.down = RowParallelLinear(hidden, width, bias, **options)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """[..., width] → [..., width], plus the residual stream where given."""
        activate = ACTIVATIONS[self.activation]
        hidden = activate(self.up(x)) if self.gate is None else activate(self.gate(x)) * self.up(x)
        y: torch.Tensor = self.down(hidden, residual)
        return y


class ParallelAttention(nn.Module):
    """Softmax attention whose heads are shared out; with ``kv_heads`` fewer than heads, queries share keys and values.

    Parameters are those of nn.Linear layers q, k, v and o, made in this order. options: as of `ParallelMLP`. ValueError
    where the heads do not divide among the ranks.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        causal: bool = True,
        bias: bool = True,
        **options: Any,
    ) -> None:
        super().__init__()
        kv = heads if kv_heads is None else kv_heads
        if kv < 1 or heads % kv:
            raise ValueError(f"kv_heads: {kv} does not divide the {heads} heads")
        if head_dim is None and width % heads:
            raise ValueError(f"heads: {heads} do not divide the width, {width}; give head_dim")
        self.head_dim = width // heads if head_dim is None else head_dim
        self.causal = causal
        inner = _column(options)
        self.q = ColumnParallelLinear(width, heads * self.head_dim, bias, **inner)
        for name, count in (("heads", heads), ("kv_heads", kv)):
            if count % self.q.wire.ranks:
                raise ValueError(f"{name}: {count} do not divide among {self.q.wire.ranks} ranks")
        self.k = ColumnParallelLinear(width, kv * self.head_dim, bias, **inner)
        self.v = ColumnParallelLinear(width, kv * self.head_dim, bias, **inner)
        self.o = RowParallelLinear(heads * self.head_dim, width, bias, **options)
        self.shared = heads != kv

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """[batch, length, width] → the same, plus the residual stream where given. mask: as of torch's
        scaled_dot_product_attention; with one, `causal` is up to it.
        """
        query, key, value = (
            each(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for each in (self.q, self.k, self.v)
        )
        attended = F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=self.causal and mask is None, enable_gqa=self.shared
        )
        y: torch.Tensor = self.o(attended.transpose(1, 2).flatten(2), residual)
        return y


def _column(options: dict[str, Any]) -> dict[str, Any]:
    """The options of the layers before the sum."""
    return {name: value for name, value in options.items() if name != "chunks"}
