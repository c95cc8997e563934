"""What FSDP's collectives keep between calls: layouts of flat tensors, residuals, buffers, and the optimizer's buckets.

A flat tensor holds the gradients or parameters of a module, an FSDP1 unit or a bucket; a layout says where each
parameter lies in it. Residuals, the errors of gradient encodings, are stored flat during training and saved by
parameter name: the length and order of a flat tensor depend on the number of ranks, a parameter's own shape does not.
Prefix ``ef:`` uses `FullResidual`, ``loco:`` uses `LoCoResidual`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from dtcomm import torch_compat
from dtcomm.codecs import codec
from dtcomm.collectives import all_reduce, empty
from dtcomm.compress.residuals import Residuals
from dtcomm.kernels import counter_rng

LOCO_BETA = 0.8
LOCO_RESET_CALLS = 1024
LOCO_CODEC = codec("int8:block=256,round=stochastic")
# Smaller buffers cost more, in whole pages and a file descriptor, than they save.
MIN_SHARED_BYTES = 64 * 1024


# --- layouts ----------------------------------------------------------------------------------------------------------


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


#: Where parameters lie in a flat tensor.
FlatLayout: TypeAlias = ShardedLayout | ConcatenatedLayout


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
    chosen = group.fsdp_params if fsdp_parameters is None else fsdp_parameters
    for fsdp_parameter in torch_compat.in_order_of_reduction(chosen):
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


# --- residuals --------------------------------------------------------------------------------------------------------


class FullResidual(Residuals):
    """The whole error of each encoding, stored in one of `dtcomm.compress.residuals.FORMS`.

    Attributes:
        counts: Number of calls of each module.
    """

    saves_payloads = (
        False  # their blocks hold elements of several parameters, and states are saved by parameter
    )

    def __init__(self, form: str = "fp32") -> None:
        super().__init__(form)
        self.counts: dict[str, int] = {}

    def take(self, module: str, like: torch.Tensor) -> torch.Tensor:
        """Return the flat fp32 residual, which the next encoding adds and overwrites."""
        return self.get(module, like)

    def give_back(self, module: str, residual: torch.Tensor, key: int = 0) -> None:
        """Store the same tensor after the encoding.

        Stochastic rounding to the stored form is keyed by ``key``, which differs between ranks, the module and its
        number of calls: not by a number of calls of all modules, since several may be under way.
        """
        calls = self.counts[module] = self.counts.get(module, 0) + 1
        self.put(module, counter_rng.absorb(key, calls))


class LoCoResidual(FullResidual):
    """The error feedback of LoCo (Xie et al. 2024, arXiv:2407.04480): a moving average of the error, in 8 bits.

    ``residual = beta * residual + (1 - beta) * error``. Every ``reset_calls`` calls of a module the residual becomes
    zero, so that the rounding errors of its 8 bits do not accumulate. It takes about one byte per element.

    The 8 bits are rounded stochastically: to the nearest value, an average would never take in errors that are small
    beside the largest one of their block.
    """

    def __init__(self, beta: float = LOCO_BETA, reset_calls: int = LOCO_RESET_CALLS) -> None:
        super().__init__("int8")
        self._codec = LOCO_CODEC
        self.beta, self.reset_calls = beta, reset_calls
        self._averages: dict[str, torch.Tensor] = {}  # of modules whose encoding is under way

    def take(self, module: str, like: torch.Tensor) -> torch.Tensor:
        residual = super().take(module, like)
        self._averages[module] = residual.clone()
        return residual

    def give_back(self, module: str, residual: torch.Tensor, key: int = 0) -> None:
        """Update the average with the encoding's error, which is in ``residual``."""
        # A block with a non-finite gradient leaves its residual unchanged, so both are equal there.
        residual.copy_(self._averages.pop(module).lerp_(residual, 1 - self.beta))
        super().give_back(module, residual, key)
        if self.counts[module] % self.reset_calls == 0:
            self.reset(module)


# --- buffers of collectives -------------------------------------------------------------------------------------------


