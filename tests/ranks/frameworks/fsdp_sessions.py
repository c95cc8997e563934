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
    EPOCHS,
    RESUMED,
    SAVED_AT,
    STEPS_PER_EPOCH,
    Losses,
    Regression,
    data,
    forget_accelerate,
    lightning_trainer,
    loss_of,
    make_net,
    set_environment,
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


def accelerate_session(rank: int, n: int, folder: Path, gradients: str, mode: str) -> Losses:
    set_environment(rank, n)
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    with let_accelerate_shard_on_cpus():
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            cpu_ram_efficient_loading=False,
            auto_wrap_policy="size_based_wrap",
            min_num_params=1024,
            state_dict_type="SHARDED_STATE_DICT",
        )
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
        check = attach(accelerator, gradients)
        model = make_net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        loader = torch.utils.data.DataLoader(data(), batch_size=4)  # type: ignore[arg-type]
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        step = 0
        if mode == RESUMED:
            accelerator.load_state(str(folder / "step-4"))
            step = SAVED_AT
        losses = {}
        while step < EPOCHS * STEPS_PER_EPOCH:
            for batch in loader:
                loss = loss_of(model, batch)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                losses[step] = float(loss.detach())
                if step == SAVED_AT and mode != RESUMED:
                    accelerator.save_state(str(folder / "step-4"))
        check()
        forget_accelerate()
    return losses


def trainer_session(rank: int, n: int, folder: Path, gradients: str, mode: str) -> Losses:
    set_environment(rank, n)
    from transformers import Trainer, TrainingArguments

    losses: Losses = {}

    class RecordingTrainer(Trainer):
        def training_step(self, *args: Any, **options: Any) -> torch.Tensor:
            loss = super().training_step(*args, **options)
            losses[self.state.global_step + 1] = float(loss)
            return loss

    with let_accelerate_shard_on_cpus():
        arguments = TrainingArguments(
            output_dir=str(folder),
            use_cpu=True,
            num_train_epochs=EPOCHS,
            per_device_train_batch_size=4,
            learning_rate=0.01,
            report_to=[],
            save_strategy="steps",
            save_steps=SAVED_AT,
            disable_tqdm=True,
            logging_strategy="no",
            ddp_backend="gloo",
            fsdp=True,
            fsdp_config={
                "version": 2,
                "auto_wrap_policy": "SIZE_BASED_WRAP",
                "min_num_params": 1024,
                "state_dict_type": "SHARDED_STATE_DICT",
            },
        )
        trainer = RecordingTrainer(model=Regression(), args=arguments, train_dataset=data())  # type: ignore[arg-type]
        check = attach(trainer, gradients)
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-4") if mode == RESUMED else None)
        check()
        forget_accelerate()
    return losses


def lightning_session(rank: int, n: int, folder: Path, gradients: str, mode: str) -> Losses:
    set_environment(rank, n)
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.strategies import ModelParallelStrategy

    losses: Losses = {}

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_net()

        def configure_model(self) -> None:
            mesh = self.device_mesh["data_parallel"]
            for layer in self.net:
                if isinstance(layer, torch.nn.Linear):
                    fully_shard(layer, mesh=mesh)
            fully_shard(self.net, mesh=mesh)

        def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
            loss = loss_of(self.net, batch)
            losses[self.global_step + 1] = float(loss.detach())
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    strategy = ModelParallelStrategy(data_parallel_size=n, tensor_parallel_size=1)
    checkpoints = ModelCheckpoint(dirpath=folder, filename="{epoch}", save_top_k=-1)
    trainer = lightning_trainer(rank, n, strategy, max_epochs=EPOCHS, callbacks=[checkpoints])
    check = attach(trainer, gradients)
    loader = torch.utils.data.DataLoader(data(), batch_size=4)  # type: ignore[arg-type]
    trainer.fit(Module(), loader, ckpt_path=folder / "epoch=0.ckpt" if mode == RESUMED else None)
    check()
    dist.barrier()
    return losses
