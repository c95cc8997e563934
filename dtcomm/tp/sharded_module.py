"""Base class of the tensor-parallel layers: a module whose parameters are shards of a dense module's parameters.

Such a module is initialized, loaded and saved as the dense module would be.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from dtcomm import torch_compat
from dtcomm.collectives import all_gather
from dtcomm.tp.comm_config import CommConfig

#: The layers of this process. Optimizers are given parameters, not modules, and must know which of them are shards.
_layers: weakref.WeakSet[ShardedModule] = weakref.WeakSet()


class ShardedModule(nn.Module):
    """A module with parameters cut over the ranks of ``comm``.

    `register_shard` makes a parameter that is this rank's shard. Parameters made otherwise are replicated: they are the
    same on all ranks. ``load_state_dict`` accepts both this rank's shards and the tensors of the dense module.

    Attributes:
        comm: Ranks, codecs and algorithm of the layer's communication.
        packed: The tensors that the dense parameters consist of, joined along the sharded dimension; each is cut by
            itself. A number of equal ones (GPT-2's joined queries, keys and values are 3), or their sizes.
    """

    def __new__(cls, *_: Any, **__: Any) -> Self:
        # Not in `__init__`, which copies do not call.
        layer = super().__new__(cls)
        _layers.add(layer)
        return layer

    def __init__(self, comm: CommConfig) -> None:
        super().__init__()
        self.comm = comm
        self._shard_dims: dict[str, int] = {}
        self._packed: dict[str, int] = {}  # of parameters that differ from `packed`
        self.packed: int | tuple[int, ...] = 1
        self._dense: tuple[nn.Module, ...] = ()

    def keep_dense(self, module: nn.Module) -> None:
        """Keep the dense module that the layer stands for, without the memory of its parameters."""
        no_memory: dict[int, Any] = {
            id(parameter): nn.Parameter(parameter.detach().to("meta")) for parameter in module.parameters()
        }
        # In a tuple, so that it is no submodule: its parameters are never used.
        self._dense = (copy.deepcopy(module, no_memory),)

    def dense_module(self) -> nn.Module:
        """Return the dense module with the parameters of all ranks, and free this layer's; a collective."""
        (dense,) = self._dense
        for name, full in self.full_state_dict().items():
            dense.register_parameter(
                name, nn.Parameter(full, requires_grad=self.get_parameter(name).requires_grad)
            )
        self._dense = ()
        dense.train(self.training)
        self.to("meta")
        return dense

    def register_shard(
        self,
        name: str,
        shape: tuple[int, ...],
        dim: int,
        device: Any,
        dtype: torch.dtype | None,
        packed: int | None = None,
    ) -> None:
        """Make the parameter ``name``: this rank's shard, of this shape, of a tensor that is cut along ``dim``.

        ``packed`` is the number of tensors that it consists of, where that is not `packed` of the module.
        """
        self.register_parameter(name, nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))
        self._shard_dims[name] = dim
        if packed is not None:
            self._packed[name] = packed

    def is_shard(self, name: str) -> bool:
        """Return whether the parameter ``name`` is cut over the ranks; others are the same on all of them."""
        return name in self._shard_dims

    def shard_group(self, name: str) -> dist.ProcessGroup | None:
        """Return the group over which the parameter ``name`` is cut; None if all ranks have it."""
        return (self.comm.group or dist.group.WORLD) if self.is_shard(name) else None

    def init_parameters(self, initialize: Callable[[str, torch.Tensor], None]) -> None:
        """Initialize every parameter as the dense module would, and keep this rank's shard.

        The dense tensor exists only during the call. With the same seed on all ranks the shards fit together.
        """
        with torch.no_grad():
            for name, parameter in self.named_parameters(recurse=False):
                if parameter.device.type == "meta":
                    continue
                full = torch.empty(self.full_shape(name), device=parameter.device, dtype=parameter.dtype)
                initialize(name, full)
                parameter.copy_(self.shard_of(name, full))

    def full_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the dense module's parameter."""
        shape = list(self.get_parameter(name).shape)
        if name in self._shard_dims:
            shape[self._shard_dims[name]] *= self.comm.world_size
        return tuple(shape)

    def shard_of(self, name: str, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of the dense module's tensor; a replicated tensor is returned whole."""
        if name not in self._shard_dims:
            return full
        dim, rank = self._shard_dims[name], self.comm.rank
        sizes = self._part_sizes(name, full.shape[dim] // self.comm.world_size)
        parts = torch.split(full, [size * self.comm.world_size for size in sizes], dim)
        own = [part.narrow(dim, rank * size, size) for part, size in zip(parts, sizes, strict=True)]
        return own[0] if len(own) == 1 else torch.cat(own, dim)

    def _part_sizes(self, name: str, length: int) -> list[int]:
        packed = self._packed.get(name, self.packed)
        if isinstance(packed, int):
            return [length // packed] * packed
        return [size // self.comm.world_size for size in packed]

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Gather the dense module's state on every rank; a collective."""
        state = {}
        for name, parameter in self.named_parameters(recurse=False):
            if name not in self._shard_dims:
                state[name] = parameter.detach().clone()
                continue
            shard = parameter.detach().contiguous()
            shards = torch.empty((self.comm.world_size, *shard.shape), dtype=shard.dtype, device=shard.device)
            all_gather(shards, shard, group=self.comm.group)
            dim = self._shard_dims[name]
            # The ranks' pieces of the first part, then those of the second one, and so on.
            pieces = [torch.split(rank, self._part_sizes(name, shard.shape[dim]), dim) for rank in shards]
            state[name] = torch.cat([piece for part in zip(*pieces, strict=True) for piece in part], dim)
        return state

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        sharded = dict(state_dict)
        for name in self._shard_dims:
            tensor = state_dict.get(prefix + name)
            parameter = self._parameters.get(name)
            if tensor is None or parameter is None or tensor.shape == parameter.shape:
                continue
            if tuple(tensor.shape) == self.full_shape(name):
                sharded[prefix + name] = self.shard_of(name, tensor)
        super()._load_from_state_dict(sharded, prefix, *args, **kwargs)

    @torch.no_grad()
    def load_dense(self, state: Mapping[str, torch.Tensor]) -> None:
        """Replace the parameters by this rank's shards of a dense module's, on their device and in their dtype."""
        for name, full in state.items():
            shard = self.shard_of(name, full).detach().clone(memory_format=torch.contiguous_format)
            self.register_parameter(name, nn.Parameter(shard, requires_grad=full.requires_grad))


def shard_groups(parameters: Iterable[torch.Tensor]) -> list[list[dist.ProcessGroup]]:
    """Return for each parameter the groups over whose ranks it is cut; none if all ranks have it.

    It knows the layers of dtcomm, the DTensors of torch's styles and of FSDP2, and the local tensors into which torch
    changes DTensors for DistributedDataParallel.
    """
    by_id = {
        id(parameter): group
        for layer in _layers
        for name, parameter in layer.named_parameters(recurse=False)
        if (group := layer.shard_group(name)) is not None
    }
    result = []
    for parameter in parameters:
        # torch.distributed.tensor.parallel.ddp keeps the placements of a DTensor in this attribute.
        spec = (
            parameter
            if isinstance(parameter, DTensor)
            else torch_compat.placements_of_tensor_parallel_ddp(parameter)
        )
        own = by_id.get(id(parameter))
        result.append([*placement_groups(spec), *([] if own is None else [own])])
    return result


def placement_groups(spec: Any) -> list[dist.ProcessGroup]:
    """Return the groups over which a DTensor, or a tensor with the placements of a DTensorSpec, is cut."""
    if spec is None:
        return []
    mesh = spec.device_mesh
    return [mesh.get_group(dim) for dim, placement in enumerate(spec.placements) if placement != Replicate()]


@torch.no_grad()
def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Gather the state of the dense model whose layers the model's layers are shards of; a collective.

    Parameters and buffers that are not sharded are taken from this rank; they are the same on all ranks that train in
    step.

    Args:
        model: A model with tensor-parallel layers, on every rank of their group.

    Returns:
        The state of the dense model, on every rank: copies that its ``load_state_dict`` accepts.

    Example::

        dense.load_state_dict(dtcomm.tp.full_state_dict(model))
    """
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    for prefix, module in model.named_modules():
        if isinstance(module, ShardedModule):
            for name, tensor in module.full_state_dict().items():
                state[f"{prefix}.{name}" if prefix else name] = tensor
    return state
