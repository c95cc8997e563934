"""Compressed all-gather of parameters and reduce-scatter of gradients for FSDP.

    for block in model.layers:
        fully_shard(block)
    fully_shard(model)
    state = dtcomm.fsdp.compress(model, gradients="int8", parameters="fp8_e4m3")

Works on FSDP2 (`fully_shard`), every wrapped module by itself, and on FSDP1 for gradients, whose hook is the only one
that it has. The idea is ZeRO++'s (Wang et al. 2023, arXiv:2306.10209): both collectives move a quarter of the bytes.
Every rank, the owner included, computes with the decoded parameters, so all compute the same; the optimiser steps on
the owner's exact ones.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, FSDPMeshInfo

from dtcomm.codecs import Codec
from dtcomm.compress.guard import Guard
from dtcomm.fsdp import fsdp1, spec
from dtcomm.fsdp.comm import Average, Gather, Scatter
from dtcomm.fsdp.flat_layout import flat_of
from dtcomm.fsdp.report import Report, Traffic
from dtcomm.fsdp.sharded_optimizer import ShardedOptimizer
from dtcomm.fsdp.spec import PRESETS
from dtcomm.fsdp.state import State

__all__ = ["PRESETS", "Report", "ShardedOptimizer", "State", "Traffic", "compress"]

GRADIENTS, PARAMETERS = "int8", "none"
_GUARD = Guard()


def compress(
    model: torch.nn.Module,
    gradients: str | Codec | None = None,
    parameters: str | Codec | None = None,
    *,
    preset: str | None = None,
    feedback: bool = False,
    residual: str = "fp32",
    replicas: DeviceMesh | dist.ProcessGroup | None = None,
    guard: Guard | None = _GUARD,
    sample_every: int = 50,
    seed: int = 0,
) -> State:
    """Compress the collectives of every FSDP module in `model`.

    gradients, parameters: the reduce-scatter's and the all-gather's recipes (`dtcomm.fsdp.spec`): a codec, or two
    for two levels (``"int8/int4"``), after ``ef:`` or ``loco:`` for gradients and ``delta:`` for parameters. By default
    int8 and none. preset: ``"zero++"``, ``"loco"`` or ``"sdp4bit"`` give both; what is passed besides goes first.
    feedback: as ``ef:``, keep what each rank's gradient encodings lose and add it to the next ones; that is a fp32 copy
    of every module's whole gradient on every rank, so it is off by default; ``loco:`` takes a quarter of it.
    residual: the form of ``ef:``'s residuals between steps: fp32, bf16 or int8 (`dtcomm.compress.residuals`).
    replicas: copies of this model, cut over one dimension only, whose gradients are averaged as well, with the codec
    of `gradients`: the dimension of the mesh, or its group. That is HSDP with both of its collectives compressed; of
    torch's own (a mesh of two dimensions in `fully_shard`) the all-reduce between replicas stays torch's, since its
    hook runs after it, and the report says so.
    guard, sample_every: every so many training steps what encodings lose is measured, for the report and for the
    guard, which raises a module's precision or stops compressing where it does harm (`dtcomm.compress.guard`; None: it
    does not); `State.observe` tells it the loss.

    ValueError where `replicas` come with a mesh that has them already. TypeError where `model` has no FSDP module, or
    FSDP1 is asked to compress parameters, which it has no hook for.
    """
    chosen = None if preset is None else spec.preset(preset)
    gradients = gradients if gradients is not None else chosen.gradients if chosen else GRADIENTS
    parameters = parameters if parameters is not None else chosen.parameters if chosen else PARAMETERS
    for_gradients = spec.parse(gradients, spec.FEEDBACKS, "gradients")
    if feedback and not for_gradients.word:
        for_gradients = spec.Recipe(for_gradients.inside, for_gradients.between, "ef")
    state = State(
        for_gradients,
        spec.parse(parameters, ("", "delta"), "parameters"),
        seed,
        residual,
        guard,
        sample_every,
    )
    state.timeline.watch(model)
    if isinstance(model, FullyShardedDataParallel):
        if str(state.parameters) != "none":
            raise TypeError(
                f"parameters: FSDP1 has a hook for gradients only, got {str(state.parameters)!r}; "
                "valid: 'none', or FSDP2's fully_shard"
            )
        if replicas is not None:
            raise ValueError(
                "replicas: FSDP1 has strategies of its own for them; valid: None, or fully_shard"
            )
        fsdp1.attach(state, model)
        _begin_with(model, state)
        return state
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, FSDPModule)]
    if not found:
        raise TypeError(f"model: {type(model).__name__} has no module that fully_shard was applied to")
    for name, module in found:
        _attach(state, name, module, replicas.get_group() if isinstance(replicas, DeviceMesh) else replicas)
    _begin_with(model, state)
    return state


def _begin_with(model: torch.nn.Module, state: State) -> None:
    """A training step begins with the model's forward, before FSDP's own hook, which gathers."""
    model.register_forward_pre_hook(
        lambda *_: state.begin() if torch.is_grad_enabled() else None, prepend=True
    )


def _groups_of(sharding: Any) -> list[Any]:
    """A module's groups of parameters: up to torch 2.11 there is one at the most."""
    if hasattr(sharding, "_fsdp_param_groups"):
        return list(sharding._fsdp_param_groups)
    return [] if sharding._fsdp_param_group is None else [sharding._fsdp_param_group]


def _attach(state: State, name: str, module: FSDPModule, replicas: dist.ProcessGroup | None) -> None:
    groups = _groups_of(module._get_fsdp_state())
    if len(groups) > 1:
        state.note(
            f"{name or '(root)'}: uncompressed; its parameters are in {len(groups)} groups, and torch takes no "
            "collectives for those"
        )
        return
    for group in groups:
        mesh = group.mesh_info
        if isinstance(mesh, FSDPMeshInfo):
            state.shards, state.shard = mesh.shard_mesh_size, mesh.shard_mesh_rank
            state.group = mesh.shard_process_group
        if isinstance(mesh, DDPMeshInfo) and mesh.replicate_mesh_size > 1:
            if replicas is not None:
                raise ValueError(
                    "replicas: the mesh of fully_shard has a dimension of replicas already, whose all-reduce is "
                    "torch's; give fully_shard the dimension of shards alone"
                )
            state.note(
                f"{name or '(root)'}: the all-reduce of gradients between {mesh.replicate_mesh_size} replicas is "
                "torch's, uncompressed: its hook runs after it; give fully_shard the shards' dimension of the mesh "
                "alone, and compress(replicas=) the other"
            )
    module.set_custom_all_gather(Gather(state, name))
    module.set_custom_reduce_scatter(Scatter(state, name, module))
    if replicas is not None:
        module.set_all_reduce_hook(Average(state, name, replicas))
    state.know(name, flat_of(name, module))
    # Whoever writes parameters from outside makes them differ from what the peers hold by more than a difference says.
    module.register_load_state_dict_post_hook(lambda *_: state.overwritten())  # type: ignore[attr-defined]
