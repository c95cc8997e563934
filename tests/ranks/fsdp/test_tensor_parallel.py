"""FSDP and ShardedOptimizer with tensor-parallel models: parameters that all tensor-parallel ranks have stay equal on
them, bit for bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import dtcomm
from dtcomm import fsdp
from tests.ranks.ddp.test_tensor_parallel import require_equal
from tests.support.rank_tests import on_ranks

WIDTH = 24  # rows of a few elements: blocks of any codec hold elements of several parameters
STEPS = 12
CODECS: dict[str, dict[str, Any]] = {
    "int8": {"gradients": "int8", "parameters": "int8"},
    "int8, stochastic": {"gradients": "int8:round=stochastic", "parameters": "int8:round=stochastic"},
    "int4, feedback": {"gradients": "ef:int4", "parameters": "int8", "residual": "int8", "sample_every": 2},
    "loco": {"gradients": "loco:int4:rotate=hadamard", "parameters": "delta:int4"},
}
REPLICATED = ("norm.weight", "norm.bias", "down.bias")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.uses_norm = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x) if self.uses_norm else x
        out: torch.Tensor = x + self.down(torch.relu(self.up(y)))
        return out


def make_model(mesh: DeviceMesh, style: str) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    if style == "torch":
        for block in model:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    else:
        dtcomm.tp.compress(model, mesh["tp"], "int8", {"*.up": "column", "*.down": "row"}, latency=False)
    for block in model:
        fully_shard(block, mesh=mesh["fsdp"])
    return fully_shard(model, mesh=mesh["fsdp"])


@pytest.mark.parametrize("style", ["torch", "dtcomm"])
@pytest.mark.slow
@on_ranks(4, fresh=True)
def test_replicated_parameters_stay_equal(rank: int, ranks: int, style: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    for name, options in CODECS.items():
        model = make_model(mesh, style)
        state = fsdp.compress(model, **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        generator = torch.Generator().manual_seed(mesh["fsdp"].get_local_rank())
        for step in range(STEPS):
            x = torch.randn(8, WIDTH, generator=generator)
            y = model(x)
            require_equal(y.detach(), mesh["tp"], f"{name}: output in step {step}")
            (y - x.roll(1, -1)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            for path, parameter in model.named_parameters():
                if path.endswith(REPLICATED):
                    shard = parameter._local_tensor.detach()
                    require_equal(shard, mesh["tp"], f"{name}: {path} in step {step}")
        report = state.report()
        assert 0 < report.wire_bytes < report.plain_bytes and not report.uncompressed
        for kind in ("gradients", "parameters"):
            assert report.modules["0, replicated"][kind].calls == report.modules["0"][kind].calls
        # Without some of its gradients it is unknown what lies where in the flat one.
        model[0].uses_norm = False
        model(x).square().mean().backward()
        assert "some parameters have no gradient" in state.report().modules["0"]["gradients"].reason
        require_equal(model[0].down.bias.grad._local_tensor, mesh["tp"], f"{name}: uncompressed gradient")
        state.detach()


LAYERS = {"*.up": "column", "*.down": "row"}


def layers_of(mesh: DeviceMesh, codec: str) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    dtcomm.tp.compress(model, mesh["tp"], codec, LAYERS, latency=False)
    return model


def loss_of(model: nn.Module, mesh: DeviceMesh, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + mesh["dp"].get_local_rank())
    x = torch.randn(8, WIDTH, generator=generator)
    loss: torch.Tensor = (model(x) - x.roll(1, -1)).square().mean()
    return loss


@pytest.mark.slow
@on_ranks(4, fresh=True)
def test_sharded_optimizer_of_tensor_parallel_layers(rank: int, ranks: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    group = mesh["dp"].get_group()
    for name, options in CODECS.items():
        options = {key: value for key, value in options.items() if key != "sample_every"}
        for stage in (1, 2):
            model = layers_of(mesh, "int8")
            options |= {"lr": 1e-2, "group": group, "stage": stage, "bucket_bytes": 6000, "sample_every": 2}
            optimizer = fsdp.ShardedOptimizer(model.named_parameters(), torch.optim.AdamW, **options)
            for step in range(STEPS // 2):
                loss_of(model, mesh, step).backward()
                norm = optimizer.clip_grad_norm_(0.1)
                require_equal(norm, mesh["tp"], f"{name}: norm in step {step}")
                optimizer.step()
                optimizer.zero_grad()
                for path, parameter in model.named_parameters():
                    if path.endswith(REPLICATED):
                        require_equal(parameter.detach(), mesh["tp"], f"{name}: {path} in step {step}")
            assert 0 < optimizer.report().wire_bytes < optimizer.report().plain_bytes
    # Uncompressed it has the bits of DDP, of the same layers and the same clipping.
    model = layers_of(mesh, "none")
    optimizer = fsdp.ShardedOptimizer(
        model.named_parameters(), torch.optim.AdamW, lr=1e-2, gradients="none", group=group, bucket_bytes=6000
    )
    plain = DistributedDataParallel(layers_of(mesh, "none"), process_group=group)
    plain_optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for step in range(4):
        loss_of(model, mesh, step).backward()
        loss_of(plain, mesh, step).backward()
        expected = dtcomm.mesh.clip_grad_norm_(plain, 1e9)
        torch.testing.assert_close(optimizer.clip_grad_norm_(1e9), expected, rtol=1e-6, atol=0)
        for each in (optimizer, plain_optimizer):
            each.step()
            each.zero_grad()
        for (path, parameter), reference in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert torch.equal(parameter, reference), (path, step)
    parallelize_module(styled := Block(), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    with pytest.raises(TypeError, match=r"up.weight is a DTensor; valid: plain parameters.*FSDP2"):
        fsdp.ShardedOptimizer(styled.named_parameters(), torch.optim.SGD, group=group, lr=0.1)


def wrapped_by_fsdp1(mesh: DeviceMesh, apart: bool) -> FullyShardedDataParallel:
    """Wrap a block; with ``apart`` each of its layers, none of which has both shards and whole parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    if apart:
        for block in model:
            block.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
    dtcomm.tp.compress(model, mesh["tp"], "none", LAYERS, latency=False)
    options = {"process_group": mesh["dp"].get_group(), "device_id": torch.device("cpu")}
    if apart:
        for block in model:
            for name in ("norm", "up", "down"):
                setattr(block, name, FullyShardedDataParallel(getattr(block, name), **options))
    return FullyShardedDataParallel(model, **options)


