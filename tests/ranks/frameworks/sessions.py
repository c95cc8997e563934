"""A user's training script for each framework: two ranks, int4 with error feedback, checkpoints, resume.

Each returns the losses of its steps, by step. `KILLED` makes rank 1 tell the test that it is past the checkpoint and
wait to be killed.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dtcomm import ddp, local_sgd
from dtcomm.launch.ranks import send_to_parent

SPEC = "int4"
EPOCHS, STEPS_PER_EPOCH, SAVED_AT = 3, 4, 4
WHOLE, KILLED, RESUMED = "whole", "killed", "resumed"

Losses = dict[int, float]
Step = Callable[[int], None]  # gets the number of the step


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))


def data() -> list[dict[str, torch.Tensor]]:
    inputs = torch.randn(8 * STEPS_PER_EPOCH, 32, generator=torch.Generator().manual_seed(1))
    return [{"x": x, "labels": x.flip(0)} for x in inputs]


def make_loader() -> Any:
    return torch.utils.data.DataLoader(data(), batch_size=4)  # type: ignore[arg-type]


def loss_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return (model(batch["x"]) - batch["labels"]).square().mean()


def set_environment(rank: int, n: int) -> None:
    """Set the variables that torchrun sets."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(n),
        "LOCAL_WORLD_SIZE": str(n),
    }
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")


def check_training(attached: Any, net: nn.Module, losses: Losses, mode: str) -> None:
    """Check that gradients travelled compressed, that the loss fell and that all ranks hold the same parameters."""
    report = attached.state.report()
    assert report.messages > 0
    if mode == WHOLE:
        assert report.steps == len(losses) == EPOCHS * STEPS_PER_EPOCH
        assert losses[report.steps] < 0.9 * losses[1]
    flat = torch.cat([p.detach().flatten() for p in net.parameters()])
    all_ranks = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(all_ranks, flat)
    assert all(torch.equal(flat, other) for other in all_ranks)


def forget_accelerate() -> None:
    """Reset what Accelerate keeps in a process: the test's processes run several sessions."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def maybe_die(rank: int, mode: str, step: int) -> None:
    """Let the test kill rank 1 one step after the checkpoint."""
    if mode == KILLED and rank == 1 and step == SAVED_AT + 1:
        send_to_parent("past the checkpoint")
        time.sleep(60)


class Warnings(logging.Handler):
    """The warnings of dtcomm."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        logging.getLogger("dtcomm").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def train_with_accelerate(
    accelerator: Any, folder: Path, mode: str, ends: Step = lambda step: None
) -> tuple[nn.Module, Losses]:
    """Train, save a checkpoint or resume from it; ``ends`` is called after each step."""
    model = make_net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(model, optimizer, make_loader())
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
            ends(step)
    return model, losses


def accelerate_session(rank: int, n: int, folder: Path, mode: str) -> tuple[Losses, list[str]]:
    set_environment(rank, n)
    from accelerate import Accelerator

    forget_accelerate()
    warnings = Warnings()
    accelerator = Accelerator(cpu=True)
    attached = ddp.attach(accelerator, SPEC, feedback=True)
    model, losses = train_with_accelerate(accelerator, folder, mode, partial(maybe_die, rank, mode))
    check_training(attached, model, losses, mode)
    return losses, warnings.lines


