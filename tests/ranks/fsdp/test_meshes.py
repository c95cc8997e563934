"""The ways FSDP2 is used: replicas, tensor parallelism, copies inside a host, offload, tied parameters.

Ranks are fresh processes, because torch caches meshes and their groups per process.
"""

from __future__ import annotations

from contextlib import redirect_stdout
from io import StringIO
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dtcomm import ddp, fsdp
from tests.ranks.fsdp.models import WIDTH, Net, sharded, train
from tests.support.rank_tests import on_ranks

NONE = {"gradients": "none", "parameters": "none"}
LOSSY = {"gradients": "int8", "parameters": "int8:block=64"}


def compare(model: FSDPModule, plain: nn.Module, rank: int, tolerance: float) -> None:
    expected, actual = train(plain, rank), train(model, rank)  # type: ignore[arg-type]
    for name, value in expected.items():
        error = torch.linalg.vector_norm(actual[name] - value)
        assert error <= tolerance * torch.linalg.vector_norm(value), (name, float(error))


@pytest.mark.slow
@pytest.mark.parametrize(("codecs", "tolerance"), [(NONE, 0.0), (LOSSY, 0.1)], ids=str)
@on_ranks(4, fresh=True)
def test_torchs_replicas_stay_uncompressed(
    rank: int, ranks: int, codecs: dict[str, str], tolerance: float
) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = sharded(mesh)
    state = fsdp.compress(model, **codecs)
    compare(model, sharded(mesh), rank, tolerance)  # type: ignore[arg-type]
    notes = state.report().notes
    assert len(notes) == 3 and all(
        "torch averages the gradients of 2 replicas, uncompressed" in note for note in notes
    )
    assert "gradients of 2 replicas" in str(state.report())


@on_ranks(2, fresh=True)
def test_replicate_is_refused_with_what_serves_instead(rank: int, ranks: int) -> None:
    """torch's replicate() is refused, and what the error names instead compresses the sum between replicas."""
    from torch.distributed._composable.replicate import replicate
    from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_with_fsdp

    mesh = init_device_mesh("cpu", (ranks, 1), mesh_dim_names=("replicate", "shard"))
    replicated = replicate_with_fsdp(nn.Linear(64, 64), mesh=mesh["replicate"])
    with pytest.raises(ValueError, match=r"model: replicate\(\) .* compress\(replicas="):
        fsdp.compress(replicated, "int8")  # type: ignore[arg-type]
    for model in (replicated, replicate(nn.Linear(64, 64))):  # type: ignore[no-untyped-call]
        with pytest.raises(TypeError, match="model: expected a DistributedDataParallel"):
            ddp.compress(model, "int8")  # type: ignore[arg-type]
    model = sharded(mesh["shard"])
    state = fsdp.compress(model, "int8", replicas=mesh["replicate"])
    compare(model, sharded(mesh["replicate"]), rank, 0.1)  # type: ignore[arg-type]
    traffic = state.report().modules["blocks.0"]["replicas"]
    assert traffic.calls == 3 and traffic.wire_bytes < 0.35 * traffic.plain_bytes


@pytest.mark.slow
@pytest.mark.parametrize(("codecs", "tolerance"), [(NONE, 1e-6), (LOSSY, 0.1)], ids=str)
@on_ranks(4, fresh=True)
def test_copies_inside_a_host_are_gathered_in_backward(
    rank: int, ranks: int, codecs: dict[str, str], tolerance: float
) -> None:
    """Backward gathers, inside a host, the copies that forward left there (ZeRO++'s hpZ)."""
    mesh = init_device_mesh("cpu", (ranks,))
    model = sharded(mesh, reshard_after_forward=2)
    state = fsdp.compress(model, **codecs)
    compare(model, sharded(mesh, reshard_after_forward=2), rank, tolerance)  # type: ignore[arg-type]
    traffic = state.report().modules["blocks.0"]
    assert traffic["parameters"].calls == 3 and traffic["kept copies"].calls == 3
    assert "gathered again from this host" in traffic["kept copies"].reason


