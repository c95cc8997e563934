"""Compressed communication for FSDP: the all-gather of parameters and the reduce-scatter of gradients.

Example::

    for block in model.layers:
        fully_shard(block)
    fully_shard(model)
    state = dtcomm.fsdp.compress(model, gradients="int8", parameters="fp8_e4m3")

`compress` works on FSDP2 (`fully_shard`), where each wrapped module is compressed by itself, and on FSDP1, which has a
hook for gradients only. `ShardedOptimizer` is ZeRO stages 1 and 2 without a wrapper. The idea is that of ZeRO++ (Wang
et al. 2023, arXiv:2306.10209): both collectives send a quarter of the bytes. Every rank, the owner of a shard included,
computes with the decoded parameters, so all ranks compute with the same values; the optimizer updates the owner's exact
shard.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import Unpack

from dtcomm import env, torch_compat
from dtcomm.arguments import complete_options, shares_options
from dtcomm.codecs import Codec
from dtcomm.collectives import all_reduce, reduce_scatter
from dtcomm.collectives.groups import Announcement, GroupOrMesh, process_group_of
from dtcomm.collectives.planning import require_algorithm
from dtcomm.compress.checkpoint import rank_and_size
from dtcomm.compress.models import refuse_join
from dtcomm.compress.residuals import describe_size
from dtcomm.compress.spec import require_kernels
from dtcomm.frameworks import Attached, Integration
from dtcomm.frameworks import attach as attach_to
from dtcomm.fsdp.collectives import (
    BackwardOverlap,
    CompressedAllGather,
    CompressedReduceScatter,
    GradientReduction,
    ReplicaAllReduce,
)
from dtcomm.fsdp.guard import ROOT
from dtcomm.fsdp.options import (
    DEFAULTS,
    Options,
    parse_specs,
    require_accurate,
)
from dtcomm.fsdp.sharded_optimizer import ShardedOptimizer
from dtcomm.fsdp.split_collectives import (
    Parts,
    SplitAllGather,
    SplitReduceScatter,
    SplitReplicaAllReduce,
    split_module,
)
from dtcomm.fsdp.state import FSDPState
from dtcomm.fsdp.storage import ConcatenatedLayout, concatenated_layout, layout_of
from dtcomm.fsdp.units import excluded_units, find_units
from dtcomm.torch_compat import DDPMeshInfo, FSDPMeshInfo, clean_tensor_name
from dtcomm.tp.sharded_module import ShardedModule, placement_groups

__all__ = ["FSDPState", "ShardedOptimizer", "attach", "compress"]


@shares_options(DEFAULTS, Options)
def compress(
    model: torch.nn.Module,
    gradients: str | Codec | None = None,
    parameters: str | Codec | None = None,
    **options: Unpack[Options],
) -> FSDPState:
    """Compress the collectives of every FSDP module in ``model``.

    In a job with one process nothing is communicated, so nothing is compressed. One log line and the report say so.

    Args:
        model: A model to which `fully_shard` was applied, or an FSDP1 root module; in a job with one process also one
            that is not sharded.

    Returns:
        The state, with the report, `FSDPState.state_dict` for checkpoints, and the timeline. `FSDPState.detach` gives
        the model its own collectives back.

    Raises:
        TypeError: ``model`` has no FSDP module, FSDP1 was asked for ``parameters``, or an argument has a wrong type.
        ValueError: A spec, preset or option is wrong, a codec is too inaccurate, ``replicas`` were passed for a mesh
            that has replicas already, or torch's ``replicate`` was applied to a module.
        RuntimeError: The model, or a part of it, is compressed already. In all of these cases the model is unchanged.

    Example::

        state = dtcomm.fsdp.compress(model, gradients="ef:int4:block=128", parameters="fp8_e4m3")
        for batch in data:
            loss = model(batch)
            loss.backward()
            optimizer.step()
        state.print_report()
    """
    given = complete_options("dtcomm.fsdp", options, DEFAULTS)
    specs = parse_specs(gradients, parameters, given)
    state = FSDPState(specs, given)
    if rank_and_size()[1] == 1 and isinstance(model, torch.nn.Module) and not _is_sharded(model):
        return state.set_unused()
    units = find_units(model)
    memory = describe_size(sum(unit.trainable_numel for unit in units), given["residual"])
    require_accurate(specs, given, memory)
    for argument, spec in (("gradients", specs.gradients), ("parameters", specs.parameters)):
        if not spec.is_none and rank_and_size()[1] > 1:
            require_kernels(spec.codecs(), model.parameters(), argument)
    if env.disabled():
        return state.set_unused()
    for name, pattern in excluded_units(given["exclude"], units).items():
        state.exclude(name, pattern)
    state.algorithm = given["algorithm"]
    if isinstance(model, FullyShardedDataParallel):
        _require_unmixed_units(state, model)
        _attach_to_fsdp1(state, model, given["replicas"])
    else:
        _attach_to_fsdp2(state, model, given["replicas"])
    state.timeline.attach(model)
    _observe_forward(model, state)
    if rank_and_size(state.group)[1] > 1:
        announcement = Announcement(state.group, "dtcomm.fsdp.compress", state.arguments)
        state.on_detach(announcement.require_all_at_forward(model).remove)
    refuse_join(model, "FSDP")
    state.on_detach(lambda: model.__dict__.pop("join_hook", None))
    state.log_feedback(memory)
    if rank_and_size()[1] == 1:
        state.set_unused()
    return state


@shares_options(DEFAULTS, Options)
def attach(
    owner: Any,
    gradients: str | Codec | None = None,
    parameters: str | Codec | None = None,
    *,
    log: bool = False,
    **options: Unpack[Options],
) -> Attached[FSDPState]:
    """Compress the collectives of a model that a framework shards, once it has done so.

    The framework's checkpoints then contain the state of compression of every rank, and a resumed run continues with it
    (docs/guides/frameworks.md). In a job with one process nothing is compressed; one log line and the report say so.

    Args:
        owner: A Hugging Face ``Accelerator`` or ``Trainer`` that uses FSDP, or a Lightning ``Trainer`` with
            ``ModelParallelStrategy``.
        log: Log the metrics of the report through the framework, at its own interval, and with it to TensorBoard,
            W&B or MLflow. An ``Accelerator`` logs them whenever the program calls ``log``. Default: False.

    Returns:
        An object whose ``state`` is the `FSDPState`, once the framework has sharded the model.

    Raises:
        TypeError: ``owner`` is none of these.
        ValueError: A spec, preset or option is wrong, or a codec is too inaccurate.

    Example::

        attached = dtcomm.fsdp.attach(trainer, gradients="int8", parameters="fp8_e4m3")
        trainer.train()  # Lightning: trainer.fit(module)
        attached.state.print_report()
    """
    # Wrong options raise their errors now, and not when the model is sharded.
    given = complete_options("dtcomm.fsdp", options, DEFAULTS)
    specs = parse_specs(gradients, parameters, given)
    require_accurate(specs, given, "residuals of the size of the model")
    FSDPState(specs, given)

    return attach_to(
        owner,
        Integration(
            name="dtcomm.fsdp",
            wrapper="FSDP",
            accepts=_is_sharded,
            obstacle=_obstacle,
            compress=lambda model: compress(model, gradients, parameters, **options),
            unused=lambda: FSDPState(specs, given).set_unused(),
        ),
        log=log,
    )


def _is_sharded(model: torch.nn.Module) -> bool:
    return any(isinstance(module, FSDPModule | FullyShardedDataParallel) for module in model.modules())


def _obstacle(model: torch.nn.Module) -> str:
    """Return why a model that a framework has wrapped in something else cannot be compressed."""
    if isinstance(model, DistributedDataParallel):
        return (
            "the framework wrapped the model in DDP, not in FSDP, so nothing is compressed; use dtcomm.ddp.attach "
            "(Accelerate and Trainer ignore their FSDP options on CPUs)"
        )
    return ""


def _observe_forward(model: torch.nn.Module, state: FSDPState) -> None:
    """Begin a training step in the model's forward, before FSDP's own hook, which gathers parameters."""

    def begin_step(*_: Any) -> None:
        if torch.is_grad_enabled():
            state.begin_forward()

    def end_inference(*_: Any) -> None:
        if not torch.is_grad_enabled():  # otherwise backward gathers and reduces more
            state.log_uncompressed()

    state.on_detach(model.register_forward_pre_hook(begin_step, prepend=True).remove)
    state.on_detach(model.register_forward_hook(end_inference).remove)


def _attach_to_fsdp2(state: FSDPState, model: torch.nn.Module, replicas: GroupOrMesh) -> None:
    """Replace the collectives of all modules, after checking what can be refused."""
    replicas = process_group_of(replicas, "replicate", "replicas")
    modules = [(name, module) for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    for name, module in modules:
        groups = torch_compat.fsdp2_parameter_groups(module)
        if len(groups) > 1 and replicas is not None:
            raise ValueError(
                f"replicas: {name or ROOT} has its parameters in {len(groups)} groups, for which torch accepts no "
                "custom all-reduce; apply fully_shard to the layers of each mesh by themselves"
            )
        for group in groups:
            if not isinstance(group.mesh_info, FSDPMeshInfo):
                raise ValueError(
                    f"model: replicate() was applied to {name or ROOT}, and torch does not let its all-reduce be "
                    "replaced; use fully_shard(module, mesh=mesh['shard']), where the dimension of shards may have "
                    "one rank, and compress(replicas=mesh['replicate'])"
                )
            for collective in ("reduce_scatter", "all_gather"):
                require_algorithm(state.algorithm, group.mesh_info.shard_process_group, collective)
            if _has_replicas(group.mesh_info) and replicas is not None:
                raise ValueError(
                    "replicas: the mesh passed to fully_shard has a dimension of replicas already, whose all-reduce is "
                    "torch's; pass fully_shard the dimension of shards alone"
                )
    overlap = BackwardOverlap()
    for name, module in modules:
        _attach_to_module(state, name, module, replicas, overlap)


def _has_replicas(mesh: Any) -> bool:
    return isinstance(mesh, DDPMeshInfo) and mesh.replicate_mesh_size > 1


def _attach_to_module(
    state: FSDPState,
    name: str,
    module: FSDPModule,
    replicas: dist.ProcessGroup | None,
    overlap: BackwardOverlap,
) -> None:
    """Replace the collectives of one module."""
    groups = torch_compat.fsdp2_parameter_groups(module)
    if len(groups) > 1:
        state.add_fallback(
            name,
            f"its parameters are in {len(groups)} groups, for which torch accepts no custom collectives; apply "
            "fully_shard to the layers of each mesh by themselves",
        )
        return
    for group in groups:
        mesh = group.mesh_info
        state.num_shards, state.shard_index = mesh.shard_mesh_size, mesh.shard_mesh_rank
        state.group = mesh.shard_process_group
        if _has_replicas(mesh):
            state.num_replicas, state.replica_index = mesh.replicate_mesh_size, mesh.replicate_mesh_rank
            state.agree_over([mesh.replicate_process_group])
            state.add_note(
                f"{name or ROOT}: torch averages the gradients of {mesh.replicate_mesh_size} replicas, "
                "uncompressed; to compress that, pass fully_shard the shards' dimension of the mesh alone, and "
                "compress(replicas=) the other"
            )
        state.on_detach(_restorer(group))
    if replicas is not None:
        state.num_replicas, state.replica_index = replicas.size(), replicas.rank()
        state.agree_over([replicas])
    parts = None
    for group in groups:
        tensor_parallel_groups, parts = split_module(name, module, group)
        state.agree_over(tensor_parallel_groups)
    _set_collectives(state, name, module, replicas, overlap, parts)
    # Loaded parameters differ from the references by more than an update; the next gather must send whole values.
    handle = module.register_load_state_dict_post_hook(  # type: ignore[attr-defined]
        lambda *_: state.invalidate_references()
    )
    state.on_detach(handle.remove)


def _set_collectives(
    state: FSDPState,
    name: str,
    module: FSDPModule,
    replicas: dist.ProcessGroup | None,
    overlap: BackwardOverlap,
    parts: Parts | None,
) -> None:
    """Set the collectives of one module: on its flat tensors, or on each of its parts."""
    if parts is None:
        module.set_custom_all_gather(CompressedAllGather(state, name))
        module.set_custom_reduce_scatter(CompressedReduceScatter(state, name, module, overlap))
        if replicas is not None:
            module.set_all_reduce_hook(ReplicaAllReduce(state, name, replicas))
        state.register_layout(name, layout_of(name, module))
        return
    module.set_custom_all_gather(SplitAllGather(state, name, parts))
    module.set_custom_reduce_scatter(SplitReduceScatter(state, name, module, overlap, parts))
    if replicas is not None:
        module.set_all_reduce_hook(SplitReplicaAllReduce(state, name, replicas, parts))
    for part in parts.parts:
        state.exclude_with(name, part.name)
        state.register_layout(part.name, part.layout)


def _restorer(group: Any) -> Callable[[], None]:
    """Return what gives a parameter group its present collectives back, without keeping the group alive."""
    reference = weakref.ref(group)
    before = {
        name: getattr(group, name)
        for name in ("_all_gather_comm", "_reduce_scatter_comm", "_all_reduce_hook")
    }

    def restore() -> None:
        if (alive := reference()) is not None:
            for name, value in before.items():
                setattr(alive, name, value)

    return restore


@dataclass(frozen=True)
class _Fsdp1Unit:
    """The state that torch passes to the communication hook of one FSDP1 unit, a wrapped module."""

    state: FSDPState
    name: str
    group: dist.ProcessGroup | None


def _attach_to_fsdp1(state: FSDPState, model: FullyShardedDataParallel, replicas: GroupOrMesh) -> None:
    """Register `_reduce_fsdp1_gradient` on every unit of the FSDP1 root module ``model``.

    torch raises an error for hybrid strategies.
    """
    if str(state.parameters) != "none":
        raise TypeError(
            f"parameters: FSDP1 has a hook for gradients only, got {str(state.parameters)!r}; "
            "valid: 'none', or use FSDP2's fully_shard"
        )
    if replicas is not None:
        raise ValueError("replicas: FSDP1 has hybrid strategies of its own; valid: None, or use fully_shard")
    require_algorithm(state.algorithm, model.process_group, "reduce_scatter")
    model.register_comm_hook(state, _reduce_fsdp1_gradient)
    state.group = group = model.process_group
    state.num_shards, state.shard_index = dist.get_world_size(group), dist.get_rank(group)
    for path, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel):
            name = clean_tensor_name(path)
            # torch passes the hook one state for all units; replacing it tells the hook which unit calls.
            torch_compat.set_fsdp1_hook_state(module, _Fsdp1Unit(state, name, module.process_group))
            state.register_layout(name, _unit_layout(name, module))
            state.on_detach(functools.partial(_remove_fsdp1_hook, weakref.ref(module)))
    state.add_note(
        "FSDP1: torch gathers the parameters, uncompressed, because FSDP1 has no hook for that; fully_shard has one"
    )


def _require_unmixed_units(state: FSDPState, model: FullyShardedDataParallel) -> None:
    """Let tensor-parallel ranks follow the same guard, and refuse units that these ranks would round differently.

    FSDP1 keeps the parameters of a unit as one flat parameter, and its hook gets one gradient, which cannot be encoded
    in parts.
    """
    for path, module in model.named_modules():
        flat = (
            torch_compat.fsdp1_flat_parameter(module)
            if isinstance(module, FullyShardedDataParallel)
            else None
        )
        if flat is None:
            continue
        name = clean_tensor_name(path)
        cut: dict[str, list[dist.ProcessGroup]] = {}
        for own_name, (info, extension) in zip(flat.names, flat.owners, strict=True):
            layer = info.module  # its parameters are views of the flat one by now, but it knows their names
            group = layer.shard_group(info.param_name) if isinstance(layer, ShardedModule) else None
            cut[own_name] = [*placement_groups(extension), *([] if group is None else [group])]
        state.agree_over(group for groups in cut.values() for group in groups)
        spec = state.spec(name, state.gradients)
        if spec.lossless(flat.parameter.dtype) or not any(cut.values()) or all(cut.values()):
            continue
        whole = [own_name for own_name, groups in cut.items() if not groups]
        raise ValueError(
            f"model: in the FSDP1 unit {name or ROOT!r} tensor parallelism cuts some parameters, but all of its ranks "
            f"have {', '.join(whole[:3])}{', ...' if len(whole) > 3 else ''}; encoded as one flat gradient, these "
            "copies would become different. Use fully_shard (FSDP2), which encodes them apart, or exclude the unit "
            f"(exclude={name or ROOT!r}), or wrap what tensor parallelism cuts in units of their own"
        )


def _remove_fsdp1_hook(reference: weakref.ref[FullyShardedDataParallel]) -> None:
    if (module := reference()) is not None:
        torch_compat.remove_fsdp1_hook(module)


def _reduce_fsdp1_gradient(
    unit: _Fsdp1Unit, gradient: torch.Tensor, shard: torch.Tensor | None = None
) -> None:
    """Average a gradient over the ranks; FSDP1's hook, which is for gradients only.

    With NO_SHARD, where ``shard`` is None, the whole gradient receives the mean; with all other strategies the gradient
    is padded, and the hook writes this rank's shard of the mean.
    """
    reduction = GradientReduction(unit.state, unit.name, gradient)
    if shard is None:
        work = all_reduce(gradient, "avg", group=unit.group, **reduction.options)
    else:
        algorithm = unit.state.algorithm
        work = reduce_scatter(
            shard, gradient, "avg", algorithm=algorithm, group=unit.group, **reduction.options
        )
    assert work is not None  # async_op is True
    work.wait()
    reduction.finish(gradient if shard is None else shard, is_shard=shard is not None)
    ranks = dist.get_world_size(unit.group)
    passes = 2 if shard is None else 1
    reduction.traffic.add(work, passes * gradient.nbytes * (ranks - 1) // ranks)


def _unit_layout(name: str, module: FullyShardedDataParallel) -> ConcatenatedLayout | None:
    """Return the layout of a unit's gradient; None if it has no parameters, or torch pads between them."""
    flat = torch_compat.fsdp1_flat_parameter(module)
    if flat is None or flat.padded:
        return None
    names = [f"{name}.{path}" if name else path for path in flat.names]
    return concatenated_layout(list(zip(names, flat.shapes, strict=True)))
