"""Error feedback: what a lossy encoding dropped is kept, per parameter, and added to the next gradient.

Residuals are fp32, flat, in the memory order of the gradient, and live under the parameter's NAME: a name
survives what an index does not, DDP's bucket rebuild, a checkpoint and a change of world size. They are
made at first use.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch


class Residuals:
    """The residuals of one rank: ``name -> fp32 tensor [numel]``."""

    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor] = {}

    def get(self, name: str, like: torch.Tensor) -> torch.Tensor:
        """The residual of ``name``, zeros at first sight, on the device of ``like`` [numel].

        ValueError where a loaded residual has another number of elements than the gradient.
        """
        residual = self._tensors.get(name)
        if residual is None:
            residual = torch.zeros(like.numel(), dtype=torch.float32, device=like.device)
        elif residual.numel() != like.numel():
            raise ValueError(
                f"the residual of {name!r} has {residual.numel()} elements, its gradient {like.numel()}: "
                "was the state saved from another model?"
            )
        elif residual.device != like.device:
            residual = residual.to(like.device)
        self._tensors[name] = residual
        return residual

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def __len__(self) -> int:
        return len(self._tensors)

    def names(self) -> Iterable[str]:
        return self._tensors.keys()

    def scale(self, factor: float) -> None:
        """Multiply every residual, as the loss scale of mixed-precision training was."""
        for residual in self._tensors.values():
            residual.mul_(factor)

    def reset(self, name: str) -> None:
        """What was kept for ``name`` is given up."""
        self._tensors.pop(name, None)

    def nbytes(self) -> int:
        return sum(residual.numel() * 4 for residual in self._tensors.values())

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Copies, on the CPU."""
        return {name: residual.detach().to("cpu", copy=True) for name, residual in self._tensors.items()}

    def load_state_dict(self, tensors: Mapping[str, torch.Tensor]) -> None:
        loaded = {}
        for name, residual in tensors.items():
            if not isinstance(residual, torch.Tensor) or residual.dtype != torch.float32:
                raise ValueError(f"residual of {name!r}: want an fp32 tensor, got {residual!r}")
            loaded[name] = residual.detach().flatten().clone()
        self._tensors = loaded


def redistribute(
    states: Sequence[Mapping[str, torch.Tensor]], rank: int, world_size: int
) -> dict[str, torch.Tensor]:
    """The residuals of ``rank`` of ``world_size`` ranks, from those of every rank of another world, in rank
    order.

    New rank r takes the sum of old ranks r, r + n, r + 2n, ...: nothing is lost when ranks leave (the sum
    over ranks is kept, to fp32 rounding), and where ranks join, the new ones start with nothing.
    """
    if not 0 <= rank < world_size:
        raise ValueError(f"rank {rank} of world_size {world_size}")
    sums: dict[str, torch.Tensor] = {}
    for state in states[rank::world_size]:
        for name, residual in state.items():
            if name not in sums:
                sums[name] = residual.clone()
            elif sums[name].shape != residual.shape:
                raise ValueError(
                    f"residual of {name!r}: {tuple(residual.shape)} on one rank, "
                    f"{tuple(sums[name].shape)} on another"
                )
            else:
                sums[name] += residual
    return sums
