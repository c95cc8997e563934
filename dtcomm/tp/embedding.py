"""An embedding whose vocabulary is shared out among ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from dtcomm.codecs import Codec
from dtcomm.tp import functional
from dtcomm.tp.comm_config import Group, wire
from dtcomm.tp.sharded_module import Sharded


class VocabParallelEmbedding(Sharded):
    """Each rank holds a run of the vocabulary's rows; a token's vector comes from the one rank that has it.

    The ranks' results, of which all but one are zeros, are summed in `codec`.
    """

    weight: nn.Parameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        codec: str | Codec = "none",
        algorithm: str = "auto",
        group: Group = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(wire(codec, algorithm=algorithm, group=group))
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        rows = self.wire.parts(num_embeddings, "num_embeddings")
        self.first = rows * self.wire.rank
        self.share("weight", (rows, embedding_dim), 0, device, dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As nn.Embedding's: with the same seed the ranks' parts are those of the dense module."""
        self.fill(_fill)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """[...] → [..., embedding_dim]. IndexError where a token is outside the vocabulary."""
        if torch.compiler.is_compiling():  # which cannot raise for what a tensor holds, but can end
            inside = (tokens >= 0) & (tokens < self.num_embeddings)
            torch._assert_async(inside.all(), f"tokens: expected 0 to {self.num_embeddings - 1}")
        elif tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.num_embeddings:
            raise IndexError(f"tokens: expected 0 to {self.num_embeddings - 1}")
        local = tokens - self.first
        mine = (local >= 0) & (local < len(self.weight))
        vectors = F.embedding(torch.where(mine, local, 0), self.weight)
        return functional.reduce_from_ranks(vectors * mine.unsqueeze(-1).to(vectors.dtype), self.wire)

    def extra_repr(self) -> str:
        return (
            f"{self.num_embeddings}, {self.embedding_dim}, ranks={self.wire.ranks}, codec={self.wire.codec}"
        )


def _fill(name: str, full: torch.Tensor) -> None:
    nn.init.normal_(full)
