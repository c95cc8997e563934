"""FSDP1 (`FullyShardedDataParallel`), which has a hook for gradients and no other.

Its strategies come down to two: the hook gets the whole gradient of a unit's flat parameter (NO_SHARD), or a padded one
and where this rank's part of the mean goes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._common_utils import clean_tensor_name

from dtcomm.collectives import all_reduce, reduce_scatter
from dtcomm.fsdp.flat_layout import Piece
from dtcomm.fsdp.optimizer_bucket import Row
from dtcomm.fsdp.reduction import Reduction
from dtcomm.fsdp.state import State


@dataclass(frozen=True)
class Unit:
    """One wrapped module, as its hook knows it."""

    state: State
    name: str
    group: dist.ProcessGroup | None


def attach(state: State, model: FullyShardedDataParallel) -> None:
    """Put the hook on every unit of ``model``, its root; torch refuses hybrid strategies, and a second hook."""
    model.register_comm_hook(state, reduce)
    state.group = group = model.process_group
    state.shards, state.shard = dist.get_world_size(group), dist.get_rank(group)
    for path, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel):
            name = clean_tensor_name(path)
            # torch keeps one state for all units, and tells the hook nothing else of whose gradient it is.
            module._comm_hook_state = Unit(state, name, module.process_group)
            state.know(name, _row(name, module))
    state.note(
        "FSDP1: the all-gather of parameters is torch's, uncompressed: it has no hook for it; fully_shard does"
    )


def reduce(unit: Unit, gradient: torch.Tensor, shard: torch.Tensor | None = None) -> None:
    """The hook: the mean in place, or this rank's part of it into ``shard``."""
    reduction = Reduction(unit.state, unit.name, gradient)
    if shard is None:
        work = all_reduce(gradient, "avg", group=unit.group, **reduction.options)
    else:
        work = reduce_scatter(shard, gradient, "avg", group=unit.group, **reduction.options)
    assert work is not None  # it is with async_op
    work.wait()
    reduction.done()
    ranks = dist.get_world_size(unit.group)
    times = 2 if shard is None else 1
    reduction.traffic.add(work, times * gradient.nbytes * (ranks - 1) // ranks)


def _row(name: str, module: FullyShardedDataParallel) -> Row | None:
    """What lies where in a unit's gradient; None where torch pads between parameters, or there are none."""
    handle = module._handle
    if handle is None or any(handle.flat_param._is_padding_mask):
        return None
    names = [f"{name}.{each}" if name else each for each in handle.flat_param._fqns]
    return Row(tuple(map(Piece, names, handle.flat_param._shapes)))
