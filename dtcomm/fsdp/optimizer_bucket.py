"""Parameters that a sharded optimiser moves together: flat, cut into one shard a rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from dtcomm.fsdp.flat_layout import Piece


@dataclass(frozen=True)
class Row:
    """Parameters one after the other, padded at the end: the same interface as `Flat`."""

    pieces: tuple[Piece, ...]

    @property
    def used(self) -> int:
        """Elements without padding."""
        return sum(piece.shape.numel() for piece in self.pieces)

    def numel(self, ranks: int) -> int:
        """Elements of the flat tensor."""
        return -(-self.used // ranks) * ranks

    def split(self, flat: torch.Tensor, ranks: int) -> dict[str, torch.Tensor]:
        """``flat`` [numel(ranks)] by name, each parameter flat."""
        parts = flat[: self.used].split_with_sizes([piece.shape.numel() for piece in self.pieces])
        return {piece.name: part.clone() for piece, part in zip(self.pieces, parts, strict=True)}

    def join(self, parameters: Mapping[str, torch.Tensor], ranks: int) -> torch.Tensor:
        """The inverse of `split`; ValueError naming a parameter of another size."""
        flat = torch.zeros(self.numel(ranks))
        begin = 0
        for piece in self.pieces:
            given = parameters[piece.name].flatten()
            if given.numel() != piece.shape.numel():
                raise ValueError(
                    f"the residual of {piece.name!r} has {given.numel()} elements, the parameter "
                    f"{piece.shape.numel()}: was the state saved from another model?"
                )
            flat[begin : begin + given.numel()] = given
            begin += given.numel()
        return flat


class Bucket:
    """Flat parameters that the model computes with, this rank's exact shard, and gradients as they come in."""

    def __init__(
        self, name: str, parameters: Sequence[tuple[str, torch.nn.Parameter]], ranks: int, rank: int
    ) -> None:
        self.name = name
        self.parameters = [parameter for _, parameter in parameters]
        self.row = Row(tuple(Piece(each, parameter.shape) for each, parameter in parameters))
        self.ranks, self.rank = ranks, rank
        first = self.parameters[0]
        self.dtype = first.dtype
        with torch.no_grad():
            self.flat = first.new_zeros(self.row.numel(ranks))
            self._views = self._cut(self.flat)
            for view, parameter in zip(self._views, self.parameters, strict=True):
                view.copy_(parameter)
                parameter.data = view
        # The optimiser steps on fp32 values that no codec has touched, whatever the model computes with.
        self.exact = torch.nn.Parameter(self.shard_of(self.flat).float().clone())
        self._versions = self._now()
        self.gradient: torch.Tensor | None = None
        self.missing = len(self.parameters)

    def _cut(self, flat: torch.Tensor) -> list[torch.Tensor]:
        sizes = [parameter.numel() for parameter in self.parameters]
        parts = flat[: sum(sizes)].split_with_sizes(sizes)
        return [part.view(p.shape) for part, p in zip(parts, self.parameters, strict=True)]

    def shard_of(self, flat: torch.Tensor) -> torch.Tensor:
        """This rank's part of a flat tensor."""
        return flat.view(self.ranks, -1)[self.rank]

    def _now(self) -> list[int]:
        # Writing to the flat tensor does not count as writing to a parameter.
        return [parameter._version for parameter in self.parameters]

    def notice(self) -> None:
        """Take the parameters as exact where somebody else, a checkpoint say, wrote them."""
        if (now := self._now()) != self._versions:
            self._versions = now
            with torch.no_grad():
                self.exact.copy_(self.shard_of(self.flat))

    def accumulate(self, place: int, keep: bool) -> None:
        """Take over a parameter's gradient; ``keep`` leaves a view of it as the parameter's ``grad``."""
        parameter = self.parameters[place]
        given = parameter.grad
        assert given is not None  # autograd has just accumulated it
        if self.gradient is None:
            self.gradient = torch.zeros_like(self.flat)
        view = self._cut(self.gradient)[place]
        if given.data_ptr() != view.data_ptr():
            view.add_(given)
        parameter.grad = view if keep else None

    def own(self, gradient: torch.Tensor) -> None:
        """Add the reduced shard of a gradient to what the optimiser will see."""
        shard = gradient.float()
        self.exact.grad = shard if self.exact.grad is None else self.exact.grad.add_(shard)