@pytest.mark.slow
@on_ranks(4, fresh=True)
def test_fsdp1_refuses_units_that_would_drift_apart(rank: int, ranks: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = wrapped_by_fsdp1(mesh, apart=False)
    with pytest.raises(
        ValueError, match=r"FSDP1 unit '\(root\)'.*all of its ranks have 0.norm.weight.*Use fully_shard"
    ):
        fsdp.compress(model, "int8")
    # Uncompressed nothing is rounded: the bits are those of torch.
    plain = wrapped_by_fsdp1(mesh, apart=False)
    state = fsdp.compress(model, "none")
    for each in (model, plain):
        loss_of(each, mesh, 0).backward()
    for (name, parameter), reference in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(parameter.grad, reference.grad), name
    assert state.report().wire_bytes > 0
    model = wrapped_by_fsdp1(mesh, apart=True)
    state = fsdp.compress(model, "ef:int8", sample_every=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        loss_of(model, mesh, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        for name, parameter in model.named_parameters():
            if ".norm." in name:
                require_equal(parameter.detach(), mesh["tp"], f"{name} in step {step}")
    assert state.report().modules["0.norm"]["gradients"].codec == "ef:int8"


class Constants(nn.Module):
    """A block whose gradients are constants: those of each parameter are its number times a factor."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, factor: torch.Tensor) -> torch.Tensor:
        parameters = list(self.block.parameters())
        total: torch.Tensor = sum(
            (factor * (number + 1) * parameter.sum() for number, parameter in enumerate(parameters)),
            torch.zeros(()),
        )
        return total


@pytest.mark.slow
@on_ranks(4, fresh=True)
def test_parts_of_a_module_are_averaged_between_replicas(rank: int, ranks: int) -> None:
    """Parts of a module go to their places, in order, with the bytes of their codec."""
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("dp", "fsdp", "tp"))
    torch.manual_seed(0)
    model = Constants()
    dtcomm.tp.compress(model, mesh["tp"], "none", {"*.up": "column", "*.down": "row"}, latency=False)
    fully_shard(model, mesh=mesh["fsdp"])
    state = fsdp.compress(model, gradients="int8", replicas=mesh["dp"])
    state.timeline.start(2)
    for _ in range(2):
        model.zero_grad()
        model(torch.tensor(float(1 + rank))).backward()
    for number, (name, parameter) in enumerate(model.named_parameters()):
        expected = torch.full_like(parameter, (number + 1) * (1 + 2 + 3 + 4) / 4)
        torch.testing.assert_close(
            parameter.grad.full_tensor(), expected.full_tensor(), rtol=0.02, atol=0.05, msg=name
        )
    messages = state.timeline.steps[0].messages
    own = [message for message in messages if message.label.endswith("replicas")]
    assert [message.label for message in own] == ["(root), replicated replicas", "(root) replicas"]
    assert own[0].finished <= own[1].started  # one after the other, as FSDP calls them
    names = dict(model.named_parameters())
    whole = sum(p.to_local().numel() for name, p in names.items() if name.endswith(REPLICATED))
    cut = sum(p.to_local().numel() for name, p in names.items() if not name.endswith(REPLICATED))
    for message, numel in zip(own, (whole, cut), strict=True):
        # Of two ranks each sends all of its elements once, or half of them and then half of the sum.
        halves = 2 * dtcomm.codec("int8").wire_bytes(numel // 2)
        assert message.wire_bytes in (dtcomm.codec("int8").wire_bytes(numel), halves), message.label
        assert message.plain_bytes == 4 * numel  # 2 (n - 1) / n of the elements
    for label in ("(root), replicated", ""):
        assert state.report().modules[label]["replicas"].calls == 2
