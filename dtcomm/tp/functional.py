"""The conjugate pairs of tensor parallelism, compressed: each function's backward pass is its partner's forward pass.

They are Megatron-LM's (Shoeybi et al. 2019, arXiv:1909.08053) and, for sequence parallelism, those of Korthikanti et
al. 2022 (arXiv:2205.05198).

| function | forward | backward |
|---|---|---|
| `copy_to_ranks` | identity | all_reduce |
| `reduce_from_ranks` | all_reduce | identity |
| `gather_from_ranks` | all_gather | split |
| `split_to_ranks` | split | all_gather |
| `reduce_scatter_to_ranks` | reduce_scatter | all_gather |
| `all_gather_from_ranks` | all_gather | reduce_scatter |

Compression is straight-through: the backward pass is that of the uncompressed function, with the gradients sent in
``comm.backward_codec``. Tensors are fp32, fp16 or bf16 (with codec ``none`` any dtype that can have a gradient) of any
shape; the ranks must divide the size of ``dim``. In code compiled by torch.compile each function is one operator,
``torch.ops.dtcomm.tp_collective``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from dtcomm import collectives
from dtcomm.torch_compat import autograd_apply, group_by_name
from dtcomm.tp.comm_config import CommConfig, LayerTraffic
from dtcomm.tp.flash_all_reduce import flash_all_reduce


def copy_to_ranks(x: torch.Tensor, comm: CommConfig) -> torch.Tensor:
    """Return ``x``, which is the same on all ranks; its gradient is the sum of the ranks' gradients."""
    return _conjugate_pair(x, "identity", "all_reduce", comm, 0)


def reduce_from_ranks(x: torch.Tensor, comm: CommConfig) -> torch.Tensor:
    """Return the sum of all ranks' tensors."""
    return _conjugate_pair(x, "all_reduce", "identity", comm, 0)


def gather_from_ranks(x: torch.Tensor, comm: CommConfig, dim: int = -1) -> torch.Tensor:
    """Return all ranks' shards, concatenated along ``dim``, for a computation that is the same on all ranks."""
    return _conjugate_pair(x, "all_gather", "split", comm, dim)


def split_to_ranks(x: torch.Tensor, comm: CommConfig, dim: int = -1) -> torch.Tensor:
    """Return this rank's shard, along ``dim``, of a tensor that is the same on all ranks."""
    return _conjugate_pair(x, "split", "all_gather", comm, dim)


def reduce_scatter_to_ranks(x: torch.Tensor, comm: CommConfig, dim: int = 0) -> torch.Tensor:
    """Return this rank's shard, along ``dim``, of the sum of all ranks' tensors."""
    return _conjugate_pair(x, "reduce_scatter", "all_gather", comm, dim)


def all_gather_from_ranks(x: torch.Tensor, comm: CommConfig, dim: int = 0) -> torch.Tensor:
    """Return all ranks' shards, concatenated along ``dim``, for a computation that differs between ranks."""
    return _conjugate_pair(x, "all_gather", "reduce_scatter", comm, dim)


def _conjugate_pair(x: torch.Tensor, forward: str, backward: str, comm: CommConfig, dim: int) -> torch.Tensor:
    """Apply the primitive ``forward``; the gradient goes through the primitive ``backward``."""
    result: torch.Tensor
    if torch.compiler.is_compiling():
        options = (comm.algorithm, comm.group_name, comm.latency)
        result = torch.ops.dtcomm.tp_collective(x, forward, backward, *comm.codec_specs, *options, dim)
        return result
    if not (x.requires_grad and torch.is_grad_enabled()):
        return x if forward == "identity" else PRIMITIVES[forward](x, comm, dim, False)
    result = autograd_apply(_ConjugatePair, x, forward, backward, comm, dim)
    return result


class _ConjugatePair(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, forward: str, backward: str, comm: CommConfig, dim: int
    ) -> torch.Tensor:
        ctx.backward_arguments = backward, comm, dim
        return x.view_as(x) if forward == "identity" else PRIMITIVES[forward](x, comm, dim, False)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        backward, comm, dim = ctx.backward_arguments
        dx = gradient if backward == "identity" else PRIMITIVES[backward](gradient, comm, dim, True)
        return dx, None, None, None, None


# --- primitives, without gradients; each returns a new tensor ---------------------------------------------------------


def all_reduce(x: torch.Tensor, comm: CommConfig, *, backward: bool = False) -> torch.Tensor:
    """Return the sum over the ranks; ``backward`` chooses ``comm.backward_codec``."""
    asked = comm.asked_codec(backward)
    codec = comm.codec_for(x.numel(), x.dtype, backward=backward)
    if comm.algorithm == "two_shot_symmetric" and not codec.lossless(x.dtype):
        comm.traffic.count("all_reduce", x, x.numel(), codec, asked, comm.algorithm, backward)
        return flash_all_reduce(x.detach(), replace(comm, codec=codec)).y
    total = x.detach().clone(memory_format=torch.contiguous_format)
    algorithm = comm.algorithm_for(codec, x.dtype)
    comm.traffic.count("all_reduce", x, x.numel(), codec, asked, algorithm, backward)
    collectives.all_reduce(total, codec=codec, algorithm=algorithm, group=comm.group)
    return total