class BufferPool:
    """The buffers that FSDP allocates in every step: shared tensors, reused once nothing else refers to their storage.

    A collective whose tensors lie in memory that the ranks of a host share needs no staging copy. And for tens of
    megabytes, the page faults of a fresh allocation cost more than moving the data. ``unshared_reason`` says why
    ordinary memory is used, after an allocation of shared memory failed.
    """

    def __init__(self) -> None:
        # Buffers, each with the number of references to its storage when it is free.
        self._buffers: list[tuple[torch.Tensor, int]] = []
        self.unshared_reason = ""

    def take(self, size: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an uninitialized tensor; small ones, and those on devices, are in ordinary memory."""
        shape = torch.Size(size)
        nbytes = shape.numel() * dtype.itemsize
        if device.type != "cpu" or nbytes < MIN_SHARED_BYTES or self.unshared_reason:
            return torch.empty(shape, dtype=dtype, device=device)
        for buffer, unused_count in self._buffers:
            if buffer.numel() == nbytes and _use_count(buffer) <= unused_count:
                return buffer.view(dtype).view(shape)
        try:
            buffer = empty(nbytes, dtype=torch.uint8)
        except OSError as error:
            self.unshared_reason = f"buffers are not in shared memory: {error}"
            return torch.empty(shape, dtype=dtype, device=device)
        self._buffers.append((buffer, _use_count(buffer)))
        return buffer.view(dtype).view(shape)

    def nbytes(self) -> int:
        """Return the size of all buffers, used or not."""
        return sum(buffer.numel() for buffer, _ in self._buffers)

    def trim(self) -> None:
        """Free the buffers that are not in use."""
        self._buffers = [(buffer, count) for buffer, count in self._buffers if _use_count(buffer) > count]


def _use_count(tensor: torch.Tensor) -> int:
    """Return the number of tensors, in Python and in autograd, that refer to the storage."""
    return torch_compat.storage_use_count(tensor)


# --- buckets of `ShardedOptimizer` ------------------------------------------------------------------------------------


class OptimizerBucket:
    """Parameters that are reduced and gathered together: one flat tensor, cut into one shard per rank.

    The constructor makes the parameters views of the flat tensor.

    Attributes:
        flat: The parameters that the model computes with, decoded and padded.
        master_shard: This rank's shard in fp32, which the optimizer updates.
        gradient: The flat gradient accumulated so far, or None.
        missing: Number of parameters whose gradient has not arrived in this backward pass.
        tensor_parallel_groups: The groups over which its parameters are cut; none if all ranks have them.
    """

    def __init__(
        self,
        name: str,
        parameters: Sequence[tuple[str, torch.nn.Parameter]],
        ranks: int,
        rank: int,
        tensor_parallel_groups: Sequence[dist.ProcessGroup] = (),
    ) -> None:
        self.name = name
        self.tensor_parallel_groups = tuple(tensor_parallel_groups)
        self.parameters = [parameter for _, parameter in parameters]
        self.layout = concatenated_layout([(name, parameter.shape) for name, parameter in parameters])
        self.ranks, self.rank = ranks, rank
        first = self.parameters[0]
        self.dtype = first.dtype
        with torch.no_grad():
            self.flat = first.new_zeros(self.layout.numel(ranks))
            for view, parameter in zip(self._views(self.flat), self.parameters, strict=True):
                view.copy_(parameter)
                parameter.data = view
        self.master_shard = torch.nn.Parameter(self.shard_of(self.flat).float().clone())
        self._versions = self._current_versions()
        self.gradient: torch.Tensor | None = None
        self.missing = len(self.parameters)

    def _views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        sizes = [parameter.numel() for parameter in self.parameters]
        slices = flat[: sum(sizes)].split_with_sizes(sizes)
        return [part.view(p.shape) for part, p in zip(slices, self.parameters, strict=True)]

    def shard_of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return this rank's shard of a flat tensor."""
        return flat.view(self.ranks, -1)[self.rank]

    def _current_versions(self) -> list[int]:
        # Writing to the flat tensor does not change the versions of the parameters, writing to a parameter does.
        return [parameter._version for parameter in self.parameters]

    def update_master_if_overwritten(self) -> None:
        """Copy the parameters into the master shard if something else, such as a checkpoint, wrote them."""
        versions = self._current_versions()
        if versions != self._versions:
            self._versions = versions
            with torch.no_grad():
                self.master_shard.copy_(self.shard_of(self.flat))

    def parameter_means(self, shard: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        """Return for each element of this rank's shard the mean of its parameter's elements over all ranks' shards.

        Where that is 0, the mean of the whole bucket takes its place.
        """
        whole = shard.new_zeros(self.ranks, shard.numel(), dtype=torch.float64)
        whole[self.rank] = shard
        views = self._views(whole.view(-1))
        sums = torch.stack([view.sum() for view in views])
        all_reduce(sums, group=group)
        sizes = sums.new_tensor([view.numel() for view in views])
        means = torch.where(sums > 0, sums / sizes, sums.sum() / sizes.sum())
        for view, mean in zip(views, means, strict=True):
            view.fill_(mean)
        return whole[self.rank].to(shard.dtype)

    def accumulate(self, index: int, keep: bool) -> None:
        """Add a parameter's gradient to the flat one; ``keep`` makes the parameter's ``grad`` a view of the sum."""
        parameter = self.parameters[index]
        gradient = parameter.grad
        assert gradient is not None  # autograd has just accumulated it
        if self.gradient is None:
            self.gradient = torch.zeros_like(self.flat)
        view = self._views(self.gradient)[index]
        if gradient.data_ptr() != view.data_ptr():
            view.add_(gradient)
        parameter.grad = view if keep else None

    def add_reduced_shard(self, shard: torch.Tensor) -> None:
        """Add the reduced shard of a gradient to the gradient that the optimizer will see."""
        gradient = shard.float()
        master = self.master_shard
        master.grad = gradient if master.grad is None else master.grad.add_(gradient)
