"""The methods that all states have, on two ranks of every integration."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from dtcomm import context_parallel, ddp, fsdp, moe, pipeline, tp
from dtcomm.compress.reporting import Reporting
from dtcomm.local_sgd import LocalSGD
from tests.support.rank_tests import on_ranks

WIDTH = 64


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))


def shard(model: nn.Sequential) -> nn.Sequential:
    mesh = init_device_mesh("cpu", (2,))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def make_stage(rank: int, layer: nn.Module | None = None) -> PipelineStage:
    example = torch.zeros(4, WIDTH, requires_grad=True)
    layer = nn.Linear(WIDTH, WIDTH) if layer is None else layer
    return PipelineStage(
        layer, rank, 2, torch.device("cpu"), input_args=(example,), output_args=(layer(example),)
    )


def make_context(options: dict[str, Any]) -> Reporting:
    with context_parallel.context_parallel(**options) as state:
        return state


#: Integration → how its state is made with options, and options that are not the defaults.
MAKERS: dict[str, tuple[Callable[[int, dict[str, Any]], Reporting], dict[str, Any]]] = {
    "DDP": (
        lambda rank, options: ddp.compress(DistributedDataParallel(make_model()), **options),
        {"codec": "int4", "feedback": True, "exclude": ["0"], "guard": {"on_loss": "error"}, "seed": 3},
    ),
    "FSDP": (
        lambda rank, options: fsdp.compress(shard(make_model()), **options),
        {"gradients": "ef:int4", "parameters": "int8", "exclude": ["0"], "guard": None, "sample_every": 2},
    ),
    "ShardedOptimizer": (
        lambda rank, options: fsdp.ShardedOptimizer(
            make_model().named_parameters(), torch.optim.SGD, **options
        ),
        {"lr": 0.5, "gradients": "int4", "feedback": True, "parameters": "delta:int4", "stage": 1},
    ),
    "TP": (
        lambda rank, options: tp.compress(make_model(), None, **options),
        {"codec": "int4", "plan": {"0": "column", "2": ["row", "int8"]}, "backward_codec": "bf16"},
    ),
    "pipeline": (
        lambda rank, options: pipeline.compress(make_stage(rank), **options),
        {"codec": "int4", "backward_codec": "int8", "feedback": True},
    ),
    "LocalSGD": (
        lambda rank, options: LocalSGD(make_model(), **options),
        {"every": 3, "codec": "* -> int4", "feedback": True, "fragments": 2, "delay": 1},
    ),
    "context parallel": (
        lambda rank, options: make_context(options),
        {"kv_codec": "int8", "layout": "contiguous"},
    ),
    "experts": (lambda rank, options: moe.MoEState(**options), {}),
}


@on_ranks(2)
def test_config_makes_an_equal_state(rank: int, ranks: int) -> None:
    for name, (make, options) in MAKERS.items():
        state = make(rank, options)
        assert state.integration == name
        config = state.config()
        again = make(rank, json.loads(json.dumps(config)))
        assert again.config() == config, name
        assert (str(again.report().policy), again.report().feedback) == (
            str(state.report().policy),
            state.report().feedback,
        )
        default = make(
            rank, {"plan": options["plan"]} if name == "TP" else {"lr": 1.0} if "lr" in options else {}
        )
        for option, value in options.items():
            if option == "guard" and value is not None:
                assert config[option]["on_loss"] == "error"
            elif not (name == "ShardedOptimizer" and option == "gradients"):
                assert config[option] == value, (name, option)
        assert default.config() != config or not options
        assert set(default.config()) == set(config)


@on_ranks(2)
def test_a_state_is_loaded_by_its_own_integration_alone(rank: int, ranks: int) -> None:
    states = {name: make(rank, options) for name, (make, options) in MAKERS.items()}
    saved = {name: state.state_dict() for name, state in states.items()}
    for name, state in states.items():
        state.load_state_dict(saved[name])
        for other, value in saved.items():
            if other != name:
                with pytest.raises(
                    ValueError, match=f"state: integration: saved by {other}; valid: a state of {name}"
                ):
                    state.load_state_dict(value)


@on_ranks(2)
def test_every_state_can_be_detached_twice_and_still_reports(rank: int, ranks: int) -> None:
    for name, (make, options) in MAKERS.items():
        state = make(rank, options)
        given: list[dict[str, float]] = []
        for _ in range(2):
            state.detach()
            state.log(given.append)
            assert state.report().integration == name
        assert given[0]["dtcomm/messages_total"] == 0


# --- detach -----------------------------------------------------------------------------------------------------


def train_step(model: nn.Module, rank: int, step: int) -> None:
    generator = torch.Generator().manual_seed(10 * step + rank)
    model(torch.randn(8, WIDTH, generator=generator)).square().mean().backward()


def gradients(model: nn.Module, rank: int, steps: int = 2) -> list[torch.Tensor]:
    """Return the gradients of the last of several steps without an optimizer."""
    for step in range(steps):
        model.zero_grad()
        train_step(model, rank, step)
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [grad.full_tensor() if hasattr(grad, "full_tensor") else grad.clone() for grad in grads]


def equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return len(first) == len(second) > 0 and all(map(torch.equal, first, second))


@on_ranks(2)
def test_a_detached_ddp_model_has_the_gradients_of_one_without_compression(rank: int, ranks: int) -> None:
    for options in ({}, {"find_unused_parameters": True}, {"static_graph": True}):
        plain = gradients(DistributedDataParallel(make_model(), **options), rank)
        model = DistributedDataParallel(make_model(), **options)
        hooks = len(model._forward_pre_hooks)
        state = ddp.compress(model, "int4", True, timeline=4)
        assert not equal(gradients(model, rank), plain)
        assert state.report().residual_bytes > 0
        with pytest.raises(RuntimeError, match="has a communication hook already"):
            ddp.compress(model, "int8")
        messages = state.report().messages
        state.detach()
        assert equal(gradients(model, rank), plain)
        report = state.report()
        assert report.residual_bytes == 0 and report.messages == messages > 0
        assert len(model._forward_pre_hooks) == hooks
        assert not any(parameter._backward_hooks for parameter in model.parameters())
        # Another compress takes the hook over, as often as one likes.
        for spec in ("int8", "none", "int4"):
            fresh = DistributedDataParallel(make_model(), **options)
            expected = ddp.compress(fresh, spec, False), gradients(fresh, rank)
            state = ddp.compress(model, spec, False)
            assert equal(gradients(model, rank), expected[1])
            assert state.report().wire_bytes == expected[0].report().wire_bytes > 0
            state.detach()


@on_ranks(2)
def test_a_detached_fsdp_model_has_the_gradients_of_one_without_compression(rank: int, ranks: int) -> None:
    plain = gradients(shard(make_model()), rank)
    model = shard(make_model())
    state = fsdp.compress(model, "ef:int4", "int8")
    assert not equal(gradients(model, rank), plain)
    before = state.report()
    state.detach()
    assert equal(gradients(model, rank), plain)
    assert before.residual_bytes > state.report().residual_bytes == 0 and not any(
        state.report().memory.values()
    )
    assert state.report().messages == before.messages > 0


@on_ranks(2)
def test_a_detached_optimizer_updates_as_one_without_compression(rank: int, ranks: int) -> None:
    updates = []
    for codecs in ({"gradients": "none"}, {"gradients": "int4", "feedback": True, "parameters": "int8"}):
        model = make_model()
        optimizer = fsdp.ShardedOptimizer(model.named_parameters(), torch.optim.SGD, lr=0.1, **codecs)
        if "feedback" in codecs:
            train_step(model, rank, 0)
            assert optimizer.report().residual_bytes > 0
            optimizer.zero_grad()
            optimizer.detach()
        for step in range(2):
            train_step(model, rank, step)
            optimizer.step()
            optimizer.zero_grad()
        updates.append([parameter.detach().clone() for parameter in model.parameters()])
        assert optimizer.report().residual_bytes == 0
    assert equal(*updates)


@on_ranks(2)
def test_a_detached_tensor_parallel_model_is_whole_again(rank: int, ranks: int) -> None:
    model = make_model()
    model[0].bias.requires_grad_(False)
    state = tp.compress(model, None, "int8", {"0": "column", "2": "row"}, verify=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(2):
        train_step(model, 0, step)
        optimizer.step()
        optimizer.zero_grad()
    dense = make_model()
    dense.load_state_dict(tp.full_state_dict(model))
    messages = state.report().messages
    state.detach()
    assert [type(layer) for layer in model] == [nn.Linear, nn.GELU, nn.Linear]
    assert not model._forward_pre_hooks and not model._forward_hooks and "join_hook" not in vars(model)
    assert [p.requires_grad for p in model.parameters()] == [True, False, True, True]
    assert equal([*model.state_dict().values()], [*dense.state_dict().values()])
    dense[0].bias.requires_grad_(False)
    assert equal(gradients(model, 0), gradients(dense, 0))
    assert state.report().messages == messages > 0
    again = tp.compress(model, None, "int8", {"0": "column", "2": "row"})
    train_step(model, 0, 0)
    assert again.report().messages > 0


@on_ranks(2)
def test_detached_stages_send_what_torch_sends(rank: int, ranks: int) -> None:
    def step(stage: PipelineStage) -> None:
        schedule = ScheduleGPipe(stage, 2, loss_fn=functional.mse_loss)
        inputs = torch.linspace(-1, 1, 8 * WIDTH).view(8, WIDTH)
        schedule.step(*((inputs,) if rank == 0 else ()), **({"target": inputs} if rank else {}))

    results = []
    for compress in (False, True):
        layer = make_model()[0]
        stage = make_stage(rank, layer)
        if compress:
            state = pipeline.compress(stage, "int4", feedback=True, differences=True)
            state.set_samples(range(8))
            step(stage)
            before = state.report()
            layer.zero_grad()
            state.detach()
            assert before.residual_bytes > state.report().residual_bytes == 0
            assert state.report().messages == before.messages > 0
        step(stage)
        results.append([parameter.grad for parameter in layer.parameters()])
    assert equal(*results)


@on_ranks(2)
def test_detached_local_sgd_averages_uncompressed(rank: int, ranks: int) -> None:
    weights = []
    for codec in ("none", "int4"):
        model = make_model()
        local = LocalSGD(model, every=2, codec=codec, feedback=True, delay=1)
        if codec == "int4":
            local.detach()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(5):
            train_step(model, rank, step)
            optimizer.step()
            optimizer.zero_grad()
            local.step()
        weights.append([parameter.detach().clone() for parameter in model.parameters()])
        assert local.report().residual_bytes == 0
        assert {row.codec for row in local.report().rows if row.wire_bytes} == {"none"}
    assert equal(*weights)


@on_ranks(2)
def test_local_sgd_can_be_detached_while_an_average_is_in_flight(rank: int, ranks: int) -> None:
    model = make_model()
    local = LocalSGD(model, every=2, codec="int4", feedback=True, delay=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        train_step(model, rank, step)
        optimizer.step()
        optimizer.zero_grad()
        local.step()
        if step == 1:
            assert local.syncs == 1
            local.detach()
    assert local.syncs == 3 and local.report().residual_bytes == 0
    local.sync()


# --- tracking of use --------------------------------------------------------------------------------------------


class Branches(nn.Module):
    """Two layers, of which a pass uses one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.used = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers[self.used](inputs)  # type: ignore[no-any-return]


