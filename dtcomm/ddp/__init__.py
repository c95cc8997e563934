"""Compressed gradients for DistributedDataParallel.

    state = dtcomm.ddp.compress(model, "int8")

or, for a framework that registers the hook itself,

    model.register_comm_hook(dtcomm.ddp.State("int8"), dtcomm.ddp.hook)

Each bucket becomes one message in which every parameter keeps blocks, codec and error feedback of its own.
The gradients are averaged in place, as DDP itself does. `LocalSGD` averages weights every so many steps instead.

An error in a collective is raised from ``backward()`` with its own type (`PeerLost`, `CollectiveTimeout`,
...), kept as ``state.error``, and raised again by the next forward or backward; a future's exception DDP
would print as "Unable to cast". After it, the model needs a new DDP around it.
"""

# Annotations stay objects in this file: register_comm_hook compares the hook's with the types themselves.
from typing import Any

import torch
from torch._C._distributed_c10d import GradBucket  # dist.GradBucket, where type checkers find it
from torch.nn.parallel import DistributedDataParallel

from dtcomm.compress.autotune_model import NAME as AUTO
from dtcomm.compress.guard import Guard
from dtcomm.compress.policy import Policy, as_policy
from dtcomm.compress.spec import Scheme
from dtcomm.ddp import integrations
from dtcomm.ddp.integrations import Attached
from dtcomm.ddp.state import State
from dtcomm.local_sgd import LocalSGD

__all__ = ["Attached", "Guard", "LocalSGD", "State", "attach", "compress", "hook"]


def hook(state: State, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The DDP communication hook; register it with a `State` of its own for each model."""
    return state.reduce(bucket)


def compress(model: DistributedDataParallel, spec: str | Scheme | Policy = "int8", **options: Any) -> State:
    """Compress the gradients of a DDP model; ``options`` are those of `State` but group and parameters.

    TypeError where ``model`` is no DistributedDataParallel; RuntimeError where it has a hook already.
    """
    if not isinstance(model, DistributedDataParallel):
        raise TypeError(f"model: want a DistributedDataParallel, got {type(model).__name__}")
    if spec != AUTO:
        spec = as_policy(spec).of(model.module)
    state = State(spec, group=model.process_group, parameters=model.module.named_parameters(), **options)

    def refuse_after_failure(module: torch.nn.Module, args: Any) -> None:
        if state.error is not None:
            raise state.error

    state._reducer.wait_before_ddp = model.find_unused_parameters
    state._reducer.may_leave_unused = model.find_unused_parameters or model.static_graph
    model.register_comm_hook(state, hook)
    model.register_forward_pre_hook(refuse_after_failure)
    state.timeline.watch(model)
    return state


def attach(owner: Any, spec: str | Scheme | Policy = "int8", **options: Any) -> Attached:
    """Compress where a framework wraps the model in DDP itself, later: a Hugging Face ``Trainer`` or ``Accelerator``,
    a Lightning ``Trainer``.

        attached = dtcomm.ddp.attach(trainer, "int8")
        trainer.train()  # Lightning: trainer.fit(module)
        print(attached.state.report())

    TypeError where ``owner`` is none of these; ValueError where it has another communication hook.
    """
    return integrations.attach(owner, lambda model: compress(model, spec, **options))
