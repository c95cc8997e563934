"""The conjugate pairs of tensor parallelism (Megatron-LM, Shoeybi et al. 2019; sequence parallel: Korthikanti et al.
2022), each a function whose backward is its partner, both compressed.

| function | forward | backward |
|---|---|---|
| `copy_to_ranks` | – | all_reduce |
| `reduce_from_ranks` | all_reduce | – |
| `gather_from_ranks` | all_gather | own part |
| `split_to_ranks` | own part | all_gather |
| `reduce_scatter_to_ranks` | reduce_scatter | all_gather |
| `all_gather_from_ranks` | all_gather | reduce_scatter |

Compression is straight-through: the backward pass is that of the uncompressed function. Tensors are fp32, fp16 or bf16
(with codec none any type that may have a gradient), of any shape; `dim` must divide among the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from dtcomm.collectives import all_gather, all_reduce, reduce_scatter
from dtcomm.tp import compiled
from dtcomm.tp.comm_config import Wire
from dtcomm.tp.flash_all_reduce import two_step


def copy_to_ranks(x: torch.Tensor, wire: Wire) -> torch.Tensor:
    """The same tensor, used by all ranks: its gradient is the sum of theirs."""
    return _pair(x, "same", "summed", wire, 0)


def reduce_from_ranks(x: torch.Tensor, wire: Wire) -> torch.Tensor:
    """The sum of all ranks' tensors."""
    return _pair(x, "summed", "same", wire, 0)


def gather_from_ranks(x: torch.Tensor, wire: Wire, dim: int = -1) -> torch.Tensor:
    """All ranks' parts, joined along `dim`, where all ranks go on to compute the same."""
    return _pair(x, "joined", "own part", wire, dim)


def split_to_ranks(x: torch.Tensor, wire: Wire, dim: int = -1) -> torch.Tensor:
    """This rank's part of a tensor that all ranks have."""
    return _pair(x, "own part", "joined", wire, dim)


def reduce_scatter_to_ranks(x: torch.Tensor, wire: Wire, dim: int = 0) -> torch.Tensor:
    """This rank's part of the sum of all ranks' tensors."""
    return _pair(x, "summed part", "joined", wire, dim)


def all_gather_from_ranks(x: torch.Tensor, wire: Wire, dim: int = 0) -> torch.Tensor:
    """All ranks' parts, joined along `dim`, where each rank goes on to compute something else."""
    return _pair(x, "joined", "summed part", wire, dim)


def differentiable(function: Any, *arguments: Any) -> Any:
    """``function.apply``, which torch leaves untyped."""
    return function.apply(*arguments)


def _pair(x: torch.Tensor, which: str, conjugate: str, wire: Wire, dim: int) -> torch.Tensor:
    if torch.compiler.is_compiling():
        return compiled.move(x, which, conjugate, wire, dim)
    if not (x.requires_grad and torch.is_grad_enabled()):
        return x if which == "same" else MOVES[which](x, wire, dim, False)
    result: torch.Tensor = differentiable(_Pair, x, which, conjugate, wire, dim)
    return result


class _Pair(torch.autograd.Function):
    """One of `MOVES`, and what its gradient takes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, which: str, conjugate: str, wire: Wire, dim: int) -> torch.Tensor:
        ctx.back = conjugate, wire, dim
        return x.view_as(x) if which == "same" else MOVES[which](x, wire, dim, False)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        conjugate, wire, dim = ctx.back
        back = gradient if conjugate == "same" else MOVES[conjugate](gradient, wire, dim, True)
        return back, None, None, None, None


def summed(x: torch.Tensor, wire: Wire, *, backward: bool = False) -> torch.Tensor:
    """A new tensor: the sum over ranks."""
    if wire.algorithm == "two_shot_symmetric":
        over = wire if not backward else replace(wire, codec=wire.backward_codec)
        if x.is_floating_point() and not over.codec.lossless(x.dtype):
            return two_step(x.detach(), over).y
    total = x.detach().clone(memory_format=torch.contiguous_format)
    codec = wire.codec_for(x.numel(), x.dtype, backward=backward)
    if not backward:
        wire.traffic.count(x.numel(), codec.wire_bytes(x.numel(), x.dtype))
    all_reduce(total, codec=codec, algorithm=wire.shots(codec, x.dtype), group=wire.group)
    return total


def joined(x: torch.Tensor, wire: Wire, dim: int, *, backward: bool = False) -> torch.Tensor:
    """A new tensor: the parts of all ranks along `dim`, this rank's own decoded from what the others see."""
    part = x.detach().contiguous()
    parts = torch.empty((wire.ranks, *part.shape), dtype=part.dtype, device=part.device)
    all_gather(parts, part, codec=wire.backward_codec if backward else wire.codec, group=wire.group)
    dim = dim % x.ndim
    shape = [*x.shape[:dim], wire.ranks * x.shape[dim], *x.shape[dim + 1 :]]
    return parts.movedim(0, dim).reshape(shape)


def own_part(x: torch.Tensor, wire: Wire, dim: int) -> torch.Tensor:
    """A new tensor: this rank's part along `dim`."""
    length = wire.parts(x.shape[dim], f"dim {dim}")
    return x.detach().narrow(dim, wire.rank * length, length).contiguous()


def summed_part(x: torch.Tensor, wire: Wire, dim: int, *, backward: bool = False) -> torch.Tensor:
    """A new tensor: this rank's part along `dim` of the sum over ranks."""
    dim = dim % x.ndim
    length = wire.parts(x.shape[dim], f"dim {dim}")
    shape = (*x.shape[:dim], wire.ranks, length, *x.shape[dim + 1 :])
    parts = x.detach().reshape(shape).movedim(dim, 0).contiguous()
    part = torch.empty(parts.shape[1:], dtype=x.dtype, device=x.device)
    reduce_scatter(part, parts, codec=wire.backward_codec if backward else wire.codec, group=wire.group)
    return part


#: What happens to a tensor [of x, over, along, for a gradient]: each makes a new one.
MOVES: dict[str, Callable[[torch.Tensor, Wire, int, bool], torch.Tensor]] = {
    "same": lambda x, wire, dim, back: x.detach().clone(memory_format=torch.contiguous_format),
    "summed": lambda x, wire, dim, back: summed(x, wire, backward=back),
    "joined": lambda x, wire, dim, back: joined(x, wire, dim, backward=back),
    "own part": lambda x, wire, dim, back: own_part(x, wire, dim),
    "summed part": lambda x, wire, dim, back: summed_part(x, wire, dim, backward=back),
}
