"""Linear layers whose weights are shared out among ranks."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from dtcomm.codecs import Codec
from dtcomm.kernels.epilogue import supports_epilogue
from dtcomm.tp import functional
from dtcomm.tp.comm_config import Group, wire
from dtcomm.tp.flash_all_reduce import Epilogue, Norm, Result
from dtcomm.tp.multiplied import multiplied
from dtcomm.tp.sharded_module import Sharded


class _Linear(Sharded):
    """What both layers have in common."""

    weight: nn.Parameter
    bias: nn.Parameter | None
    in_features: int
    out_features: int
    transposed: bool

    @property
    def matrix(self) -> torch.Tensor:
        """The weight as [out, in]."""
        return self.weight.t() if self.transposed else self.weight

    def reset_parameters(self) -> None:
        """As nn.Linear's (or Conv1D's): with the same seed the ranks' parts are those of the dense layer."""
        bound = 1 / math.sqrt(self.in_features) if self.in_features else 0.0
        self.fill(_fill_conv1d if self.transposed else lambda name, full: _fill(name, full, bound))

    def _share(self, rows: int, columns: int, dim: int, device: Any, dtype: torch.dtype | None) -> None:
        """The weight, [rows, columns], cut along ``dim`` of that, as it is kept."""
        shape = (columns, rows) if self.transposed else (rows, columns)
        self.share("weight", shape, 1 - dim if self.transposed else dim, device, dtype)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, ranks={self.wire.ranks}, codec={self.wire.codec}"


class ColumnParallelLinear(_Linear):
    """``y = x W' + b`` with the rows of W (the features of y) shared out; x is the same on all ranks.

    gather_output: join y on all ranks (compressed in `codec`), otherwise each rank keeps its features.
    sequence_parallel: x is this rank's part of the sequence (dimension `sequence_dim`) and is gathered first.
    backward_codec: of the gradient of x, which is summed over ranks. packed: y is so many outputs side by side
    (queries, keys and values), of each of which every rank has its part. transposed: the weight is kept as [in, out],
    as GPT-2's Conv1D keeps it.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        codec: str | Codec = "none",
        backward_codec: str | Codec = "none",
        gather_output: bool = False,
        sequence_parallel: bool = False,
        sequence_dim: int = 1,
        packed: int = 1,
        transposed: bool = False,
        algorithm: str = "auto",
        latency: bool = True,
        group: Group = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(wire(codec, backward_codec, algorithm=algorithm, group=group, latency=latency))
        if gather_output and sequence_parallel:
            raise ValueError("gather_output: with sequence_parallel the output stays shared out; choose one")
        self.in_features, self.out_features = in_features, out_features
        self.gather_output = gather_output
        self.sequence_dim = sequence_dim if sequence_parallel else None
        rows = self.wire.parts(out_features, "out_features")
        if packed < 1 or rows % packed:
            raise ValueError(f"packed: {packed} does not divide the {rows} output features of a rank")
        self.packed, self.transposed = packed, transposed
        self._share(rows, in_features, 0, device, dtype)
        if bias:
            self.share("bias", (rows,), 0, device, dtype)
        else:
            self.bias = None
        self.reset_parameters()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] → [..., out_features / ranks], or all features where they are gathered."""
        if self.sequence_dim is None:
            x = functional.copy_to_ranks(x, self.wire)
        else:
            x = functional.all_gather_from_ranks(x, self.wire, self.sequence_dim)
        y = F.linear(x, self.matrix, self.bias)
        return functional.gather_from_ranks(y, self.wire) if self.gather_output else y


class RowParallelLinear(_Linear):
    """``y = x W' + b`` with the columns of W (the features of x) shared out; the partial products are summed.

    The bias is added once, after the sum. input_is_parallel: x holds this rank's features; otherwise it holds all and
    is split. sequence_parallel: y is scattered along `sequence_dim`. chunks: tokens are multiplied in so many parts, so
    that one part's sum is on its way while the next is multiplied; "auto": see `dtcomm.tp.row_linear`. latency: small
    messages travel uncompressed where the planner finds that faster (`wire.traffic` says how many did, and why).
    transposed: the weight is kept as [in, out], as GPT-2's Conv1D keeps it. Compiled, a sum is one operation: neither
    chunks nor what follows go into it.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        codec: str | Codec = "none",
        backward_codec: str | Codec = "none",
        input_is_parallel: bool = True,
        sequence_parallel: bool = False,
        sequence_dim: int = 1,
        chunks: int | str = 1,
        transposed: bool = False,
        algorithm: str = "auto",
        latency: bool = True,
        group: Group = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(wire(codec, backward_codec, algorithm=algorithm, group=group, latency=latency))
        if chunks != "auto" and (
            not isinstance(chunks, int) or chunks < 1 or (chunks > 1 and sequence_parallel)
        ):
            raise ValueError(f"chunks: {chunks}; valid: 1 or more, 'auto', and 1 with sequence_parallel")
        self.in_features, self.out_features = in_features, out_features
        self.input_is_parallel = input_is_parallel
        self.sequence_dim = sequence_dim if sequence_parallel else None
        self.chunks, self.transposed = chunks, transposed
        columns = self.wire.parts(in_features, "in_features")
        self._share(out_features, columns, 1, device, dtype)
        self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """[..., in_features / ranks] (or all features) → [..., out_features], plus the residual stream where given.

        Bias and residual are added in the pass that decodes the sum.
        """
        return self._added(x, residual, None).y

    def with_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor | None, eps: float = 1e-6
    ) -> Result:
        """`forward`, and the RMS norm of its result in the same pass over memory."""
        return self._added(x, residual, Norm(weight, eps))

    def _added(self, x: torch.Tensor, residual: torch.Tensor | None, norm: Norm | None) -> Result:
        if not self.input_is_parallel:
            x = functional.split_to_ranks(x, self.wire)
        after = Epilogue(self.bias, residual, norm)
        if self.sequence_dim is not None:
            y = functional.reduce_scatter_to_ranks(F.linear(x, self.matrix), self.wire, self.sequence_dim)
        elif torch.compiler.is_compiling():
            y = functional.reduce_from_ranks(F.linear(x, self.matrix), self.wire)
        elif not torch.is_autocast_enabled(x.device.type) and supports_epilogue(
            x, self.weight, self.bias, residual, norm and norm.weight
        ):
            return multiplied(x, self.matrix, self.wire, self.chunks, after)
        else:
            if torch.is_autocast_enabled(x.device.type):
                x = x.to(torch.get_autocast_dtype(x.device.type))
            y = multiplied(x, self.matrix, self.wire, self.chunks, Epilogue()).y
        if self.bias is not None:
            y = y + self.bias.to(y.dtype)
        if residual is not None:
            y = y + residual
        if norm is None:
            return Result(y, None)
        return Result(y, F.rms_norm(y, (y.shape[-1],), norm.weight, norm.eps))


def _fill(name: str, full: torch.Tensor, bound: float) -> None:
    if name == "weight":
        nn.init.kaiming_uniform_(full, a=math.sqrt(5))
    else:
        nn.init.uniform_(full, -bound, bound)


def _fill_conv1d(name: str, full: torch.Tensor) -> None:
    if name == "weight":
        nn.init.normal_(full, std=0.02)
    else:
        nn.init.zeros_(full)