class Regression(nn.Module):
    """A model with the outputs that the Trainer expects: a loss and logits."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_net()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": loss_of(self.net, {"x": x, "labels": labels}), "logits": x}


def make_trainer(folder: Path, losses: Losses, ends: Step = lambda step: None, **options: Any) -> Any:
    """Return a Trainer that records its losses and calls ``ends`` at the end of each step."""
    from transformers import Trainer, TrainingArguments

    class RecordingTrainer(Trainer):
        def training_step(self, *args: Any, **options: Any) -> torch.Tensor:
            loss = super().training_step(*args, **options)
            losses[self.state.global_step + 1] = float(loss)
            ends(self.state.global_step + 1)
            return loss

    options |= {"use_cpu": True, "ddp_backend": "gloo", "report_to": [], "logging_strategy": "no"}
    options |= {"num_train_epochs": EPOCHS, "per_device_train_batch_size": 4, "learning_rate": 0.01}
    options |= {"save_strategy": "steps", "save_steps": SAVED_AT, "disable_tqdm": True}
    arguments = TrainingArguments(output_dir=str(folder), **options)
    return RecordingTrainer(model=Regression(), args=arguments, train_dataset=data())  # type: ignore[arg-type]


def train_with_trainer(trainer: Any, folder: Path, mode: str) -> None:
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-4") if mode == RESUMED else None)


def trainer_session(rank: int, n: int, folder: Path, mode: str) -> tuple[Losses, list[str]]:
    set_environment(rank, n)
    forget_accelerate()
    warnings = Warnings()
    losses: Losses = {}
    limit = 2 if mode == KILLED else None
    trainer = make_trainer(folder, losses, partial(maybe_die, rank, mode), save_total_limit=limit)
    attached = ddp.attach(trainer, SPEC, feedback=True)
    train_with_trainer(trainer, folder, mode)
    check_training(attached, trainer.model, losses, mode)
    return losses, warnings.lines


def local_sgd_session(
    rank: int, n: int, folder: Path, mode: str
) -> tuple[Losses, torch.Tensor, int, list[str]]:
    """Train with LocalSGD; return the losses, the final weights, the number of averages and the warnings."""
    set_environment(rank, n)
    forget_accelerate()
    warnings = Warnings()
    losses: Losses = {}
    trainer = make_trainer(folder, losses)
    options: dict[str, Any] = {"fragments": 2, "delay": 1, "mixing": 0.5, "exclude": "*.bias"}
    options["outer"] = lambda weights: torch.optim.SGD(weights, lr=0.7, momentum=0.9, nesterov=True)
    attached = local_sgd.attach(
        trainer, lambda model: local_sgd.LocalSGD(model, 3, SPEC, feedback=True, **options)
    )
    train_with_trainer(trainer, folder, mode)
    local = attached.state.local
    assert local.steps == EPOCHS * STEPS_PER_EPOCH
    weights = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
    return losses, weights, local.syncs, warnings.lines


def make_lightning_trainer(rank: int, n: int, strategy: Any, folder: Path) -> Any:
    """Return a trainer whose ranks are the test's and which saves a checkpoint after each epoch."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint
    from lightning.pytorch.plugins.environments import LightningEnvironment

    class ExistingRanks(LightningEnvironment):
        creates_processes_externally = True

        def world_size(self) -> int:
            return n

        def global_rank(self) -> int:
            return rank

        def local_rank(self) -> int:
            return rank

    strategy.cluster_environment = ExistingRanks()
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    options: dict[str, Any] = {"accelerator": "cpu", "devices": n, "strategy": strategy, **quiet}
    saving = ModelCheckpoint(dirpath=folder, filename="{epoch}", save_top_k=-1, save_last=True)
    return lightning.Trainer(max_epochs=EPOCHS, callbacks=[saving], **options)


def make_lightning_module(
    losses: Losses, ends: Step = lambda step: None, configure: Callable[[Any], None] = lambda module: None
) -> Any:
    """Return a module that records its losses and calls ``ends`` at the end of each step.

    ``configure`` does what Lightning wants done when the device mesh exists.
    """
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_net()

        def configure_model(self) -> None:
            configure(self)

        def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
            loss = loss_of(self.net, batch)
            losses[self.global_step + 1] = float(loss.detach())
            ends(self.global_step + 1)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    return Module()


def train_with_lightning(trainer: Any, module: Any, folder: Path, mode: str) -> None:
    trainer.fit(module, make_loader(), ckpt_path=folder / "epoch=0.ckpt" if mode == RESUMED else None)


def lightning_session(rank: int, n: int, folder: Path, mode: str) -> tuple[Losses, list[str]]:
    set_environment(rank, n)
    from lightning.pytorch.strategies import DDPStrategy

    warnings = Warnings()
    losses: Losses = {}
    module = make_lightning_module(losses, partial(maybe_die, rank, mode))
    trainer = make_lightning_trainer(rank, n, DDPStrategy(), folder)
    attached = ddp.attach(trainer, SPEC, feedback=True)
    train_with_lightning(trainer, module, folder, mode)
    check_training(attached, module, losses, mode)
    return losses, warnings.lines


def logged_by_trainer(rank: int, n: int, folder: Path) -> list[dict[str, float]]:
    """Return what a Trainer logs with ``log=True``."""
    from transformers.trainer_utils import IntervalStrategy

    set_environment(rank, n)
    forget_accelerate()
    trainer = make_trainer(folder, {})
    trainer.args.logging_strategy, trainer.args.logging_steps = IntervalStrategy.STEPS, SAVED_AT
    ddp.attach(trainer, SPEC, log=True)
    trainer.train()
    return [values for values in trainer.state.log_history if "loss" in values]
