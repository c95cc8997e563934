"""The norm of gradients whose parameters are divided over several axes of a mesh."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import combinations
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dtcomm.collectives import all_reduce
from dtcomm.tp.sharded_module import shard_groups

GroupOrMesh = dist.ProcessGroup | DeviceMesh


class _Gradient(NamedTuple):
    """The part of a gradient that this rank has.

    Attributes:
        local: The part; None if the parameter has no gradient here.
        groups: Names of the groups whose ranks have other parts of it.
        patterns: Indices of the entries of ``sharded`` that it matches.
    """

    local: torch.Tensor | None
    groups: tuple[str, ...]
    patterns: frozenset[int]


@torch.no_grad()
def clip_grad_norm_(
    modules: nn.Module | Sequence[nn.Module],
    max_norm: float,
    *,
    sharded: Mapping[str, GroupOrMesh] | None = None,
    norm_type: float = 2.0,
) -> torch.Tensor:
    """Clip the gradients of a model by the norm of all of them, as `torch.nn.utils.clip_grad_norm_` does on one rank.

    torch's function counts what one rank has, or one mesh of DTensors. This one counts every element of the whole
    model's gradient once: those of parameters that FSDP or torch's tensor-parallel styles shard (DTensors), those of
    dtcomm's tensor-parallel layers, and those of parameters that are named in ``sharded``. A parameter that all ranks
    of an axis have is counted once. Call it on every rank, after the gradients have been averaged.

    Args:
        modules: The model, or this rank's parts of it.
        max_norm: The largest norm that is left as it is.
        sharded: Shell pattern of parameters' names → the group, or one axis of a mesh, each of whose ranks has other
            parameters of these names: ``{"*": mesh["pp"]}`` for pipeline stages, ``{"*.experts.*": mesh["ep"]}`` for
            experts. The same on all ranks. Default: none.
        norm_type: Order of the norm; ``math.inf`` for the largest element. Default: 2.

    Returns:
        The norm before clipping, fp32, a scalar; equal on all ranks.

    Raises:
        ValueError: ``max_norm`` or ``norm_type`` is not positive, an axis has more than one dimension, or torch has
            taken parameters out of a module.

    Example::

        loss.backward()
        norm = dtcomm.mesh.clip_grad_norm_(model, 1.0, sharded={"*": mesh["pp"]})
        optimizer.step()
    """
    for name, value in (("max_norm", max_norm), ("norm_type", norm_type)):
        if not value > 0:
            raise ValueError(f"{name}={value}: expected a positive number")
    explicit = [
        (pattern, _group_of(group, f"sharded[{pattern!r}]")) for pattern, group in (sharded or {}).items()
    ]
    listed = [modules] if isinstance(modules, nn.Module) else list(modules)
    structural: dict[str, dist.ProcessGroup] = {}
    gradients = [
        gradient
        for module in listed
        for gradient in _gradients(module, [pattern for pattern, _ in explicit], structural)
    ]
    norm = _total_norm(gradients, structural, [group for _, group in explicit], norm_type)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        if gradient.local is not None:
            gradient.local.mul_(factor.to(gradient.local.device, gradient.local.dtype))
    return norm.float()


def _group_of(group: object, argument: str) -> dist.ProcessGroup:
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(f"{argument}: expected one axis of a mesh, got {group.ndim}")
        return group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"{argument}: expected a ProcessGroup or a DeviceMesh, got {type(group).__name__}")
    return group


def _gradients(
    module: nn.Module, patterns: Sequence[str], structural: dict[str, dist.ProcessGroup]
) -> Iterator[_Gradient]:
    """Yield the gradients of a module, and add the groups over which they are sharded to ``structural``."""
    _require_all_parameters(module)
    trained = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
    all_groups = shard_groups(parameter for _, parameter in trained)
    for (name, parameter), groups in zip(trained, all_groups, strict=True):
        structural.update({group.group_name: group for group in groups})
        yield _Gradient(
            _local(parameter.grad),
            tuple(group.group_name for group in groups),
            frozenset(index for index, pattern in enumerate(patterns) if fnmatchcase(name, pattern)),
        )


def _require_all_parameters(module: nn.Module) -> None:
    """Refuse modules in which a forward pass has replaced parameters by DTensors that are no parameters."""
    for path, owner in module.named_modules():
        for name, value in vars(owner).items():
            if isinstance(value, DTensor) and value.requires_grad:
                raise ValueError(
                    f"modules: {f'{path}.' if path else ''}{name} is a DTensor and no longer a parameter. torch's "
                    "_pre_dp_module_transform has done that, for DistributedDataParallel, and its gradient cannot be "
                    "found; use dtcomm.tp.compress for the layers, or fully_shard instead of DistributedDataParallel"
                )


def _local(gradient: Any) -> torch.Tensor | None:
    local: torch.Tensor | None = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    return local


def _total_norm(
    gradients: Sequence[_Gradient],
    structural: Mapping[str, dist.ProcessGroup],
    explicit: Sequence[dist.ProcessGroup],
    order: float,
) -> torch.Tensor:
    """Return the norm of all ranks' gradients, fp64, the same on all ranks.

    Parts are added up by the set of groups over which they are sharded, and then over these groups, one after the
    other. Ranks of a structural group have the same modules, so they have the same sets. Ranks of an explicit group may
    have different modules, so all sets that there can be take part.
    """
    locals_ = [gradient.local for gradient in gradients if gradient.local is not None]
    device = locals_[0].device if locals_ else torch.device("cpu")
    parts: dict[tuple[tuple[str, ...], frozenset[int]], torch.Tensor] = {}
    for gradient in gradients:
        key = (gradient.groups, gradient.patterns)
        part = parts.setdefault(key, torch.zeros((), dtype=torch.float64, device=device))
        if gradient.local is not None and gradient.local.numel():
            power = torch.linalg.vector_norm(gradient.local, order, dtype=torch.float64)
            parts[key] = _add(part, power if order == math.inf else power**order, order)
    for name, group in structural.items():
        _reduce(parts, [key for key in parts if name in key[0]], group, order)
    by_patterns: dict[frozenset[int], torch.Tensor] = {
        frozenset(subset): torch.zeros((), dtype=torch.float64, device=device)
        for size in range(len(explicit) + 1)
        for subset in combinations(range(len(explicit)), size)
    }
    for (_, patterns), part in parts.items():
        by_patterns[patterns] = _add(by_patterns[patterns], part, order)
    for index, group in enumerate(explicit):
        _reduce(by_patterns, [subset for subset in by_patterns if index in subset], group, order)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for part in by_patterns.values():
        total = _add(total, part, order)
    return total if order == math.inf else total ** (1 / order)


def _add(a: torch.Tensor, b: torch.Tensor, order: float) -> torch.Tensor:
    return torch.maximum(a, b) if order == math.inf else a + b


def _reduce(
    parts: dict[Any, torch.Tensor], keys: Sequence[Any], group: dist.ProcessGroup, order: float
) -> None:
    """Add up (or take the largest of) some entries over the ranks of a group."""
    if not keys or dist.get_world_size(group) == 1:
        return
    together = torch.stack([parts[key] for key in keys])
    all_reduce(together, "max" if order == math.inf else "sum", group=group)
    parts.update(zip(keys, together, strict=True))
