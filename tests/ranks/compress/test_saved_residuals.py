"""Checkpoints with residuals in each form resume bit for bit; without residuals they resume and are smaller."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from dtcomm import ddp, fsdp
from dtcomm.local_sgd import LocalSGD
from tests.support.rank_tests import on_ranks

WIDTH = 64
Step = Callable[[], object]


def make_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))


def replicated(options: dict[str, Any]) -> tuple[nn.Module, Any, torch.optim.Optimizer, Step]:
    model = DistributedDataParallel(make_model())
    state = ddp.compress(model, "int4", feedback=True, **options)
    return model, state, torch.optim.SGD(model.parameters(), lr=0.1), int


def sharded(options: dict[str, Any]) -> tuple[nn.Module, Any, torch.optim.Optimizer, Step]:
    model = make_model()
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=init_device_mesh("cpu", (2,)))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    state = fsdp.compress(model, gradients="int4", feedback=True, **options)
    return model, state, torch.optim.SGD(model.parameters(), lr=0.1), int


def zero(options: dict[str, Any]) -> tuple[nn.Module, Any, torch.optim.Optimizer, Step]:
    model = make_model()
    optimizer = fsdp.ShardedOptimizer(
        model.named_parameters(), torch.optim.SGD, lr=0.1, gradients="int4", feedback=True, **options
    )
    return model, optimizer, optimizer, int


def local(options: dict[str, Any]) -> tuple[nn.Module, Any, torch.optim.Optimizer, Step]:
    model = make_model()
    state = LocalSGD(model, every=1, codec="int4", feedback=True, **options)
    return model, state, torch.optim.SGD(model.parameters(), lr=0.1), state.step


MAKERS = {"ddp": replicated, "fsdp": sharded, "zero": zero, "local": local}


def train(rank: int, made: tuple[nn.Module, Any, torch.optim.Optimizer, Step], steps: range) -> None:
    model, _, optimizer, after = made
    for step in steps:
        torch.manual_seed(2 * step + rank)
        model(torch.randn(16, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        after()


def saved(made: tuple[nn.Module, Any, torch.optim.Optimizer, Step]) -> bytes:
    stream = io.BytesIO()
    torch.save({"model": made[0].state_dict(), "state": made[1].state_dict()}, stream)
    return stream.getvalue()


def resume(made: tuple[nn.Module, Any, torch.optim.Optimizer, Step], data: bytes) -> None:
    values = torch.load(io.BytesIO(data), weights_only=True)
    made[0].load_state_dict(values["model"])
    made[1].load_state_dict(values["state"])


@pytest.mark.parametrize("name", MAKERS)
@on_ranks(2)
def test_resumed_runs(rank: int, ranks: int, name: str) -> None:
    sizes = {}
    for form in ("fp32", "bf16", "int8"):
        for save_residuals in (True, False):
            options = {"residual": form, "save_residuals": save_residuals}
            whole = MAKERS[name](options)
            train(rank, whole, range(3))
            data = saved(whole)
            sizes[form, save_residuals] = len(data)
            resumed = MAKERS[name](options)
            resume(resumed, data)
            train(rank, whole, range(3, 6))
            train(rank, resumed, range(3, 6))
            pairs = list(zip(whole[0].state_dict().values(), resumed[0].state_dict().values(), strict=True))
            same = all(torch.equal(_local(a), _local(b)) for a, b in pairs)
            assert same == save_residuals, (form, save_residuals)
            for a, b in pairs:  # close all the same
                torch.testing.assert_close(_local(a), _local(b), rtol=0.2, atol=0.02)
    residuals = {form: sizes[form, True] - sizes[form, False] for form in ("fp32", "bf16", "int8")}
    elements = 2 * WIDTH * WIDTH
    assert residuals["fp32"] > 4 * elements > 3 * elements > residuals["bf16"] > 2 * elements
    if name in ("ddp", "local"):  # of FSDP blocks of int8 hold several parameters, which are saved one by one
        assert residuals["int8"] < 1.6 * elements


def _local(value: Any) -> torch.Tensor:
    tensor: torch.Tensor = value.to_local() if hasattr(value, "to_local") else value
    return tensor


@pytest.mark.parametrize("name", MAKERS)
@on_ranks(2)
def test_the_memory_of_feedback_is_logged_once_at_the_start(rank: int, ranks: int, name: str) -> None:
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("dtcomm")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        made = MAKERS[name]({"residual": "bf16"})
        train(rank, made, range(2))
    finally:
        logger.setLevel(level)
    lines = [line for line in logged if "of residuals on every rank" in line]
    size = "16.2 KiB" if name in ("fsdp", "zero") else "16.0 KiB"  # DDP leaves vectors uncompressed
    assert len(lines) == (rank == 0) and all(f"error feedback keeps {size} of" in line for line in lines), (
        logged
    )
    before = made[1].report().residual_bytes
    assert 16 * 1024 <= before < 18 * 1024  # that is what it keeps
