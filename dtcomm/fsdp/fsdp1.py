"""Compressed gradients for FSDP1 (`FullyShardedDataParallel`), whose communication hook is for gradients only.

The hook receives either the whole gradient of a unit's flat parameter (NO_SHARD), or a padded gradient and the tensor
for this rank's shard of the mean (all other strategies).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._common_utils import clean_tensor_name

from dtcomm.collectives import all_reduce, reduce_scatter
from dtcomm.fsdp.collectives import GradientReduction
from dtcomm.fsdp.flat_layout import ConcatenatedLayout, concatenated_layout
from dtcomm.fsdp.state import State


@dataclass(frozen=True)
class Unit:
    """The hook's state for one wrapped module."""

    state: State
    name: str
    group: dist.ProcessGroup | None


def attach(state: State, model: FullyShardedDataParallel) -> None:
    """Register the hook on every unit of the root module ``model``.

    torch raises an error for hybrid strategies and for a second hook.
    """
    model.register_comm_hook(state, reduce_gradient)
    state.group = group = model.process_group
    state.num_shards, state.shard_index = dist.get_world_size(group), dist.get_rank(group)
    for path, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel):
            name = clean_tensor_name(path)
            # torch passes the hook one state for all units; replacing it tells the hook which unit calls.
            module._comm_hook_state = Unit(state, name, module.process_group)
            state.register_layout(name, _unit_layout(name, module))
    state.add_note(
        "FSDP1: torch gathers the parameters, uncompressed, because FSDP1 has no hook for that; fully_shard has one"
    )


def reduce_gradient(unit: Unit, gradient: torch.Tensor, shard: torch.Tensor | None = None) -> None:
    """Average a gradient over the ranks, in place or, if ``shard`` is passed, into this rank's shard."""
    reduction = GradientReduction(unit.state, unit.name, gradient)
    if shard is None:
        work = all_reduce(gradient, "avg", group=unit.group, **reduction.options)
    else:
        work = reduce_scatter(shard, gradient, "avg", group=unit.group, **reduction.options)
    assert work is not None  # async_op is True
    work.wait()
    reduction.finish()
    ranks = dist.get_world_size(unit.group)
    passes = 2 if shard is None else 1
    reduction.traffic.add(work, passes * gradient.nbytes * (ranks - 1) // ranks)


def _unit_layout(name: str, module: FullyShardedDataParallel) -> ConcatenatedLayout | None:
    """Return the layout of a unit's gradient; None if it has no parameters, or torch pads between them."""
    handle = module._handle
    if handle is None or any(handle.flat_param._is_padding_mask):
        return None
    names = [f"{name}.{path}" if name else path for path in handle.flat_param._fqns]
    return concatenated_layout(list(zip(names, handle.flat_param._shapes, strict=True)))