def all_gather(x: torch.Tensor, comm: CommConfig, dim: int, *, backward: bool = False) -> torch.Tensor:
    """Return all ranks' shards, concatenated along ``dim``; every rank decodes its own shard too."""
    shard = x.detach().contiguous()
    shards = torch.empty((comm.world_size, *shard.shape), dtype=shard.dtype, device=shard.device)
    codec = comm.supported_codec(x.dtype, backward=backward)
    asked = comm.asked_codec(backward)
    comm.traffic.count("all_gather", x, shards.numel(), codec, asked, "auto", backward)
    collectives.all_gather(shards, shard, codec=codec, group=comm.group)
    dim = dim % x.ndim
    shape = [*x.shape[:dim], comm.world_size * x.shape[dim], *x.shape[dim + 1 :]]
    return shards.movedim(0, dim).reshape(shape)


def split(x: torch.Tensor, comm: CommConfig, dim: int) -> torch.Tensor:
    """Return this rank's shard of ``x`` along ``dim``."""
    length = comm.shard_size(x.shape[dim], f"dim {dim}")
    return x.detach().narrow(dim, comm.rank * length, length).contiguous()


def reduce_scatter(x: torch.Tensor, comm: CommConfig, dim: int, *, backward: bool = False) -> torch.Tensor:
    """Return this rank's shard, along ``dim``, of the sum over the ranks."""
    dim = dim % x.ndim
    length = comm.shard_size(x.shape[dim], f"dim {dim}")
    shape = (*x.shape[:dim], comm.world_size, length, *x.shape[dim + 1 :])
    shards = x.detach().reshape(shape).movedim(dim, 0).contiguous()
    shard = torch.empty(shards.shape[1:], dtype=x.dtype, device=x.device)
    codec = comm.supported_codec(x.dtype, backward=backward)
    asked = comm.asked_codec(backward)
    comm.traffic.count("reduce_scatter", x, shards.numel(), codec, asked, "auto", backward)
    collectives.reduce_scatter(shard, shards, codec=codec, group=comm.group)
    return shard


#: Name → function (x, comm, dim, backward) → new tensor.
PRIMITIVES: dict[str, Callable[[torch.Tensor, CommConfig, int, bool], torch.Tensor]] = {
    "identity": lambda x, comm, dim, backward: x.detach().clone(memory_format=torch.contiguous_format),
    "all_reduce": lambda x, comm, dim, backward: all_reduce(x, comm, backward=backward),
    "all_gather": lambda x, comm, dim, backward: all_gather(x, comm, dim, backward=backward),
    "split": lambda x, comm, dim, backward: split(x, comm, dim),
    "reduce_scatter": lambda x, comm, dim, backward: reduce_scatter(x, comm, dim, backward=backward),
}


# --- the operator for compiled code: codecs are spec strings, the group is its name -----------------------------------

_compiled_traffic: dict[str, LayerTraffic] = {}


def compiled_traffic(group_name: str) -> LayerTraffic:
    """Return the counters of all compiled code of this process that communicates over the group of this name.

    Its operator knows neither the layer that it belongs to nor whether it runs in a forward or a backward pass.
    """
    return _compiled_traffic.setdefault(group_name, LayerTraffic())


@torch.library.custom_op("dtcomm::tp_collective", mutates_args=())
def _tp_collective(
    x: torch.Tensor,
    forward: str,
    backward: str,
    codec: str,
    backward_codec: str,
    algorithm: str,
    group: str,
    latency: bool,
    dim: int,
) -> torch.Tensor:
    comm = CommConfig.of(
        codec,
        backward_codec,
        algorithm=algorithm,
        group=group_by_name(group),
        latency=latency,
        traffic=compiled_traffic(group),
    )
    return PRIMITIVES[forward](x, comm, dim, False)


@_tp_collective.register_fake
def _(x: torch.Tensor, forward: str, *options: Any) -> torch.Tensor:
    *_, group, _, dim = options
    shape = list(x.shape)
    world_size = group_by_name(group).size()
    if forward == "all_gather":
        shape[dim] *= world_size
    elif forward in ("split", "reduce_scatter"):
        shape[dim] //= world_size
    return x.new_empty(shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.options = inputs[1:]


def _tp_collective_backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    forward, backward, codec, backward_codec, *rest = ctx.options
    dx = torch.ops.dtcomm.tp_collective(gradient, backward, forward, backward_codec, codec, *rest)
    return (dx, *(None for _ in ctx.options))


_tp_collective.register_autograd(_tp_collective_backward, setup_context=_setup_context)
