"""DTCOMM_DISABLE=1: every integration leaves everything uncompressed and says so once; states do nothing."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from dtcomm import ddp, env, fsdp, pipeline, tp
from dtcomm.compress.reporting import Reporting
from dtcomm.context_parallel.state import make_settings
from dtcomm.local_sgd import LocalSGD
from dtcomm.moe.route import make_codecs
from dtcomm.torch_compat import ddp_hook_states
from tests.support.rank_tests import on_ranks

WIDTH = 64


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: Callable[[], object] = int
) -> None:
    torch.manual_seed(1 + rank)
    for _ in range(3):
        model(torch.randn(16, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        step()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def values(model: nn.Module) -> list[torch.Tensor]:
    return [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in model.parameters()]


def require_nothing_compressed(state: Reporting) -> None:
    report = state.report()
    assert all(row.codec == "none" for row in report.rows) and report.wire_bytes >= report.plain_bytes
    assert not report.residual_bytes and "nothing is compressed" in report.summary()


def train_replicated(rank: int, compress: bool) -> list[torch.Tensor]:
    model = DistributedDataParallel(make_model())
    if compress:
        state = ddp.compress(model, "int8", feedback=True, verify=20)
        assert not ddp_hook_states(model) and state.report().uncompressed == env.DISABLED
        saved = state.state_dict()
        state.load_state_dict(saved)
        state.observe(1.0)
        require_nothing_compressed(state)
    train(model, sgd(model), rank)
    return values(model)


def train_with_hook(rank: int, compress: bool) -> list[torch.Tensor]:
    model = DistributedDataParallel(make_model())
    if compress:
        model.register_comm_hook(ddp.DDPState("int8"), ddp.hook)
    train(model, sgd(model), rank)
    return values(model)


def train_sharded(rank: int, compress: bool) -> list[torch.Tensor]:
    model = make_model()
    mesh = init_device_mesh("cpu", (2,))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if compress:
        state = fsdp.compress(model, gradients="ef:int4", parameters="delta:int4")
        assert state.report().uncompressed == env.DISABLED and not state.report().messages
        state.load_state_dict(state.state_dict())
        require_nothing_compressed(state)
        state.detach()
    train(model, sgd(model), rank)
    return values(model)


def train_optimizer(rank: int, compress: bool) -> list[torch.Tensor]:
    model = make_model()
    codecs = {"gradients": "ef:int4", "parameters": "delta:int4"} if compress else {"gradients": "none"}
    optimizer = fsdp.ShardedOptimizer(model.named_parameters(), torch.optim.SGD, lr=0.1, **codecs)
    train(model, optimizer, rank)
    optimizer.load_state_dict(optimizer.state_dict())
    require_nothing_compressed(optimizer)
    return values(model)


def train_parallel(rank: int, compress: bool) -> list[torch.Tensor]:
    model = make_model()
    codecs = {"codec": "int8", "backward_codec": "int4"} if compress else {"codec": "none"}
    state = tp.compress(model, None, plan={"0": "column", "2": "row"}, **codecs)  # type: ignore[arg-type]
    train(model, sgd(model), 0)
    require_nothing_compressed(state)
    return values(model)


def train_locally(rank: int, compress: bool) -> list[torch.Tensor]:
    model = make_model()
    local = LocalSGD(model, every=1, codec="int4" if compress else "none", feedback=True)
    train(model, sgd(model), rank, local.step)
    require_nothing_compressed(local)
    return values(model)


@pytest.mark.parametrize(
    "train_model",
    [train_replicated, train_with_hook, train_sharded, train_optimizer, train_parallel, train_locally],
)
@on_ranks(2)
def test_a_disabled_run_has_the_bits_of_an_uncompressed_one(
    rank: int, ranks: int, train_model: Callable[[int, bool], list[torch.Tensor]]
) -> None:
    uncompressed = train_model(rank, False)
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dtcomm").addHandler(handler)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DTCOMM_DISABLE", "1")
        for _ in range(2):
            assert all(map(torch.equal, train_model(rank, True), uncompressed))
    assert (
        set(logged) <= {f"dtcomm: {env.DISABLED}"} and len(logged) <= 1
    )  # none in a process that has said it


def test_a_process_says_once_that_nothing_is_compressed() -> None:
    code = "from dtcomm import env; print(env.disabled(), env.disabled())"
    command = [sys.executable, "-c", code]
    run = subprocess.run(
        command, env=os.environ | {"DTCOMM_DISABLE": "1"}, capture_output=True, text=True, check=True
    )
    assert run.stdout == "True True\n" and run.stderr == f"dtcomm: {env.DISABLED}\n"


@on_ranks(2)
def test_a_checkpoint_of_a_compressed_run_survives_a_disabled_one(rank: int, ranks: int) -> None:
    """What is switched off in an emergency is switched on again later."""
    model = DistributedDataParallel(make_model())
    state = ddp.compress(model, "int4", feedback=True)
    train(model, sgd(model), rank)
    saved = state.state_dict()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DTCOMM_DISABLE", "1")
        idle = ddp.compress(DistributedDataParallel(make_model()), "int4", feedback=True)
        idle.load_state_dict(saved)
        kept: dict[str, Any] = idle.state_dict()
    assert kept["residuals"].keys() == saved["residuals"].keys()
    assert all(torch.equal(kept["residuals"][name], saved["residuals"][name]) for name in kept["residuals"])


@on_ranks(2)
def test_messages_of_activations_and_experts_are_uncompressed_too(rank: int, ranks: int) -> None:
    """The process may have parsed the same codecs before, and may compress again later."""

    def codecs() -> set[str]:
        link = pipeline.Sender(1 - rank, "int8")
        experts = make_codecs("int8", "int8", "int8", False)
        settings = make_settings("attention", None, {"kv_codec": "int8", "backward_codec": "int8"})
        of_experts = (experts.dispatch, experts.combine, experts.backward)
        return {
            *map(str, (link.codec, link.backward_codec, *of_experts)),
            settings.kv_codec,
            settings.backward_codec,
        }

    assert codecs() == {"int8"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DTCOMM_DISABLE", "1")
        assert codecs() == {"none"}
    assert codecs() == {"int8"}
