"""A user's training script for FSDP2 in each framework, on two CPU ranks.

Accelerate, and with it the Trainer, ignores its FSDP options on CPUs: `AcceleratorState` sets the type FSDP for
accelerators alone. `let_accelerate_shard_on_cpus` sets it here; what follows is Accelerate's own code.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

from dtcomm import fsdp
from tests.ranks.frameworks.sessions import (
    Losses,
    forget_accelerate,
    make_lightning_module,
    make_lightning_trainer,
    make_trainer,
    set_environment,
    train_with_accelerate,
    train_with_lightning,
    train_with_trainer,
)

PLAIN = "plain"  # without dtcomm


def let_accelerate_shard_on_cpus() -> Any:
    """Return a context in which Accelerate accepts an FSDP plugin on CPUs."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    original = AcceleratorState.__init__

    def init(self: Any, *args: Any, fsdp_plugin: Any = None, **options: Any) -> None:
        original(self, *args, fsdp_plugin=fsdp_plugin, **options)
        if fsdp_plugin is not None:
            self.distributed_type = DistributedType.FSDP
            self.fsdp_plugin = fsdp_plugin
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    forget_accelerate()
    return mock.patch.object(AcceleratorState, "__init__", init)


def attach(owner: Any, gradients: str) -> Callable[[], None]:
    """Attach dtcomm unless the session is to run without; return what checks the report."""
    if gradients == PLAIN:
        return lambda: None
    attached = fsdp.attach(owner, gradients, feedback=gradients != "none")

    def check() -> None:
        traffic = [kinds["gradients"] for kinds in attached.state.report().modules.values()]
        assert traffic and all(kind.calls > 0 for kind in traffic)
        assert {kind.codec.removeprefix("ef:") for kind in traffic} == {gradients}

    return check


SHARDING: dict[str, Any] = {"min_num_params": 1024, "state_dict_type": "SHARDED_STATE_DICT"}


def accelerate_session(rank: int, n: int, folder: Path, gradients: str, mode: str) -> Losses:
    set_environment(rank, n)
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    with let_accelerate_shard_on_cpus():
        options = {**SHARDING, "auto_wrap_policy": "size_based_wrap", "cpu_ram_efficient_loading": False}
        plugin = FullyShardedDataParallelPlugin(fsdp_version=2, **options)
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        check = attach(accelerator, gradients)
        _, losses = train_with_accelerate(accelerator, folder, mode)
        check()
        forget_accelerate()
    return losses


def trainer_session(rank: int, n: int, folder: Path, gradients: str, mode: str) -> Losses:
    set_environment(rank, n)
    losses: Losses = {}
    with let_accelerate_shard_on_cpus():
        sharding = {**SHARDING, "version": 2, "auto_wrap_policy": "SIZE_BASED_WRAP"}
        trainer = make_trainer(folder, losses, fsdp=True, fsdp_config=sharding)
        check = attach(trainer, gradients)
        train_with_trainer(trainer, folder, mode)
        check()
        forget_accelerate()
    return losses


def logged_by_trainer(rank: int, n: int, folder: Path) -> list[dict[str, float]]:
    """Return what a Trainer logs with ``log=True`` where it shards the model."""
    set_environment(rank, n)
    with let_accelerate_shard_on_cpus():
        sharding = {**SHARDING, "version": 2, "auto_wrap_policy": "SIZE_BASED_WRAP"}
        trainer = make_trainer(folder, {}, fsdp=True, fsdp_config=sharding)
        trainer.args.logging_strategy, trainer.args.logging_steps = (
            trainer.args.save_strategy,
            trainer.args.save_steps,
        )
        fsdp.attach(trainer, "int8", "int8", sample_every=1, log=True)
        trainer.train()
        forget_accelerate()
    return [values for values in trainer.state.log_history if "loss" in values]


def shard(module: Any) -> None:
    """Shard a Lightning module's net."""
    mesh = module.device_mesh["data_parallel"]
    for layer in module.net:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(module.net, mesh=mesh)


def lightning_session(rank: int, n: int, folder: Path, gradients: str, mode: str) -> Losses:
    set_environment(rank, n)
    from lightning.pytorch.strategies import ModelParallelStrategy

    losses: Losses = {}
    strategy = ModelParallelStrategy(data_parallel_size=n, tensor_parallel_size=1)
    trainer = make_lightning_trainer(rank, n, strategy, folder)
    check = attach(trainer, gradients)
    train_with_lightning(trainer, make_lightning_module(losses, configure=shard), folder, mode)
    check()
    dist.barrier()
    return losses