@pytest.mark.parametrize(
    ("codecs", "tolerance"), [(NONE, 0.0), ({"gradients": "ef:int8", "residual": "bf16"}, 0.1)], ids=str
)
@on_ranks(4, fresh=True)
def test_the_average_of_replicas_is_compressed(
    rank: int, ranks: int, codecs: dict[str, Any], tolerance: float
) -> None:
    """dtcomm's replicas compared to torch's own HSDP."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = sharded(mesh["shard"])
    state = fsdp.compress(model, **codecs, replicas=mesh["replicate"])
    compare(model, sharded(mesh), rank, tolerance)  # type: ignore[arg-type]
    report = state.report()
    assert not report.notes and (report.rank, report.world_size) == (rank, ranks)
    with redirect_stdout(StringIO()) as printed:  # once, and not by the first rank of each replica
        state.print_report()
    assert printed.getvalue() == ("" if rank else f"{report.summary()}\n")
    for by_kind in report.modules.values():
        assert by_kind["replicas"].calls == by_kind["gradients"].calls == 3
    if tolerance:
        traffic = report.modules["blocks.0"]["replicas"]
        assert traffic.wire_bytes < 0.35 * traffic.plain_bytes
        assert any(name.endswith("replicas]") for name in state.state_dict()["residuals"])
    with pytest.raises(
        ValueError, match="replicas: the mesh passed to fully_shard has a dimension of replicas"
    ):
        fsdp.compress(sharded(mesh), replicas=mesh["replicate"])  # type: ignore[arg-type]
    of_torch = fsdp.compress(sharded(mesh), "int8").report()
    assert (of_torch.rank, of_torch.world_size) == (rank, ranks)


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(torch.relu(self.up(x)))
        return out


@pytest.mark.parametrize(("codecs", "tolerance"), [(NONE, 0.0), (LOSSY, 0.05)], ids=str)
@on_ranks(4, fresh=True)
def test_with_tensor_parallel_layers(rank: int, ranks: int, codecs: dict[str, str], tolerance: float) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))

    def make_model() -> Any:
        torch.manual_seed(0)
        pair = parallelize_module(
            TwoLayers(), mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
        )
        return fully_shard(pair, mesh=mesh["data"])

    plain, model = make_model(), make_model()
    fsdp.compress(model, **codecs)
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(rank // 2))
    for variant in (plain, model):
        variant(x).square().mean().backward()
    for (name, p), q in zip(plain.named_parameters(), model.named_parameters(), strict=True):
        expected, actual = p.grad.full_tensor(), q[1].grad.full_tensor()
        assert torch.linalg.vector_norm(actual - expected) <= tolerance * torch.linalg.vector_norm(
            expected
        ), name


@on_ranks(2, fresh=True)
def test_offloaded_tied_frozen_and_bf16_parameters(rank: int, ranks: int) -> None:
    mesh = init_device_mesh("cpu", (ranks,))
    # Parameters that an offload policy keeps on the CPU.
    options = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
    model = sharded(mesh, **options)
    fsdp.compress(model, **NONE)
    compare(model, sharded(mesh, **options), rank, 0.0)  # type: ignore[arg-type]

    # One matrix used twice.
    def make_tied() -> Any:
        torch.manual_seed(0)
        net = Net()
        net.blocks[1].up.weight = net.blocks[0].up.weight
        return fully_shard(net, mesh=mesh)

    model = make_tied()
    state = fsdp.compress(model, "ef:int8")
    compare(model, make_tied(), rank, 0.1)
    assert "blocks.0.up.weight" in state.state_dict()["residuals"]

    # bf16 parameters, and one that is frozen.
    def make_half() -> Any:
        torch.manual_seed(0)
        net = Net().to(torch.bfloat16)
        net.blocks[0].down.weight.requires_grad_(False)
        net.forward = lambda x, forward=net.forward: forward(x.bfloat16())  # type: ignore[method-assign]
        return fully_shard(net, mesh=mesh)

    model = make_half()
    state = fsdp.compress(model, "ef:int8", "fp8_e4m3")
    x = torch.randn(4, WIDTH)
    model(x).float().square().mean().backward()
    assert model.blocks[0].down.weight.grad is None
    assert "blocks.0.down.weight" not in state.state_dict()["residuals"]
    assert "blocks.0.up.weight" in state.state_dict()["residuals"]


class FourLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


@on_ranks(2, fresh=True)
def test_shared_buffers_are_reused(rank: int, ranks: int) -> None:
    """Shared buffers are reused, whatever the number of layers and steps."""
    mesh = init_device_mesh("cpu", (ranks,))
    model = FourLayers()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    state = fsdp.compress(model, **NONE)
    sizes = []
    for _ in range(4):
        model(torch.ones(2, 256)).square().mean().backward()
        for p in model.parameters():
            p.grad = None
        sizes.append(state.report().memory["shared buffers"])
    assert 0 < sizes[0] and len(set(sizes[1:])) == 1
    # Prefetching gathers one layer ahead; each layer's gradients live until they are dropped.
    assert sizes[-1] < 8 * 256 * 257 * 4 + 4 * 256 * 257 * 4
    state.buffers.trim()
    assert state.report().memory["shared buffers"] == 0
