"""Lightning, Accelerate and the Trainer of transformers, as installed, with the hook."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dtcomm import ddp
from dtcomm.launch.ranks import run_ranks
from tests.ranks.frameworks.sessions import forget_accelerate, lightning_trainer, set_environment


def requires(package: str) -> Any:
    installed = importlib.util.find_spec(package) is not None
    return pytest.mark.skipif(not installed, reason=f"pip install {package}")


def make_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))


def data() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(64, 16, generator=generator)
    return [{"x": x, "labels": x[:1] * 2} for x in inputs]


def loss_of(model: nn.Module) -> float:
    """Return the loss of the unwrapped net on all data."""
    inputs, labels = (torch.stack([row[name] for row in data()]) for name in ("x", "labels"))
    with torch.no_grad():
        return float((model(inputs) - labels).square().mean())


def require_alike(model: nn.Module) -> None:
    """Check that all ranks hold the same parameters."""
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    all_ranks = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(all_ranks, flat)
    assert all(torch.equal(flat, other) for other in all_ranks)


def train_with_accelerate(rank: int, n: int) -> None:
    set_environment(rank, n)
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs

    forget_accelerate()
    accelerator = Accelerator(
        cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)]
    )
    attached = ddp.attach(accelerator, "int8")
    with pytest.raises(RuntimeError, match="not wrapped in DDP yet"):
        attached.state  # noqa: B018
    model = make_net()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
    loader = torch.utils.data.DataLoader(data(), batch_size=8)
    model, optimiser, loader = accelerator.prepare(model, optimiser, loader)
    assert model.gradient_as_bucket_view
    losses = []
    for _ in range(6):
        for batch in loader:
            optimiser.zero_grad()
            loss = (model(batch["x"]) - batch["labels"]).square().mean()
            accelerator.backward(loss)
            optimiser.step()
            losses.append(float(loss))
    assert losses[-1] < 0.5 * losses[0]
    assert attached.state.report().steps == len(losses)
    require_alike(model)
    with pytest.raises(TypeError, match="got Sequential"):
        ddp.attach(model.module)


@requires("accelerate")
def test_accelerate_trains_with_the_hook() -> None:
    run_ranks(train_with_accelerate, 2)


class Regression(nn.Module):
    """A model with the outputs that the Trainer expects: a loss and logits."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_net()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        out = self.net(x)
        return {"loss": (out - labels).square().mean(), "logits": out}


def train_with_trainer(rank: int, n: int, folder: Path) -> None:
    set_environment(rank, n)
    from transformers import Trainer, TrainingArguments

    forget_accelerate()
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        num_train_epochs=4,
        per_device_train_batch_size=8,
        learning_rate=0.02,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        logging_strategy="no",
        ddp_backend="gloo",
    )
    model = Regression()
    trainer = Trainer(model=model, args=arguments, train_dataset=data())  # type: ignore[arg-type]
    attached = ddp.attach(trainer, "int8")
    before = loss_of(model.net)
    trainer.train()
    after = loss_of(model.net)
    assert after < 0.7 * before
    assert attached.state.report().steps == trainer.state.global_step == 16
    require_alike(model)


@requires("accelerate")
@requires("transformers")
def test_trainer_of_transformers_trains_with_the_hook(tmp_path: Path) -> None:
    run_ranks(train_with_trainer, 2, tmp_path)


def train_with_lightning(rank: int, n: int, folder: Path) -> None:
    set_environment(rank, n)
    import lightning
    from lightning.pytorch.strategies import DDPStrategy

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_net()

        def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
            return (self.net(batch["x"]) - batch["labels"]).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.05)

    trainer = lightning_trainer(
        rank, n, DDPStrategy(), max_epochs=4, enable_checkpointing=False, default_root_dir=folder
    )
    attached = ddp.attach(trainer, "int8")
    module = Module()
    before = loss_of(module.net)
    trainer.fit(module, torch.utils.data.DataLoader(data(), batch_size=8))
    after = loss_of(module.net)
    assert after < 0.7 * before
    assert attached.state.report().steps == trainer.global_step == 16


@requires("lightning")
def test_lightning_trains_with_the_hook(tmp_path: Path) -> None:
    run_ranks(train_with_lightning, 2, tmp_path)
