"""The axes of a device mesh, and whether a job and a model fit them."""

from __future__ import annotations

import math

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dtcomm.arguments import require_int

#: Axis → what is divided along it. Ranks that differ only in the last axes are neighbours, so these are inside a host.
AXES = {
    "pp": "pipeline stages",
    "dp": "replicas (DDP)",
    "fsdp": "shards of the parameters (FSDP)",
    "ep": "experts",
    "cp": "the sequence (context parallelism)",
    "tp": "layers (tensor parallelism)",
}


def make_mesh(
    *,
    pp: int = 1,
    dp: int = 1,
    fsdp: int = 1,
    ep: int = 1,
    cp: int = 1,
    tp: int = 1,
    device_type: str = "cpu",
    heads: int | None = None,
    kv_heads: int | None = None,
    layers: int | None = None,
    experts: int | None = None,
    batch: int | None = None,
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
        heads: Number of attention heads, divisible by ``tp``. Default: not checked.
        kv_heads: Number of heads of keys and values, divisible by ``tp``. Default: not checked.
        layers: Number of layers, at least ``pp``. Default: not checked.
        experts: Number of experts, divisible by ``ep``. Default: not checked.
        batch: Number of sequences of a step, divisible by the ranks that have different ones, ``dp * fsdp * ep``.
            Default: not checked.

    Returns:
        The mesh; its ranks are those of the job.

    Raises:
        TypeError: A size is no integer.
        ValueError: The axes do not fit the job, or a size does not fit an axis; the message names both.
        RuntimeError: No process group is initialized.

    Example:
        >>> mesh = dtcomm.mesh.make_mesh(tp=1, heads=12)
        >>> mesh.mesh_dim_names
        ('pp', 'dp', 'fsdp', 'ep', 'cp', 'tp')
    """
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
    for name, value, axis in (
        ("heads", heads, "tp"),
        ("kv_heads", kv_heads, "tp"),
        ("experts", experts, "ep"),
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
    flat: DeviceMesh = mesh[names]._flatten("_".join(names))
    return flat
