"""Row-parallel products with the same bits on every number of ranks.

A row-parallel layer adds one partial product for each rank, so its rounding depends on the number of ranks. Here it
is cut into a fixed number of *terms* instead. Each rank computes the partial products of its terms, one by one, and all
terms of all ranks are added as integers (codec ``exact``, docs/guides/reproducible-sums.md) whose headroom is that of
the number of terms. What is added, and how, then does not depend on the ranks that do it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from dtcomm.codecs import Codec, Exact
from dtcomm.collectives import all_reduce
from dtcomm.kernels import local_tasks
from dtcomm.torch_compat import autograd_apply
from dtcomm.tp import RowParallelLinear, functional
from dtcomm.tp.comm_config import CommConfig
from dtcomm.tp.flash_all_reduce import EpilogueResult


class InvariantRowParallelLinear(RowParallelLinear):
    """A `dtcomm.tp.RowParallelLinear` whose results have the same bits on every number of ranks that divides ``terms``.

    Args:
        in_features: Size of the last dimension of the dense layer's input; a multiple of ``terms``.
        out_features: Size of the last dimension of the output.
        terms: Number of partial products that are added; a multiple of the number of ranks.
        codec: ``exact`` with its options. Default: ``"exact"``.
        **options: Other arguments of `dtcomm.tp.RowParallelLinear`, without ``sequence_parallel`` and ``chunks``.

    Raises:
        ValueError: ``terms``, ``codec`` or another argument is not valid.

    Example::

        layer = InvariantRowParallelLinear(1024, 1024, terms=8)
    """

    def __init__(
        self, in_features: int, out_features: int, *, terms: int, codec: str | Codec = "exact", **options: Any
    ) -> None:
        super().__init__(in_features, out_features, codec=codec, **options)
        if not isinstance(self.comm.codec, Exact):
            raise ValueError(f"codec: {self.comm.codec}; valid: exact, exact:bits=16, exact:bits=32")
        if self.sequence_dim is not None:
            raise ValueError("sequence_parallel: not with terms; valid: False")
        if terms < 1 or terms % self.comm.world_size or in_features % terms:
            raise ValueError(
                f"terms: {terms}; valid: a multiple of the {self.comm.world_size} ranks that divides in_features "
                f"({in_features})"
            )
        self.comm.codec.digits(terms)  # raises if the integers are too narrow
        self.terms = terms

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Return ``x W' + b``, plus the residual stream if one is passed; see `dtcomm.tp.RowParallelLinear.forward`."""
        if not self.input_is_parallel:
            x = functional.split_to_ranks(x, self.comm)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        y = row_linear_in_terms(x, self.matrix, self.comm, self.terms)
        if self.bias is not None:
            y = y + self.bias.to(y.dtype)
        return y if residual is None else y + residual

    def with_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, eps: float = 1e-6
    ) -> EpilogueResult:
        """Return `forward` and the RMS norm of its result."""
        y = self.forward(x, residual)
        return EpilogueResult(y, F.rms_norm(y, (y.shape[-1],), weight, eps))


def sum_of_terms(
    terms: Sequence[torch.Tensor], count: int, codec: Exact, group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    """Return the sum of the terms of all ranks, with bits that depend neither on the ranks nor on any order.

    ``terms`` are this rank's. Their number on all ranks, ``count``, sets the headroom of the integers.
    """
    flat = [term.detach().contiguous().view(-1) for term in terms]
    if not flat[0].numel():
        return torch.empty_like(terms[0])
    blocks = codec.blocks(flat[0].numel())
    exponents = torch.zeros(blocks, dtype=torch.uint8, device=flat[0].device)
    measured = torch.empty_like(exponents)
    for term in flat:
        local_tasks.measure_exponents(codec, term, None, measured)()
        torch.maximum(exponents, measured, out=exponents)
    all_reduce(exponents, "max", group=group)
    total = torch.empty(flat[0].numel(), dtype=codec.code_type, device=flat[0].device)
    local_tasks.quantize_to_exponents(codec, count, flat[0], None, exponents, total)()
    codes = torch.empty_like(total) if len(flat) > 1 else total
    for term in flat[1:]:
        local_tasks.quantize_to_exponents(codec, count, term, None, exponents, codes)()
        total.add_(codes)
    all_reduce(total, group=group)
    out = torch.empty_like(flat[0])
    local_tasks.dequantize(codec, count, total, exponents, 1, out)()
    return out.view(terms[0].shape)


def row_linear_in_terms(x: torch.Tensor, weight: torch.Tensor, comm: CommConfig, count: int) -> torch.Tensor:
    """Return ``x @ weight.t()`` summed over the ranks of ``comm`` as a sum of ``count`` terms. Differentiable.

    ``x`` has this rank's input features, ``weight`` its columns of the layer's weight.
    """
    return autograd_apply(_RowLinearInTerms, x, weight, comm, count)  # type: ignore[no-any-return]


class _RowLinearInTerms(torch.autograd.Function):
    """The gradient is that of the uncompressed product."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, comm: CommConfig, count: int
    ) -> torch.Tensor:
        weight = weight.to(x.dtype)
        ctx.save_for_backward(x, weight)
        assert isinstance(comm.codec, Exact)
        tokens = x.reshape(-1, x.shape[-1])
        own = count // comm.world_size
        comm.traffic.count("all_reduce", x, len(tokens) * len(weight), comm.codec, comm.codec, comm.algorithm)
        # Copies of the same shape on every number of ranks, so that the same matrix product is chosen.
        terms = [
            part.contiguous() @ columns.contiguous().t()
            for part, columns in zip(tokens.chunk(own, 1), weight.chunk(own, 1), strict=True)
        ]
        return sum_of_terms(terms, count, comm.codec, comm.group).view(*x.shape[:-1], len(weight))

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        flat = dy.reshape(-1, dy.shape[-1])
        dx = (flat @ weight).view_as(x) if ctx.needs_input_grad[0] else None
        dweight = flat.t() @ x.reshape(-1, x.shape[-1]) if ctx.needs_input_grad[1] else None
        return dx, dweight, None, None
