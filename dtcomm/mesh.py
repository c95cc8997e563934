"""Several kinds of parallelism on one device mesh.

- `make_mesh` makes a mesh whose axes have the usual names, and checks that a model fits them.
- `flatten_axes` joins axes, such as those over which gradients are averaged.
- `clip_grad_norm_` clips gradients by the norm of the whole model's, wherever its parameters are.

The integrations take axes of the mesh: ``dtcomm.tp.compress(model, mesh["tp"])``, DistributedDataParallel with
``mesh["dp"].get_group()``, ``fully_shard(model, mesh=mesh["fsdp"])``, and so on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import combinations
from typing import Any, NamedTuple, TypedDict

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from typing_extensions import Unpack

from dtcomm import torch_compat
from dtcomm.arguments import complete_options, require_int, shares_options
from dtcomm.collectives import all_reduce
from dtcomm.collectives.groups import GroupOrMesh, process_group_of
from dtcomm.tp.sharded_module import shard_groups

__all__ = ["clip_grad_norm_", "flatten_axes", "make_mesh"]

#: Axis → what is divided along it. Ranks that differ only in the last axes are neighbours, so these are inside a host.
AXES = {
    "pp": "pipeline stages",
    "dp": "replicas (DDP)",
    "fsdp": "shards of the parameters (FSDP)",
    "ep": "experts",
    "cp": "the sequence (context parallelism)",
    "tp": "layers (tensor parallelism)",
}


class ModelSizes(TypedDict, total=False):
    """Sizes that `make_mesh` checks.

    Attributes:
        heads: Number of attention heads, divisible by ``tp``. Default: not checked.
        kv_heads: Number of heads of keys and values, divisible by ``tp``. Default: not checked.
        layers: Number of layers, at least ``pp``. Default: not checked.
        experts: Number of experts, divisible by ``ep``. Default: not checked.
        batch: Number of sequences of a step, divisible by the ranks that have different ones, ``dp * fsdp * ep``.
            Default: not checked.
    """

    heads: int | None
    kv_heads: int | None
    layers: int | None
    experts: int | None
    batch: int | None


_UNCHECKED: ModelSizes = {"heads": None, "kv_heads": None, "layers": None, "experts": None, "batch": None}


@shares_options(_UNCHECKED, ModelSizes)
def make_mesh(
    *,
    pp: int = 1,
    dp: int = 1,
    fsdp: int = 1,
    ep: int = 1,
    cp: int = 1,
    tp: int = 1,
    device_type: str = "cpu",
    **model: Unpack[ModelSizes],
) -> DeviceMesh:
    """Make a device mesh with the axes `AXES`, all of them, so that ``mesh["tp"]`` always exists.

    Sizes of the model and of the batch are optional; those that are passed are checked. Sequences need no check:
    `dtcomm.context_parallel` pads them and says so.

    Args:
        pp: Number of pipeline stages. Default: 1.
        dp: Number of replicas. Default: 1.
        fsdp: Number of shards of the parameters. Default: 1.
        ep: Number of ranks that the experts are distributed to. Default: 1.
        cp: Number of parts of each sequence. Default: 1.
        tp: Number of ranks that layers are cut over. Default: 1.
        device_type: Type of the devices. Default: ``"cpu"``.

    Returns:
        The mesh; its ranks are those of the job.

    Raises:
        TypeError: A size is no integer, or an argument is unknown.
        ValueError: The axes do not fit the job, or a size does not fit an axis; the message names both.
        RuntimeError: No process group is initialized.

    Example:
        >>> mesh = dtcomm.mesh.make_mesh(tp=1, heads=12)
        >>> mesh.mesh_dim_names
        ('pp', 'dp', 'fsdp', 'ep', 'cp', 'tp')
    """
    model = complete_options("make_mesh", model, _UNCHECKED)
    sizes = {"pp": pp, "dp": dp, "fsdp": fsdp, "ep": ep, "cp": cp, "tp": tp}
    for name, size in sizes.items():
        require_int(name, size, 1)
    if not dist.is_initialized():
        raise RuntimeError(
            "make_mesh: no process group is initialized; call torch.distributed.init_process_group"
        )
    ranks, needed = dist.get_world_size(), math.prod(sizes.values())
    if needed != ranks:
        used = {name: size for name, size in sizes.items() if size > 1}
        product = " * ".join(f"{name}={size}" for name, size in used.items()) or "1"
        raise ValueError(f"mesh: {product} needs {needed} ranks, the job has {ranks}")
    layers, batch = model["layers"], model["batch"]
    for name, value, axis in (
        ("heads", model["heads"], "tp"),
        ("kv_heads", model["kv_heads"], "tp"),
        ("experts", model["experts"], "ep"),
    ):
        if value is not None:
            require_int(name, value, 1)
            _require_divisible(name, value, axis, sizes[axis])
    if layers is not None:
        require_int("layers", layers, 1)
        if layers < pp:
            raise ValueError(f"pp={pp}: there are {layers} layers; valid: 1 to {layers} stages")
    if batch is not None:
        require_int("batch", batch, 1)
        _require_divisible("batch", batch, "dp * fsdp * ep", dp * fsdp * ep)
    return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def _require_divisible(name: str, value: int, axis: str, size: int) -> None:
    if value % size:
        divisors = ", ".join(str(number) for number in range(1, value + 1) if value % number == 0)
        raise ValueError(f"{name}={value}: not divisible by {axis}={size}; valid {axis}: {divisors}")


def flatten_axes(mesh: DeviceMesh, *names: str) -> DeviceMesh:
    """Return a one-dimensional mesh of the ranks that differ in some of the axes only.

    Gradients of a model whose sequences are divided are averaged over ``flatten_axes(mesh, "dp", "cp")``.

    Args:
        mesh: A mesh with named axes, such as `make_mesh` returns. Every rank of it calls this.
        *names: At least one of its axes, in the mesh's order.

    Returns:
        ``mesh[name]`` for one name; for several a mesh whose axis is called ``"dp_cp"``, say.

    Raises:
        ValueError: An axis does not exist, or they are in another order.

    Example:
        >>> mesh = dtcomm.mesh.make_mesh()
        >>> dtcomm.mesh.flatten_axes(mesh, "dp", "cp").size()
        1
    """
    axes = mesh.mesh_dim_names or ()
    positions = [axes.index(name) if name in axes else -1 for name in names]
    if not names or -1 in positions or positions != sorted(set(positions)):
        raise ValueError(f"names: {names}; valid: some of {', '.join(axes)}, in this order")
    if len(names) == 1:
        return mesh[names[0]]
    flat: DeviceMesh = torch_compat.flatten_mesh(mesh[names], "_".join(names))
    return flat


class _Gradient(NamedTuple):
    """The part of a gradient that this rank has; None if the parameter has no gradient here.

    The ranks of ``groups`` have other parts of it. ``patterns`` are the indices of the entries of ``sharded`` that it
    matches.
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
    model's gradient once. It knows parameters that FSDP or torch's tensor-parallel styles shard (DTensors), those of
    dtcomm's tensor-parallel layers, and those that are named in ``sharded``. A parameter that all ranks of an axis have
    is counted once. Call it on every rank, after the gradients have been averaged.

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
    explicit = {
        pattern: process_group_of(group, "pp", f"sharded[{pattern!r}]")
        for pattern, group in (sharded or {}).items()
    }
    listed = [modules] if isinstance(modules, nn.Module) else list(modules)
    structural: dict[str, dist.ProcessGroup] = {}
    gradients = [gradient for module in listed for gradient in _gradients(module, list(explicit), structural)]
    norm = _total_norm(gradients, structural, list(explicit.values()), norm_type)
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        if gradient.local is not None:
            gradient.local.mul_(factor.to(gradient.local.device, gradient.local.dtype))
    return norm.float()


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
    explicit: Sequence[dist.ProcessGroup | None],
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
    for index, other in enumerate(explicit):
        _reduce(by_patterns, [subset for subset in by_patterns if index in subset], other, order)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for part in by_patterns.values():
        total = _add(total, part, order)
    return total if order == math.inf else total ** (1 / order)


def _add(a: torch.Tensor, b: torch.Tensor, order: float) -> torch.Tensor:
    return torch.maximum(a, b) if order == math.inf else a + b


def _reduce(
    parts: dict[Any, torch.Tensor], keys: Sequence[Any], group: dist.ProcessGroup | None, order: float
) -> None:
    """Add up (or take the largest of) some entries over the ranks of a group."""
    if not keys or dist.get_world_size(group) == 1:
        return
    together = torch.stack([parts[key] for key in keys])
    all_reduce(together, "max" if order == math.inf else "sum", group=group)
    parts.update(zip(keys, together, strict=True))
