"""An embedding whose vocabulary is cut over the ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from dtcomm.codecs import Codec
from dtcomm.tp import functional
from dtcomm.tp.comm_config import GroupOrMesh, make_comm_config
from dtcomm.tp.sharded_module import ShardedModule


class VocabParallelEmbedding(ShardedModule):
    """An embedding table whose rows are cut over the ranks: each rank stores a contiguous range of the vocabulary.

    A token's vector comes from the one rank that stores it. The ranks' results, all but one of which are zeros, are
    summed in ``codec``.

    Args:
        num_embeddings: Size of the vocabulary; divisible by the number of ranks.
        embedding_dim: Size of the vectors.
        codec: Codec of the sum, a spec or a `Codec`. Default: ``"none"``.
        algorithm: Algorithm of the sum, see `CommConfig`. Default: ``"auto"``.
        group: Process group or one-dimensional device mesh. Default: all ranks.
        device: Device of the weight.
        dtype: Data type of the weight.

    Raises:
        ValueError: The vocabulary is not divisible by the number of ranks, or another argument is not valid.

    Example::

        embedding = dtcomm.tp.VocabParallelEmbedding(50304, 1024, codec="int8", group=mesh)
        vectors = embedding(tokens)  # [batch, length] -> [batch, length, 1024]
    """

    weight: nn.Parameter

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        codec: str | Codec = "none",
        algorithm: str = "auto",
        group: GroupOrMesh = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(make_comm_config(codec, algorithm=algorithm, group=group))
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        rows = self.comm.shard_size(num_embeddings, "num_embeddings")
        self.first_token = rows * self.comm.rank
        self.register_shard("weight", (rows, embedding_dim), 0, device, dtype)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize as nn.Embedding does: with the same seed the shards are those of the dense module."""
        self.init_parameters(_init_embedding)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the vectors of ``tokens``.

        Args:
            tokens: Integers [...], 0 to ``num_embeddings - 1``.

        Returns:
            [..., embedding_dim].

        Raises:
            IndexError: A token is outside the vocabulary (in compiled code: RuntimeError).
        """
        if torch.compiler.is_compiling():  # compiled code cannot raise because of a tensor's values
            in_vocabulary = (tokens >= 0) & (tokens < self.num_embeddings)
            torch._assert_async(in_vocabulary.all(), f"tokens: expected 0 to {self.num_embeddings - 1}")
        elif tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.num_embeddings:
            raise IndexError(f"tokens: expected 0 to {self.num_embeddings - 1}")
        local = tokens - self.first_token
        stored_here = (local >= 0) & (local < len(self.weight))
        vectors = F.embedding(torch.where(stored_here, local, 0), self.weight)
        return functional.reduce_from_ranks(vectors * stored_here.unsqueeze(-1).to(vectors.dtype), self.comm)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, ranks={self.comm.world_size}, codec={self.comm.codec}"


def _init_embedding(name: str, full: torch.Tensor) -> None:
    nn.init.normal_(full)
