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

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp._common_utils import clean_tensor_name
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, FSDPMeshInfo

from dtcomm.codecs import Codec
from dtcomm.collectives import all_reduce, reduce_scatter
from dtcomm.compress.guard import Guard
from dtcomm.fsdp.collectives import (
    BackwardOverlap,
    CompressedAllGather,
    CompressedReduceScatter,
    GradientReduction,
    ReplicaAllReduce,
)
from dtcomm.fsdp.flat_layout import ConcatenatedLayout, concatenated_layout, layout_of
from dtcomm.fsdp.report import Report, Traffic
from dtcomm.fsdp.sharded_optimizer import ShardedOptimizer
from dtcomm.fsdp.spec import (
    FEEDBACKS,
    PARAMETER_PREFIXES,
    PRESETS,
    CompressionSpec,
    find_preset,
    parse_spec,
)
from dtcomm.fsdp.state import State

__all__ = ["PRESETS", "Report", "ShardedOptimizer", "State", "Traffic", "compress"]

DEFAULT_GRADIENTS, DEFAULT_PARAMETERS = "int8", "none"
_DEFAULT_GUARD = Guard()


def compress(
    model: torch.nn.Module,
    gradients: str | Codec | None = None,
    parameters: str | Codec | None = None,
    *,
    preset: str | None = None,
    feedback: bool = False,
    residual: str = "fp32",
    replicas: DeviceMesh | dist.ProcessGroup | None = None,
    guard: Guard | None = _DEFAULT_GUARD,
    sample_every: int = 50,
    seed: int = 0,
) -> State:
    """Compress the collectives of every FSDP module in ``model``.

    Args:
        model: A model to which `fully_shard` was applied, or an FSDP1 root module.
        gradients: Spec of the gradients' reduce-scatter: a codec, or two (``"int8/int4"`` is int8 inside hosts and int4
            between hosts), optionally prefixed by ``ef:`` or ``loco:`` for error feedback (see `dtcomm.fsdp.spec`).
            Default: the preset's, or ``"int8"``.
        parameters: Spec of the parameters' all-gather: one or two codecs, optionally prefixed by ``delta:``, which
            sends differences. FSDP1 supports only ``"none"``. Default: the preset's, or ``"none"``.
        preset: ``"zero++"`` (Wang et al. 2023, arXiv:2306.10209), ``"loco"`` (Xie et al. 2024, arXiv:2407.04480) or
            ``"sdp4bit"`` (Jia et al. 2024, arXiv:2410.15526) set both specs; ``gradients`` and ``parameters`` override
            the preset's. Default: none.
        feedback: The same as the prefix ``ef:``: add the error of each gradient's encoding to the next gradient. It
            takes an fp32 copy of every module's whole gradient on every rank; ``loco:`` takes a quarter of that.
            Default: False.
        residual: How ``ef:`` stores residuals between steps: ``"fp32"``, ``"bf16"`` or ``"int8"``
            (`dtcomm.compress.residuals`). Default: ``"fp32"``.
        replicas: Mesh dimension or process group of the replicas of this model, which is sharded over one dimension
            only; their gradients are averaged in the codec of ``gradients``. This is HSDP with both collectives
            compressed. With torch's own HSDP (a two-dimensional mesh in `fully_shard`) the all-reduce between replicas
            is torch's, uncompressed, and the report says so. Default: no replicas.
        guard: Limits and actions that protect training (`dtcomm.compress.guard`): the guard raises a module's precision
            or stops compressing it when compression does harm. `State.observe` passes the loss to it. None: no guard.
            Default: ``Guard()``.
        sample_every: Steps from one measurement of encoding errors to the next, for report and guard; 0: never.
            Default: 50.
        seed: Seed of stochastic rounding. Default: 0.

    Returns:
        The state, with the report, `State.state_dict` for checkpoints, and the timeline.

    Raises:
        TypeError: ``model`` has no FSDP module, or ``parameters`` were requested of FSDP1.
        ValueError: A spec, preset or option is wrong, or ``replicas`` were passed for a mesh that has replicas already.

    Example::

        state = dtcomm.fsdp.compress(model, gradients="ef:int4:block=128", parameters="fp8_e4m3")
        for batch in data:
            loss = model(batch)
            loss.backward()
            optimizer.step()
        print(state.report())
    """
    defaults = None if preset is None else find_preset(preset)
    if gradients is None:
        gradients = defaults.gradients if defaults else DEFAULT_GRADIENTS
    if parameters is None:
        parameters = defaults.parameters if defaults else DEFAULT_PARAMETERS
    gradient_spec = parse_spec(gradients, FEEDBACKS, "gradients")
    if feedback and not gradient_spec.prefix:
        gradient_spec = CompressionSpec(gradient_spec.inside, gradient_spec.between, "ef")
    parameter_spec = parse_spec(parameters, PARAMETER_PREFIXES, "parameters")
    state = State(gradient_spec, parameter_spec, seed, residual, guard, sample_every)
    state.timeline.attach(model)
    if isinstance(model, FullyShardedDataParallel):
        if str(state.parameters) != "none":
            raise TypeError(
                f"parameters: FSDP1 has a hook for gradients only, got {str(state.parameters)!r}; "
                "valid: 'none', or use FSDP2's fully_shard"
            )
        if replicas is not None:
            raise ValueError(
                "replicas: FSDP1 has hybrid strategies of its own; valid: None, or use fully_shard"
            )
        _attach_to_fsdp1(state, model)
        _begin_step_in_forward(model, state)
        return state
    modules = [(name, module) for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    if not modules:
        raise TypeError(f"model: {type(model).__name__} has no module that fully_shard was applied to")
    replica_group = replicas.get_group() if isinstance(replicas, DeviceMesh) else replicas
    overlap = BackwardOverlap()
    for name, module in modules:
        _attach_to_fsdp2(state, name, module, replica_group, overlap)
    _begin_step_in_forward(model, state)
    return state


def _begin_step_in_forward(model: torch.nn.Module, state: State) -> None:
    """Begin a training step in the model's forward, before FSDP's own hook, which gathers parameters."""
    model.register_forward_pre_hook(
        lambda *_: state.begin_step() if torch.is_grad_enabled() else None, prepend=True
    )


def _parameter_groups(fsdp_state: Any) -> list[Any]:
    """Return a module's parameter groups; up to torch 2.11 there is at most one."""
    if hasattr(fsdp_state, "_fsdp_param_groups"):
        return list(fsdp_state._fsdp_param_groups)
    return [] if fsdp_state._fsdp_param_group is None else [fsdp_state._fsdp_param_group]


def _attach_to_fsdp2(
    state: State,
    name: str,
    module: FSDPModule,
    replicas: dist.ProcessGroup | None,
    overlap: BackwardOverlap,
) -> None:
    """Replace the collectives of one module."""
    groups = _parameter_groups(module._get_fsdp_state())
    if len(groups) > 1:
        state.add_note(
            f"{name or '(root)'}: uncompressed, because its parameters are in {len(groups)} groups, for which torch "
            "accepts no custom collectives"
        )
        return
    for group in groups:
        mesh = group.mesh_info
        if isinstance(mesh, FSDPMeshInfo):
            state.num_shards, state.shard_index = mesh.shard_mesh_size, mesh.shard_mesh_rank
            state.group = mesh.shard_process_group
        if isinstance(mesh, DDPMeshInfo) and mesh.replicate_mesh_size > 1:
            if replicas is not None:
                raise ValueError(
                    "replicas: the mesh passed to fully_shard has a dimension of replicas already, whose all-reduce is "
                    "torch's; pass fully_shard the dimension of shards alone"
                )
            state.add_note(
                f"{name or '(root)'}: torch averages the gradients of {mesh.replicate_mesh_size} replicas, "
                "uncompressed; to compress that, pass fully_shard the shards' dimension of the mesh alone, and "
                "compress(replicas=) the other"
            )
    module.set_custom_all_gather(CompressedAllGather(state, name))
    module.set_custom_reduce_scatter(CompressedReduceScatter(state, name, module, overlap))
    if replicas is not None:
        module.set_all_reduce_hook(ReplicaAllReduce(state, name, replicas))
    state.register_layout(name, layout_of(name, module))
    # Loaded parameters differ from the references by more than an update; the next gather must send whole values.
    module.register_load_state_dict_post_hook(lambda *_: state.invalidate_references())  # type: ignore[attr-defined]


@dataclass(frozen=True)
class _Fsdp1Unit:
    """The state that torch passes to the communication hook of one FSDP1 unit, a wrapped module."""

    state: State
    name: str
    group: dist.ProcessGroup | None


def _attach_to_fsdp1(state: State, model: FullyShardedDataParallel) -> None:
    """Register `_reduce_fsdp1_gradient` on every unit of the FSDP1 root module ``model``.

    torch raises an error for hybrid strategies and for a second hook.
    """
    model.register_comm_hook(state, _reduce_fsdp1_gradient)
    state.group = group = model.process_group
    state.num_shards, state.shard_index = dist.get_world_size(group), dist.get_rank(group)
    for path, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel):
            name = clean_tensor_name(path)
            # torch passes the hook one state for all units; replacing it tells the hook which unit calls.
            module._comm_hook_state = _Fsdp1Unit(state, name, module.process_group)
            state.register_layout(name, _unit_layout(name, module))
    state.add_note(
        "FSDP1: torch gathers the parameters, uncompressed, because FSDP1 has no hook for that; fully_shard has one"
    )


