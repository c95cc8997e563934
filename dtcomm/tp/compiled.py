"""The pair of tensor parallelism as torch operators, for torch.compile: copy / all-reduce.

`dtcomm::tp_reduce` sums over ranks and lets the gradient through; `dtcomm::tp_copy` lets a tensor through and sums its
gradient. A codec is its spec string, a group its name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d


def reduce(x: torch.Tensor, spec: str, algorithm: str, group: str, latency: bool) -> torch.Tensor:
    """`functional.reduce_from_ranks`."""
    result: torch.Tensor = torch.ops.dtcomm.tp_reduce(x, spec, algorithm, group, latency)
    return result


def copy(x: torch.Tensor, spec: str, algorithm: str, group: str, latency: bool) -> torch.Tensor:
    """`functional.copy_to_ranks`; the spec is the gradient's."""
    result: torch.Tensor = torch.ops.dtcomm.tp_copy(x, spec, algorithm, group, latency)
    return result


def _summed(x: torch.Tensor, spec: str, algorithm: str, group: str, latency: bool) -> torch.Tensor:
    from dtcomm.tp.functional import summed
    from dtcomm.tp.wire import wire

    resolve: Any = vars(c10d)["_resolve_process_group"]
    return summed(x, wire(spec, algorithm=algorithm, group=resolve(group), latency=latency))


@torch.library.custom_op("dtcomm::tp_reduce", mutates_args=())
def _reduce(x: torch.Tensor, spec: str, algorithm: str, group: str, latency: bool) -> torch.Tensor:
    return _summed(x, spec, algorithm, group, latency)


@torch.library.custom_op("dtcomm::tp_copy", mutates_args=())
def _copy(x: torch.Tensor, spec: str, algorithm: str, group: str, latency: bool) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format)


@_reduce.register_fake
@_copy.register_fake
def _(x: torch.Tensor, spec: str, algorithm: str, group: str, latency: bool) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.how = inputs[1:]


def _let_through(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
    return gradient, None, None, None, None


def _sum(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
    return reduce(gradient, *ctx.how), None, None, None, None


_reduce.register_autograd(_let_through, setup_context=_setup)
_copy.register_autograd(_sum, setup_context=_setup)
