"""Modules whose parameters are parts of larger ones: they start, load and save as the dense module would."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from dtcomm.collectives import all_gather
from dtcomm.tp.wire import Wire


class Sharded(nn.Module):
    """`shared` makes a parameter that is this rank's part; parameters made otherwise are the same on all ranks.

    ``load_state_dict`` takes either this rank's parts or the dense module's tensors.
    """

    def __init__(self, wire: Wire) -> None:
        super().__init__()
        self.wire = wire
        self._dims: dict[str, int] = {}
        self._pending: list[tuple[nn.Parameter, int]] = []

    def shared(
        self, shape: tuple[int, ...], dim: int, device: Any, dtype: torch.dtype | None
    ) -> nn.Parameter:
        """A parameter of this shape, which is the rank's part along `dim`; assign it to an attribute."""
        parameter = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self._pending.append((parameter, dim))
        return parameter

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        super().register_parameter(name, param)
        for parameter, dim in self.__dict__.get("_pending", ()):
            if parameter is param:
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
        return full.chunk(self.wire.ranks, self._dims[name])[self.wire.rank]

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
            state[name] = torch.cat(list(parts), self._dims[name])
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

    def load_dense(self, state: Mapping[str, torch.Tensor]) -> None:
        """The parts of the dense module's tensors."""
        self.load_state_dict(dict(state))
