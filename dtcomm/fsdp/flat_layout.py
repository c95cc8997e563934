"""Layouts of the flat tensors that hold the gradients or parameters of a module, an FSDP1 unit or a bucket.

Residuals are stored flat during training and saved by parameter name: the length and order of a flat tensor depend on
the number of ranks, a parameter's own shape does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.distributed.fsdp import FSDPModule

from dtcomm import torch_compat


@dataclass(frozen=True)
class ParameterShape:
    """A parameter's name in the model and its full shape (that of its tensor-parallel shard if it has one)."""

    name: str
    shape: torch.Size

    def rows(self, ranks: int) -> int:
        """Return the size of dimension 0 in each rank's shard."""
        return -(-self.shape[0] // ranks)

    def shard_numel(self, ranks: int) -> int:
        """Return the number of elements in each rank's shard, padding included."""
        return self.rows(ranks) * self.shape[1:].numel()


class FlatLayout(Protocol):
    """Where parameters lie in a flat tensor."""

    @property
    def parameters(self) -> tuple[ParameterShape, ...]:
        """The parameters, in the order of the flat tensor."""

    def numel(self, ranks: int) -> int:
        """Return the number of elements of the flat tensor."""

    def split(self, flat: torch.Tensor, ranks: int) -> dict[str, torch.Tensor]:
        """Return copies of the parameters by name, each one-dimensional and without padding."""

    def join(self, parameters: Mapping[str, torch.Tensor], ranks: int) -> torch.Tensor:
        """Return the flat fp32 tensor, padded with zeros; ValueError if a parameter has another size."""


@dataclass(frozen=True)
class ShardedLayout:
    """FSDP2's layout: rank 0's shards of all parameters, then rank 1's, and so on.

    Every parameter is cut along dimension 0 into as many shards as there are ranks, padded to equal size.
    """

    parameters: tuple[ParameterShape, ...]

    def numel(self, ranks: int) -> int:
        """Return the number of elements of the flat tensor."""
        return ranks * sum(parameter.shard_numel(ranks) for parameter in self.parameters)

    def split(self, flat: torch.Tensor, ranks: int) -> dict[str, torch.Tensor]:
        """Return copies of the parameters by name, each one-dimensional and without padding."""
        by_rank = flat.view(ranks, -1)
        tensors, begin = {}, 0
        for parameter in self.parameters:
            end = begin + parameter.shard_numel(ranks)
            padded = by_rank[:, begin:end].reshape(-1)
            tensors[parameter.name] = padded[: parameter.shape.numel()].clone()
            begin = end
        return tensors

    def join(self, parameters: Mapping[str, torch.Tensor], ranks: int) -> torch.Tensor:
        """Return the flat fp32 tensor, padded with zeros; ValueError if a parameter has another size."""
        flat = torch.zeros(ranks, self.numel(ranks) // ranks)
        begin = 0
        for parameter in self.parameters:
            end = begin + parameter.shard_numel(ranks)
            tensor = _require_size(parameters[parameter.name], parameter, "gradient")
            padded = torch.zeros(ranks * parameter.shard_numel(ranks))
            padded[: tensor.numel()] = tensor
            flat[:, begin:end] = padded.view(ranks, -1)
            begin = end
        return flat.flatten()


@dataclass(frozen=True)
class ConcatenatedLayout:
    """Whole parameters one after the other, padded at the end: FSDP1's layout, and that of optimizer buckets."""

    parameters: tuple[ParameterShape, ...]

    @property
    def unpadded_numel(self) -> int:
        """Number of elements without padding."""
        return sum(parameter.shape.numel() for parameter in self.parameters)

    def numel(self, ranks: int) -> int:
        """Return the number of elements of the flat tensor."""
        return -(-self.unpadded_numel // ranks) * ranks

    def split(self, flat: torch.Tensor, ranks: int) -> dict[str, torch.Tensor]:
        """Return copies of the parameters by name, each one-dimensional and without padding."""
        sizes = [parameter.shape.numel() for parameter in self.parameters]
        tensors = flat[: self.unpadded_numel].split_with_sizes(sizes)
        return {
            parameter.name: tensor.clone() for parameter, tensor in zip(self.parameters, tensors, strict=True)
        }

    def join(self, parameters: Mapping[str, torch.Tensor], ranks: int) -> torch.Tensor:
        """Return the flat fp32 tensor, padded with zeros; ValueError if a parameter has another size."""
        flat = torch.zeros(self.numel(ranks))
        begin = 0
        for parameter in self.parameters:
            tensor = _require_size(parameters[parameter.name], parameter, "parameter")
            flat[begin : begin + tensor.numel()] = tensor
            begin += tensor.numel()
        return flat


def _require_size(tensor: torch.Tensor, parameter: ParameterShape, kind: str) -> torch.Tensor:
    if tensor.numel() != parameter.shape.numel():
        raise ValueError(
            f"the residual of {parameter.name!r} has {tensor.numel()} elements, its {kind} has "
            f"{parameter.shape.numel()}: was the state saved from another model?"
        )
    return tensor.flatten()


def layout_of(
    name: str, module: FSDPModule, fsdp_parameters: Sequence[Any] | None = None
) -> ShardedLayout | None:
    """Return the layout of a module's gradients, or None if it is unknown (cut along another dimension than 0).

    ``fsdp_parameters`` are the parameters of the module that it has; None (default): all.
    """
    group = torch_compat.fsdp2_parameter_group(module)
    if group is None:
        return None
    parameters = []
    names = parameter_names(name, module)  # type: ignore[arg-type]
    for fsdp_parameter in group.fsdp_params if fsdp_parameters is None else fsdp_parameters:
        if fsdp_parameter.fsdp_placement.dim != 0:
            return None
        if fsdp_parameter.sharded_param.requires_grad:
            full_name = names.get(id(fsdp_parameter.sharded_param))
            if full_name is None:
                return None
            parameters.append(ParameterShape(full_name, torch_compat.unsharded_size(fsdp_parameter)))
    return ShardedLayout(tuple(parameters))


def concatenated_layout(named_shapes: Sequence[tuple[str, torch.Size]]) -> ConcatenatedLayout:
    """Return the layout of whole parameters with these names and shapes."""
    return ConcatenatedLayout(tuple(ParameterShape(name, shape) for name, shape in named_shapes))


def parameter_names(prefix: str, module: torch.nn.Module) -> dict[int, str]:
    """Return the names of a module's parameters by the parameters' ids."""
    return {
        id(parameter): f"{prefix}.{name}" if prefix else name for name, parameter in module.named_parameters()
    }