@on_ranks(2)
def test_the_residual_of_an_unused_parameter_waits(rank: int, ranks: int) -> None:
    branches = Branches()
    model = DistributedDataParallel(branches, find_unused_parameters=True)
    state = ddp.compress(model, "int4", True)
    saved = []
    for used in (0, 1, 0):
        branches.used = used
        train_step(model, rank, 0)
        residuals = state.state_dict()["residuals"]
        saved.append({name: copy.deepcopy(value) for name, value in residuals.items()})
        if used == 1:
            assert torch.equal(saved[1]["layers.0.weight"], saved[0]["layers.0.weight"])
    assert not torch.equal(saved[2]["layers.0.weight"], saved[1]["layers.0.weight"])
    assert all(parameter._backward_hooks for parameter in branches.parameters())
    for copied in (copy.deepcopy(branches), pickle.loads(pickle.dumps(branches))):  # noqa: S301
        assert not any(parameter._backward_hooks for parameter in copied.parameters())
        assert equal([*copied.state_dict().values()], [*branches.state_dict().values()])
    state.detach()
    assert not any(parameter._backward_hooks for parameter in branches.parameters())


@on_ranks(2)
def test_a_copy_of_a_compressed_model_can_be_compressed(rank: int, ranks: int) -> None:
    model = DistributedDataParallel(make_model(), find_unused_parameters=True)
    state = ddp.compress(model, "int4", False)
    expected = gradients(model, rank)
    for copied in (copy.deepcopy(model.module), pickle.loads(pickle.dumps(model.module))):  # noqa: S301
        replica = DistributedDataParallel(copied, find_unused_parameters=True)
        ddp.compress(replica, "int4", False)
        assert equal(gradients(replica, rank), expected)
    state.detach()
    whole = pickle.loads(pickle.dumps(model.module))  # noqa: S301
    assert equal([*whole.state_dict().values()], [*model.module.state_dict().values()])
