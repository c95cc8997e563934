"""State of a sharded model: meta devices, full checkpoints, distributed checkpoints on other world sizes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dtcomm import fsdp
from dtcomm.compress.checkpoint import Checkpointed, restore
from dtcomm.launch.ranks import run_ranks
from tests.ranks.fsdp.models import WIDTH, Net, sharded, train

LOSSY: dict[str, Any] = {"gradients": "ef:int4", "parameters": "delta:int8"}
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


def check_full_states(rank: int, ranks: int, path: Path) -> None:
    """The state_dict is the same with and without compression; a model created on the meta device trains."""
    mesh = init_device_mesh("cpu", (ranks,))
    plain, model = sharded(mesh), sharded(mesh)
    fsdp.compress(model, **LOSSY)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    saved = get_model_state_dict(model, options=FULL)
    if rank == 0:
        torch.save(saved, path)
        assert saved.keys() == Net().state_dict().keys()
        assert all(type(value) is torch.Tensor for value in saved.values())
    dist.barrier()
    loaded_state = torch.load(path)
    set_model_state_dict(plain, loaded_state, options=FULL)
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(a.full_tensor(), b.full_tensor())

    with torch.device("meta"):
        meta_model = Net()
    for block in meta_model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(meta_model, mesh=mesh)
    state = fsdp.compress(meta_model, **LOSSY)  # before memory is allocated
    meta_model.to_empty(device="cpu")
    set_model_state_dict(meta_model, loaded_state, options=FULL)
    actual, expected = train(meta_model, rank), train(plain, rank)
    for name, value in expected.items():
        error = torch.linalg.vector_norm(actual[name] - value) / torch.linalg.vector_norm(value)
        assert error < 0.3 if name.startswith("gradient") else error < 0.05, (name, float(error))
    assert set(state.report().modules) == {"", "blocks.0", "blocks.1"}


def test_full_states_and_meta_devices(tmp_path: Path) -> None:
    # Fresh processes: torch caches how a tensor is cut for a rank, and reused processes change ranks between tests.
    run_ranks(check_full_states, 2, tmp_path / "model.pt", fresh=True)


def step(model: Any, rank: int, number: int) -> None:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * number + rank))
    model(x).square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    model.zero_grad()


def save_and_train(rank: int, ranks: int, path: Path) -> dict[str, Any]:
    """Save, and continue training."""
    model = sharded(init_device_mesh("cpu", (ranks,)))
    state = fsdp.compress(model, **LOSSY)
    for number in range(2):
        step(model, rank, number)
    weights = {name: parameter.full_tensor().detach() for name, parameter in model.named_parameters()}
    checkpoint.save({"model": weights, "compression": Checkpointed(state)}, checkpoint_id=path)
    residuals: dict[str, torch.Tensor] = state.state_dict()["residuals"]
    step(model, rank, 2)
    return {"residuals": residuals} | {name: p.full_tensor().detach() for name, p in model.named_parameters()}


def load_and_train(rank: int, ranks: int, path: Path, model_first: bool = False) -> dict[str, Any]:
    torch.manual_seed(rank + 1)
    model = sharded(init_device_mesh("cpu", (ranks,)))
    state = fsdp.compress(model, **LOSSY)
    weights = {name: parameter.full_tensor().detach() for name, parameter in model.named_parameters()}
    checkpoint.load({"model": weights}, checkpoint_id=path)
    # In either order: loading the model afterwards keeps the loaded references.
    if not model_first:
        restore(state, path, "compression")
    for name, parameter in model.named_parameters():
        shard = parameter.to_local()  # type: ignore[attr-defined]
        shard.detach().copy_(weights[name].chunk(ranks)[rank] if shard.numel() else shard)
    model.load_state_dict(model.state_dict())  # the same values, but the write is detected
    if model_first:
        restore(state, path, "compression")
    residuals: dict[str, torch.Tensor] = state.state_dict()["residuals"]
    step(model, rank, 2)
    return {"residuals": residuals} | {name: p.full_tensor().detach() for name, p in model.named_parameters()}


def test_distributed_checkpoint_continues_bit_for_bit_and_on_other_world_sizes(tmp_path: Path) -> None:
    uninterrupted = run_ranks(save_and_train, 2, tmp_path / "run")
    for model_first in (False, True):
        resumed = run_ranks(load_and_train, 2, tmp_path / "run", model_first)
        for expected, actual_values in zip(uninterrupted, resumed, strict=True):
            for name, value in expected.items():
                if name != "residuals":
                    assert torch.equal(actual_values[name], value), name
            for name, residual in expected["residuals"].items():
                assert torch.equal(actual_values["residuals"][name], residual), name
    for ranks in (1, 3):
        resumed = run_ranks(load_and_train, ranks, tmp_path / "run")
        for name in uninterrupted[0]["residuals"]:
            total = sum(values["residuals"][name].double() for values in uninterrupted)
            loaded_total = sum(
                values["residuals"][name].double() for values in resumed if name in values["residuals"]
            )
            assert torch.allclose(total, loaded_total, atol=1e-7), name  # type: ignore[arg-type]
