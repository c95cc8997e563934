"""Training through compressed layers: checkpointing, autocast, compiled blocks, DDP and tensor parallelism together."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from dtcomm import tp
from dtcomm.launch.ranks import run_ranks
from examples.tp_blocks import ParallelAttention, ParallelMLP

WIDTH = 64


class Block(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = ParallelAttention(WIDTH, 4, **options)
        self.mlp = ParallelMLP(WIDTH, 128, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.attention(self.norm(x), x)
        y: torch.Tensor = self.mlp(self.norm(x), x)
        return y


def make_input(rank: int = 0) -> torch.Tensor:
    return torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(rank))


def gradients(block: nn.Module, run: Any) -> list[torch.Tensor]:
    block.zero_grad(set_to_none=True)
    y = run(make_input())
    y.float().square().mean().backward()
    return [y.detach(), *(parameter.grad.clone() for parameter in block.parameters())]


def compare_gradients(rank: int, ranks: int, mode: str, codec: str) -> None:
    torch.manual_seed(0)
    block = Block(codec=codec, backward_codec=codec, latency=False)
    expected = gradients(block, block)
    tolerance = 1e-5
    if mode == "checkpoint":
        actual = gradients(block, lambda x: checkpoint(block, x, use_reentrant=False))
    elif mode == "autocast":
        tolerance = 0.1

        def forward_with_autocast(x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                y: torch.Tensor = block.mlp(x)
                assert y.dtype == torch.bfloat16
                return block(x)

        actual = gradients(block, forward_with_autocast)
        assert all(parameter.grad.dtype == torch.float32 for parameter in block.parameters())
        with torch.no_grad():
            assert torch.equal(forward_with_autocast(make_input()), actual[0])
    else:
        torch._dynamo.reset()
        if (
            mode == "inductor"
        ):  # inductor fuses arithmetic, so an element near a tie may round to the next int8 level
            tolerance = 1e-3
        actual = gradients(
            block,
            torch.compile(block, fullgraph=True, backend="inductor" if mode == "inductor" else "aot_eager"),
        )
    for gradient, expected_gradient in zip(actual, expected, strict=True):
        # The gradient of the keys' bias is zero up to rounding.
        error = (gradient.float() - expected_gradient).norm() / expected_gradient.norm().clamp(min=1e-3)
        assert error <= tolerance, (mode, codec, float(error))


@pytest.mark.parametrize(
    ("mode", "codec"),
    [
        *[("checkpoint", "none"), ("checkpoint", "int8"), ("autocast", "int8")],
        pytest.param("compile", "int8", marks=pytest.mark.slow),
    ],
)
def test_gradients_survive_checkpointing_autocast_and_compilation(mode: str, codec: str) -> None:
    run_ranks(compare_gradients, 2, mode, codec)


class OtherLayers(nn.Module):
    """Layers that the blocks do not use: sequence parallel, gathered output, split input, embedding."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embedding = tp.VocabParallelEmbedding(32, WIDTH, codec=options["codec"])
        self.split = tp.RowParallelLinear(
            WIDTH, WIDTH, input_is_parallel=False, sequence_parallel=True, **options
        )
        self.up = tp.ColumnParallelLinear(WIDTH, 2 * WIDTH, sequence_parallel=True, **options)
        self.down = tp.RowParallelLinear(2 * WIDTH, WIDTH, **options)
        self.head = tp.ColumnParallelLinear(WIDTH, 32, gather_output=True, **options)

    def forward(self, symbols: torch.Tensor) -> torch.Tensor:
        x = self.embedding(symbols)
        y: torch.Tensor = self.head(x + self.down(torch.relu(self.up(self.split(x)))))
        return y


def compare_compiled(rank: int, ranks: int, backend: str, codec: str) -> None:
    torch.manual_seed(0)
    model = OtherLayers(codec=codec, backward_codec=codec, latency=False)
    symbols = torch.arange(12).view(2, 6)
    expected = gradients(model, lambda _: model(symbols))
    compiled_model = torch.compile(model, fullgraph=True, backend=backend)
    actual = gradients(model, lambda _: compiled_model(symbols))
    for gradient, expected_gradient in zip(actual, expected, strict=True):
        assert (gradient - expected_gradient).norm() <= 1e-5 * expected_gradient.norm()


def test_layers_outside_of_blocks_compile() -> None:
    run_ranks(compare_compiled, 2, "aot_eager", "int8")


@pytest.mark.slow
def test_inductor_compiles_a_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("g++") is None:
        pytest.skip("Inductor needs g++ on this machine")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    run_ranks(compare_gradients, 2, "inductor", "int8", timeout=600)


def train_on_mesh(rank: int, ranks: int, codec: str) -> list[float]:
    """Return the losses of four steps on a mesh of (dp, tp) = (2, 2)."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    block = Block(codec=codec, backward_codec=codec, group=mesh["tp"], latency=False)
    model = DistributedDataParallel(block, process_group=mesh["dp"].get_group())
    return train(model, [mesh["dp"].get_local_rank()], mesh["dp"].get_group())


def train_on_one_rank(rank: int, ranks: int) -> list[float]:
    """Return the losses of the same steps on one rank."""
    torch.manual_seed(0)
    return train(Block(), [0, 1], None)


def train(model: nn.Module, replicas: list[int], group: Any) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(4):
        optimizer.zero_grad()
        total = torch.zeros(())
        for replica in replicas:
            loss = (model(make_input(10 * step + replica)) - 1).square().mean() / len(replicas)
            loss.backward()
            total += loss.detach()
        optimizer.step()
        if group is not None:
            dist.all_reduce(total, group=group)
            total /= 2
        losses.append(float(total))
    return losses


@pytest.mark.parametrize(("codec", "tolerance"), [("none", 1e-5), ("int8", 0.01)])
def test_ddp_with_tensor_parallelism_on_one_mesh(codec: str, tolerance: float) -> None:
    expected = run_ranks(train_on_one_rank, 1)[0]
    assert expected[-1] < 0.95 * expected[0]
    for losses in run_ranks(train_on_mesh, 4, codec):
        assert losses == pytest.approx(expected, rel=tolerance)
