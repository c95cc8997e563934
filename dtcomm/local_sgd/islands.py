"""Islands: groups of ranks that train one replica together, by DDP, FSDP2 or tensor parallelism.

`LocalSGD` averages over the outer group, which has one rank of each island. Ranks at equal positions of the islands
hold the same part of the model, so they exchange their local shards.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from dtcomm.compress.models import wrong_type
from dtcomm.tp.sharded_module import shard_groups


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a DTensor, sharing its memory, or the tensor itself; without autograd."""
    if isinstance(tensor, DTensor):
        with torch.no_grad():
            return tensor.to_local()
    return tensor.detach()


def unwrap(model: torch.nn.Module, group: dist.ProcessGroup | None) -> torch.nn.Module:
    """Return the module that is averaged over ``group``: the model, or what DDP wraps.

    TypeError if it is not a module, or if DDP or a DTensor of the model synchronises ranks of ``group`` already.
    """
    if not isinstance(model, torch.nn.Module):
        raise wrong_type(
            "model", "a module (for the loop of a Trainer there is dtcomm.local_sgd.attach)", model
        )
    if isinstance(model, DistributedDataParallel):
        inner = dist.get_process_group_ranks(model.process_group)
        _require_apart(type(model).__name__, inner, group)
        module: torch.nn.Module = model.module
        return module
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            _require_apart(f"the DTensor {name}", parameter.device_mesh.mesh.flatten().tolist(), group)
    return model


def _require_apart(what: str, inner: Iterable[int], group: dist.ProcessGroup | None) -> None:
    outer = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
    if len(both := sorted(set(inner) & set(outer))) > 1:
        raise TypeError(
            f"model: expected a module that nothing else synchronises over the ranks of group, got {what}, which "
            f"synchronises ranks {both}; pass a group with one rank of each island, or a module of one rank"
        )


class Island:
    """What the ranks of an island do together around an average of the model.

    ``tensor_parallel_groups`` are those over which layers of `dtcomm.tp` are cut. Their ranks have copies of the other
    parameters, and the guard makes the same decisions on them.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
        groups: dict[str, dist.ProcessGroup] = {}
        for parameter in model.parameters():
            if isinstance(parameter, DTensor):
                for group in parameter.device_mesh.get_all_groups():
                    groups[group.group_name] = group
        layers = [parameter for parameter in model.parameters() if not isinstance(parameter, DTensor)]
        tensor_parallel = {group.group_name: group for own in shard_groups(layers) for group in own}
        self.tensor_parallel_groups = tuple(tensor_parallel.values())
        self._groups = list((groups | tensor_parallel).values())

    def reshard(self) -> None:
        """Free the full parameters that FSDP2 kept after a forward pass, because the shards are about to change."""
        for module in self._sharded:
            module.reshard()

    def all(self, condition: bool, device: torch.device) -> bool:
        """Return whether a condition holds on all ranks that hold shards of the same replica."""
        if not self._groups:
            return condition
        flag = torch.tensor(int(condition), device=device)
        for group in self._groups:
            dist.all_reduce(flag, dist.ReduceOp.MIN, group=group)
        return bool(flag)
