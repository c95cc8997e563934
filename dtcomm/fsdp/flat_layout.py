"""What lies where in the flat tensors that FSDP2 hands to its collectives.

A module's gradients are cut along dimension 0 into as many parts as there are ranks, padded to equal ones; the flat
tensor holds rank 0's part of each parameter, then rank 1's, and so on. Its length and order depend on the number of
ranks, those of a parameter do not: so what is kept between steps is saved by parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.distributed.fsdp import FSDPModule


@dataclass(frozen=True)
class Piece:
    """One parameter: its name within the model, its whole shape (that of its tensor-parallel part, if it has one)."""

    name: str
    shape: torch.Size

    def rows(self, ranks: int) -> int:
        """Of dimension 0 in each rank's part."""
        return -(-self.shape[0] // ranks)

    def numel(self, ranks: int) -> int:
        """Elements of each rank's part."""
        return self.rows(ranks) * self.shape[1:].numel()


class Layout(Protocol):
    """Where parameters lie in a flat tensor."""

    @property
    def pieces(self) -> tuple[Piece, ...]: ...

    def numel(self, ranks: int) -> int: ...

    def split(self, flat: torch.Tensor, ranks: int) -> dict[str, torch.Tensor]: ...

    def join(self, parameters: Mapping[str, torch.Tensor], ranks: int) -> torch.Tensor: ...


@dataclass(frozen=True)
class Flat:
    """The parameters of a module that have gradients, in FSDP's order."""

    pieces: tuple[Piece, ...]

    def numel(self, ranks: int) -> int:
        """Elements of the flat tensor."""
        return ranks * sum(piece.numel(ranks) for piece in self.pieces)

    def split(self, flat: torch.Tensor, ranks: int) -> dict[str, torch.Tensor]:
        """``flat`` [numel(ranks)] by name, each parameter [numel] in its own order, without padding."""
        parts = flat.view(ranks, -1)
        found, begin = {}, 0
        for piece in self.pieces:
            end = begin + piece.numel(ranks)
            found[piece.name] = parts[:, begin:end].reshape(-1)[: piece.shape.numel()].clone()
            begin = end
        return found

    def join(self, parameters: Mapping[str, torch.Tensor], ranks: int) -> torch.Tensor:
        """The inverse of `split`: padding is zero. ValueError naming a parameter of another size."""
        flat = torch.zeros(ranks, self.numel(ranks) // ranks)
        begin = 0
        for piece in self.pieces:
            end = begin + piece.numel(ranks)
            given = parameters[piece.name]
            if given.numel() != piece.shape.numel():
                raise ValueError(
                    f"the residual of {piece.name!r} has {given.numel()} elements, its gradient "
                    f"{piece.shape.numel()}: was the state saved from another model?"
                )
            padded = torch.zeros(ranks * piece.numel(ranks))
            padded[: given.numel()] = given.flatten()
            flat[:, begin:end] = padded.view(ranks, -1)
            begin = end
        return flat.flatten()


def flat_of(name: str, module: FSDPModule) -> Flat | None:
    """The layout of a module's gradients; None where it cannot be told (cut along another dimension)."""
    group = module._get_fsdp_state()._fsdp_param_group
    if group is None:
        return None
    pieces = []
    names = _names(name, module)  # type: ignore[arg-type]
    for parameter in group.fsdp_params:
        if parameter.fsdp_placement.dim != 0:
            return None
        if parameter.sharded_param.requires_grad:
            own = names.get(id(parameter.sharded_param))
            if own is None:
                return None
            pieces.append(Piece(own, parameter._orig_size))
    return Flat(tuple(pieces))


def _names(prefix: str, module: torch.nn.Module) -> dict[int, str]:
    return {
        id(parameter): f"{prefix}.{name}" if prefix else name for name, parameter in module.named_parameters()
    }
