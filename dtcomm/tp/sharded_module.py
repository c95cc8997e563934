"""Modules whose parameters are parts of larger ones: they start, load and save as the dense module would."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from dtcomm.collectives import all_gather
from dtcomm.tp.comm_config import Wire


class Sharded(nn.Module):
    """`shared` makes a parameter that is this rank's part; parameters made otherwise are the same on all ranks.

    ``load_state_dict`` takes either this rank's parts or the dense module's tensors.
    """

    def __init__(self, wire: Wire) -> None:
        super().__init__()
        self.wire = wire
        self._dims: dict[str, int] = {}
        self.packed = 1

    def share(
        self, name: str, shape: tuple[int, ...], dim: int, device: Any, dtype: torch.dtype | None
    ) -> None:
        """Make the parameter `name`, of this shape, which is the rank's part along `dim`.

        Where `packed` is more than 1, the dense tensor is so many tensors joined along `dim` (queries, keys and
        values, say), each of which is shared out by itself.
        """
        self.register_parameter(name, nn.Parameter(torch.empty(shape, device=device, dtype=dtype)))
        self._dims[name] = dim

    def fill(self, initialise: Callable[[str, torch.Tensor], None]) -> None:
        """Initialise each parameter as the dense module would, and keep this rank's part.

        The dense tensor exists for a moment; with the same seed on all ranks the parts fit together.
        """
        with torch.no_grad():
            for name, parameter in self.named_parameters(recurse=False):
                if parameter.device.type == "meta":
                    continue
                full = torch.empty(self.full_shape(name), device=parameter.device, dtype=parameter.dtype)
                initialise(name, full)
                parameter.copy_(self.part(name, full))

    def full_shape(self, name: str) -> tuple[int, ...]:
        """Of the dense module's parameter."""
        shape = list(self.get_parameter(name).shape)
        if name in self._dims:
            shape[self._dims[name]] *= self.wire.ranks
        return tuple(shape)

    def part(self, name: str, full: torch.Tensor) -> torch.Tensor:
        """This rank's part of the dense module's tensor."""
        if name not in self._dims:
            return full
        dim, ranks = self._dims[name], self.wire.ranks
        shape = full.shape
        split = full.reshape(
            *shape[:dim], self.packed, ranks, shape[dim] // ranks // self.packed, *shape[dim + 1 :]
        )
        own = split.select(dim + 1, self.wire.rank)
        return own.reshape(*shape[:dim], shape[dim] // ranks, *shape[dim + 1 :])

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """The dense module's state, on every rank; a collective."""
        state = {}
        for name, parameter in self.named_parameters(recurse=False):
            if name not in self._dims:
                state[name] = parameter.detach().clone()
                continue
            part = parameter.detach().contiguous()
            parts = torch.empty((self.wire.ranks, *part.shape), dtype=part.dtype, device=part.device)
            all_gather(parts, part, group=self.wire.group)
            dim = self._dims[name]
            shape = part.shape
            split = parts.reshape(
                self.wire.ranks, *shape[:dim], self.packed, shape[dim] // self.packed, *shape[dim + 1 :]
            )
            state[name] = split.movedim(0, dim + 1).reshape(self.full_shape(name))
        return state

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any, **kwargs: Any) -> None:
        mine = dict(state_dict)
        for name in self._dims:
            tensor = state_dict.get(prefix + name)
            parameter = self._parameters.get(name)
            if tensor is None or parameter is None or tensor.shape == parameter.shape:
                continue
            if tuple(tensor.shape) == self.full_shape(name):
                mine[prefix + name] = self.part(name, tensor)
        super()._load_from_state_dict(mine, prefix, *args, **kwargs)

    @torch.no_grad()
    def take(self, state: Mapping[str, torch.Tensor]) -> None:
        """Become this rank's part of a dense module: parameters on the device and of the type of its tensors."""
        for name, full in state.items():
            part = self.part(name, full).detach().clone(memory_format=torch.contiguous_format)
            self.register_parameter(name, nn.Parameter(part, requires_grad=full.requires_grad))


@torch.no_grad()
def full_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """The state of the dense model that ``model``'s layers are parts of, on every rank; a collective.

    What is not shared out is this rank's own: the same on all ranks, as long as they train in step.
    """
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    for prefix, module in model.named_modules():
        if isinstance(module, Sharded):
            for name, tensor in module.full_state_dict().items():
                state[f"{prefix}.{name}" if prefix else name] = tensor
    return state