def _reduce_fsdp1_gradient(
    unit: _Fsdp1Unit, gradient: torch.Tensor, shard: torch.Tensor | None = None
) -> None:
    """Average a gradient over the ranks; FSDP1's hook, which is for gradients only.

    Args:
        unit: The hook's state.
        gradient: The whole gradient of the unit's flat parameter, which receives the mean (NO_SHARD); with all other
            strategies the padded gradient.
        shard: This rank's shard of the mean, which the hook writes. None with NO_SHARD.
    """
    reduction = GradientReduction(unit.state, unit.name, gradient)
    if shard is None:
        work = all_reduce(gradient, "avg", group=unit.group, **reduction.options)
    else:
        work = reduce_scatter(shard, gradient, "avg", group=unit.group, **reduction.options)
    assert work is not None  # async_op is True
    work.wait()
    reduction.finish()
    ranks = dist.get_world_size(unit.group)
    passes = 2 if shard is None else 1
    reduction.traffic.add(work, passes * gradient.nbytes * (ranks - 1) // ranks)


def _unit_layout(name: str, module: FullyShardedDataParallel) -> ConcatenatedLayout | None:
    """Return the layout of a unit's gradient; None if it has no parameters, or torch pads between them."""
    handle = module._handle
    if handle is None or any(handle.flat_param._is_padding_mask):
        return None
    names = [f"{name}.{path}" if name else path for path in handle.flat_param._fqns]
    return concatenated_layout(list(zip(names, handle.flat_param._shapes, strict=True)))
