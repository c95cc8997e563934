"""A training script for torchrun, whose starts have different numbers of ranks: DDP and FSDP2 with compression."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh

from dtcomm import ddp, fsdp
from dtcomm.compress.checkpoint import Checkpointed, restore
from tests.ranks.fsdp.models import WIDTH, sharded
from tests.unit.ddp.models import SMALL_BUCKETS, batch, wrapped

STEPS = 4  # of each start


def total_residuals(state: Any) -> float:
    """Return the sum over ranks and parameters of projections of the residuals, which tell them apart."""
    total = torch.zeros(1, dtype=torch.float64)
    for name, residual in sorted(state.state_dict()["residuals"].items()):
        weights = torch.randn(residual.numel(), generator=torch.Generator().manual_seed(len(name)))
        total += (weights.double() * residual.double().flatten()).sum()
    dist.all_reduce(total)
    return float(total)


def train_ddp(path: Path, resumes: bool) -> dict[str, float]:
    model = wrapped(**SMALL_BUCKETS)
    state = ddp.compress(model, "int4", feedback=True)
    if resumes:
        saved = {"model": model.module.state_dict()}
        dcp.load(saved, checkpoint_id=path)
        model.module.load_state_dict(saved["model"])
        restore(state, path, "compression")
    loaded, began = total_residuals(state), state.steps
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(began, began + STEPS):
        optimizer.zero_grad()
        loss = (model(batch(dist.get_rank(), step)) - 1).square().mean()
        loss.backward()
        optimizer.step()
    dcp.save({"model": model.module.state_dict(), "compression": Checkpointed(state)}, checkpoint_id=path)
    mean = torch.tensor([float(loss.detach())])
    dist.all_reduce(mean)
    return {
        "began": began,
        "loaded": loaded,
        "saved": total_residuals(state),
        "loss": float(mean) / dist.get_world_size(),
    }


def train_fsdp(path: Path, resumes: bool) -> dict[str, float]:
    model = sharded(init_device_mesh("cpu", (dist.get_world_size(),)))
    state = fsdp.compress(model, "ef:int4")
    if resumes:
        saved = {"model": model.state_dict()}
        dcp.load(saved, checkpoint_id=path)
        model.load_state_dict(saved["model"])
        restore(state, path, "compression")
    loaded, began = total_residuals(state), state.report().earlier_steps
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(began, began + STEPS):
        optimizer.zero_grad()
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        loss = (model(x) - 1).square().mean()
        loss.backward()
        optimizer.step()
    dcp.save({"model": model.state_dict(), "compression": Checkpointed(state)}, checkpoint_id=path)
    mean = torch.tensor([float(loss.detach())])
    dist.all_reduce(mean)
    return {
        "began": began,
        "loaded": loaded,
        "saved": total_residuals(state),
        "loss": float(mean) / dist.get_world_size(),
    }


def main(folder: str, start: int) -> None:
    """Train both models from the checkpoints in ``folder``; rank 0 writes ``start N.json``."""
    dist.init_process_group("gloo")
    results = {
        "ranks": dist.get_world_size(),
        "ddp": train_ddp(Path(folder) / "ddp", start > 0),
        "fsdp": train_fsdp(Path(folder) / "fsdp", start > 0),
    }
    if os.environ["RANK"] == "0":
        (Path(folder) / f"start {start}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()
