"""What users pass as a model: which function takes it, and whether it may be trained in torch's join context.

In that context some ranks run out of inputs before others.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from dtcomm import torch_compat

_ADVICE = (
    "let every rank take the same number of steps: stop when the first rank is out of inputs, or go on with batches "
    "whose loss is multiplied by 0"
)


#: What may be given by mistake → what it is, and the function that takes it.
INSTEAD = {
    "framework": "a framework wraps the model: call dtcomm.ddp.attach, or dtcomm.fsdp.attach if it uses FSDP",
    "stage": "it is a stage of a pipeline: call dtcomm.pipeline.compress",
    "optimizer": "it is an optimizer: dtcomm.fsdp.ShardedOptimizer shards one and compresses what it communicates",
    "tensor": 'it is a tensor: call dtcomm.all_reduce(tensor, codec="int8"), or dtcomm.encode',
    "compiled": "compress it before torch.compile",
    "fsdp": "it is sharded by FSDP: call dtcomm.fsdp.compress",
    "ddp": "it is replicated by DDP: call dtcomm.ddp.compress",
    "module": "wrap it in DistributedDataParallel and call dtcomm.ddp.compress, or apply fully_shard and call "
    "dtcomm.fsdp.compress",
    "": "",
}


def kind_of(given: object) -> str:
    """Return the key of `INSTEAD` for what was given as a model, or as what has one."""
    if framework_of(given):
        return "framework"
    if type(given).__module__.startswith("torch.distributed.pipelining"):
        return "stage"
    if isinstance(given, torch.optim.Optimizer):
        return "optimizer"
    if isinstance(given, torch.Tensor):
        return "tensor"
    if not isinstance(given, nn.Module):
        return ""
    inner = torch_compat.original_module(given)
    if isinstance(inner, nn.Module) and inner is not given and kind_of(inner) in ("ddp", "fsdp"):
        return "compiled"
    if any(isinstance(module, FSDPModule | FullyShardedDataParallel) for module in given.modules()):
        return "fsdp"
    return "ddp" if isinstance(given, DistributedDataParallel) else "module"


def framework_of(owner: object) -> str:
    """Return the framework whose object this is: "accelerate", "transformers" or "lightning"; else empty."""
    if hasattr(owner, "register_save_state_pre_hook"):
        return "accelerate"
    if hasattr(owner, "accelerator") and hasattr(owner, "callback_handler"):
        return "transformers"
    return "lightning" if hasattr(getattr(owner, "strategy", None), "setup") else ""


def wrong_type(argument: str, expected: str, given: object) -> TypeError:
    """Return the error about an argument of the wrong type; it names the function that takes what was given.

    A list is judged by its first element.
    """
    first = next(iter(given), given) if isinstance(given, list | tuple) else given
    instead = INSTEAD[kind_of(first)]
    return TypeError(
        f"{argument}: expected {expected}, got {type(first).__name__}" + (f"; {instead}" if instead else "")
    )


class _Refusal:
    """The method ``join_hook`` of a model that cannot join; a class, so that the model can be pickled."""

    def __init__(self, model: str, integration: str) -> None:
        self._model, self._integration = model, integration

    def __call__(self, **options: Any) -> NoReturn:
        raise ValueError(
            f"Join: {self._model} is under {self._integration}, in which every rank takes part in every forward pass, "
            f"so none may join early; {_ADVICE}"
        )


def refuse_join(model: nn.Module, integration: str) -> None:
    """Let ``torch.distributed.algorithms.join.Join`` refuse a model whose ranks communicate in every forward pass.

    torch would refuse it with an AttributeError. ``integration`` says what communicates, for the message.
    """
    model.__dict__["join_hook"] = _Refusal(type(model).__name__, integration)


def require_no_sync_batch_norm(model: Any) -> None:
    """Refuse a forward pass in DDP's ``join`` of a model that averages statistics over the ranks.

    ValueError if ``join`` is active, and a layer would wait for ranks that have joined.
    """
    config = torch_compat.join_config(model)
    if config is None or not config.enable or config.throw_on_early_termination:
        return
    for name, module in model.named_modules():
        if torch_compat.is_batch_norm(module) and hasattr(module, "process_group"):
            raise ValueError(
                f"join: {name.removeprefix('module.')} is a {type(module).__name__}, which waits for all ranks in "
                f"every forward pass; pass throw_on_early_termination=True, or {_ADVICE}"
            )
