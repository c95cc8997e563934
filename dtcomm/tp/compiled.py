"""The conjugate pairs of tensor parallelism as one torch operator, for torch.compile.

`dtcomm::tp_move` does one of `functional.MOVES`; its gradient is its conjugate's. Codecs are spec strings, a group its
name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import distributed_c10d as c10d

from dtcomm.tp.comm_config import Wire, wire


def move(x: torch.Tensor, which: str, conjugate: str, over: Wire, dim: int) -> torch.Tensor:
    """One of `functional.MOVES`, and what its gradient takes."""
    how = (over.algorithm, over.name, over.latency)
    result: torch.Tensor = torch.ops.dtcomm.tp_move(x, which, conjugate, *over.specs, *how, dim)
    return result


@torch.library.custom_op("dtcomm::tp_move", mutates_args=())
def _move(
    x: torch.Tensor,
    which: str,
    conjugate: str,
    spec: str,
    backward: str,
    algorithm: str,
    group: str,
    latency: bool,
    dim: int,
) -> torch.Tensor:
    from dtcomm.tp.functional import MOVES

    over = wire(spec, backward, algorithm=algorithm, group=_group(group), latency=latency)
    return MOVES[which](x, over, dim, False)


@_move.register_fake
def _(
    x: torch.Tensor,
    which: str,
    conjugate: str,
    spec: str,
    backward: str,
    algorithm: str,
    group: str,
    latency: bool,
    dim: int,
) -> torch.Tensor:
    shape = list(x.shape)
    ranks = _group(group).size()
    if which == "joined":
        shape[dim] *= ranks
    elif which in ("own part", "summed part"):
        shape[dim] //= ranks
    return x.new_empty(shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.how = inputs[1:]


def _conjugate(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    which, conjugate, spec, backward, *rest = ctx.how
    back = torch.ops.dtcomm.tp_move(gradient, conjugate, which, backward, spec, *rest)
    return (back, *(None for _ in ctx.how))


def _group(name: str) -> Any:
    resolve: Any = vars(c10d)["_resolve_process_group"]
    return resolve(name)


_move.register_autograd(_conjugate, setup_context=_setup)
