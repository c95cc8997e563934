"""Transformer blocks with compressed tensor parallelism, to be copied: `ParallelMLP` and `ParallelAttention`.

They are initialized, loaded and saved as their dense counterparts; `dtcomm.tp.full_state_dict` gathers the dense state.
Each sends one sum per forward pass. Both take the residual stream, which is added in the pass that decodes the sum (see
`dtcomm.tp.RowParallelLinear`).

    from examples.tp_blocks import ParallelAttention, ParallelMLP

    attention = ParallelAttention(1024, 16, kv_heads=4, codec="int8", group=mesh)
    mlp = ParallelMLP(1024, 4096, codec="int8", group=mesh)
    x = attention(norm(x), residual=x)
    x = mlp(norm(x), residual=x)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from dtcomm.tp import ColumnParallelLinear, RowParallelLinear

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "relu": F.relu,
    "silu": F.silu,
}


class ParallelMLP(nn.Module):
    """A feed-forward block whose hidden features are cut over the ranks.

    It computes ``down(activation(up(x)))``, or ``down(activation(gate(x)) * up(x))`` if gated. The parameters are those
    of nn.Linear layers ``up``, ``gate`` and ``down``, made in this order.

    Args:
        width: Size of the last dimension of input and output.
        hidden: Number of hidden features; divisible by the number of ranks.
        activation: ``"gelu"``, ``"relu"`` or ``"silu"``. Default: ``"gelu"``.
        gated: Add the gate layer. Default: False.
        bias: Add biases to all layers. Default: True.
        chunks: Chunks of tokens of the layer ``down``, see `dtcomm.tp.RowParallelLinear`. Default: 1.
        **options: Options of all layers: ``codec``, ``backward_codec``, ``group``, ``sequence_parallel`` and so on.

    Raises:
        ValueError: An unknown activation, or an argument that the layers do not accept.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        *,
        activation: str = "gelu",
        gated: bool = False,
        bias: bool = True,
        chunks: int | str = 1,
        **options: Any,
    ) -> None:
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation: {activation!r}; valid: {', '.join(ACTIVATIONS)}")
        self.activation = activation
        self.up = ColumnParallelLinear(width, hidden, bias, **options)
        self.gate = ColumnParallelLinear(width, hidden, bias, **options) if gated else None
        self.down = RowParallelLinear(hidden, width, bias, chunks=chunks, **options)

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Return the block's output, plus the residual stream if one is passed; all are [..., width]."""
        activate = ACTIVATIONS[self.activation]
        hidden = activate(self.up(x)) if self.gate is None else activate(self.gate(x)) * self.up(x)
        y: torch.Tensor = self.down(hidden, residual)
        return y


class ParallelAttention(nn.Module):
    """A softmax attention block whose heads are cut over the ranks.

    The parameters are those of nn.Linear layers ``q``, ``k``, ``v`` and ``o``, made in this order.

    Args:
        width: Size of the last dimension of input and output.
        heads: Number of query heads; divisible by the number of ranks.
        kv_heads: Number of key and value heads, each of which serves ``heads / kv_heads`` query heads; divisible by
            the number of ranks. Default: ``heads``.
        head_dim: Features of a head. Default: ``width / heads``.
        causal: Mask later positions. Default: True.
        bias: Add biases to all layers. Default: True.
        chunks: Chunks of tokens of the layer ``o``. Default: 1.
        **options: Options of all layers, as of `ParallelMLP`.

    Raises:
        ValueError: The heads are not divisible by the number of ranks, or the sizes do not fit together.
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
        chunks: int | str = 1,
        **options: Any,
    ) -> None:
        super().__init__()
        kv = heads if kv_heads is None else kv_heads
        if kv < 1 or heads % kv:
            raise ValueError(f"kv_heads: {heads} heads are not divisible by {kv}")
        if head_dim is None and width % heads:
            raise ValueError(f"heads: the width, {width}, is not divisible by {heads}; pass head_dim")
        self.head_dim = width // heads if head_dim is None else head_dim
        self.causal = causal
        self.q = ColumnParallelLinear(width, heads * self.head_dim, bias, **options)
        for name, count in (("heads", heads), ("kv_heads", kv)):
            if count % self.q.comm.world_size:
                raise ValueError(f"{name}: {count} is not divisible by the {self.q.comm.world_size} ranks")
        self.k = ColumnParallelLinear(width, kv * self.head_dim, bias, **options)
        self.v = ColumnParallelLinear(width, kv * self.head_dim, bias, **options)
        self.o = RowParallelLinear(heads * self.head_dim, width, bias, chunks=chunks, **options)
        self.grouped_query = heads != kv

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None = None, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the block's output, plus the residual stream if one is passed.

        Args:
            x: [batch, length, width].
            residual: Tensor of the same shape. Default: None.
            mask: Attention mask as torch's scaled_dot_product_attention takes it; it replaces the causal mask.
                Default: None.
        """
        query, key, value = (
            layer(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        attended = F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=self.causal and mask is None, enable_gqa=self.grouped_query
        )
        y: torch.Tensor = self.o(attended.transpose(1, 2).flatten(2), residual)
        return y
