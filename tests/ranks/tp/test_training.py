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

WIDTH = 64


class Block(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = tp.ParallelAttention(WIDTH, 4, **options)
        self.mlp = tp.ParallelMLP(WIDTH, 128, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.attention(self.norm(x), x)
        y: torch.Tensor = self.mlp(self.norm(x), x)
        return y


def tokens(rank: int = 0) -> torch.Tensor:
    return torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(rank))


def gradients(block: nn.Module, run: Any) -> list[torch.Tensor]:
    block.zero_grad(set_to_none=True)
    y = run(tokens())
    y.float().square().mean().backward()
    return [y.detach(), *(parameter.grad.clone() for parameter in block.parameters())]


def run_through(rank: int, ranks: int, how: str, codec: str) -> None:
    torch.manual_seed(0)
    block = Block(codec=codec, backward_codec=codec, latency=False)
    expected = gradients(block, block)
    tolerance = 1e-5
    if how == "checkpoint":
        got = gradients(block, lambda x: checkpoint(block, x, use_reentrant=False))
    elif how == "autocast":
        tolerance = 0.1

        def cast(x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                y: torch.Tensor = block.mlp(x)
                assert y.dtype == torch.bfloat16
                return block(x)

        got = gradients(block, cast)
        assert all(parameter.grad.dtype == torch.float32 for parameter in block.parameters())
    else:
        torch._dynamo.reset()
        if (
            how == "inductor"
        ):  # inductor fuses arithmetic, so an element near a tie may round to the next int8 level
            tolerance = 1e-3
        got = gradients(
            block,
            torch.compile(block, fullgraph=True, backend="inductor" if how == "inductor" else "aot_eager"),
        )
    for mine, wanted in zip(got, expected, strict=True):
        # The gradient of the keys' bias is zero up to rounding.
        error = (mine.float() - wanted).norm() / wanted.norm().clamp(min=1e-3)
        assert error <= tolerance, (how, codec, float(error))


@pytest.mark.parametrize(
    ("how", "codec"),
    [("checkpoint", "none"), ("checkpoint", "int8"), ("autocast", "int8"), ("compile", "int8")],
)
def test_through(how: str, codec: str) -> None:
    run_ranks(run_through, 2, how, codec)


class OtherLayers(nn.Module):
    """Layers that the blocks do not use: sequence parallel, gathered output, split input, embedding."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embedding = tp.VocabParallelEmbedding(32, WIDTH, codec=options["codec"])
        self.into = tp.RowParallelLinear(
            WIDTH, WIDTH, input_is_parallel=False, sequence_parallel=True, **options
        )
        self.up = tp.ColumnParallelLinear(WIDTH, 2 * WIDTH, sequence_parallel=True, **options)
        self.down = tp.RowParallelLinear(2 * WIDTH, WIDTH, **options)
        self.head = tp.ColumnParallelLinear(WIDTH, 32, gather_output=True, **options)

    def forward(self, symbols: torch.Tensor) -> torch.Tensor:
        x = self.embedding(symbols)
        y: torch.Tensor = self.head(x + self.down(torch.relu(self.up(self.into(x)))))
        return y


def compiled(rank: int, ranks: int, backend: str, codec: str) -> None:
    torch.manual_seed(0)
    model = OtherLayers(codec=codec, backward_codec=codec, latency=False)
    symbols = torch.arange(12).view(2, 6)
    expected = gradients(model, lambda _: model(symbols))
    whole = torch.compile(model, fullgraph=True, backend=backend)
    got = gradients(model, lambda _: whole(symbols))
    for mine, wanted in zip(got, expected, strict=True):
        assert (mine - wanted).norm() <= 1e-5 * wanted.norm()


def test_the_other_layers_compile_too() -> None:
    run_ranks(compiled, 2, "aot_eager", "int8")


@pytest.mark.slow
def test_inductor_makes_code_of_a_whole_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("g++") is None:
        pytest.skip("Inductor needs g++ on this machine")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    run_ranks(run_through, 2, "inductor", "int8", timeout=300)


def two_dimensions(rank: int, ranks: int, codec: str) -> list[float]:
    """Return the losses of four steps on a mesh of (dp, tp) = (2, 2)."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    block = Block(codec=codec, backward_codec=codec, group=mesh["tp"], latency=False)
    model = DistributedDataParallel(block, process_group=mesh["dp"].get_group())
    return steps(model, [mesh["dp"].get_local_rank()], mesh["dp"].get_group())


def alone(rank: int, ranks: int) -> list[float]:
    """Return the losses of the same steps on one rank."""
    torch.manual_seed(0)
    return steps(Block(), [0, 1], None)


def steps(model: nn.Module, shares: list[int], group: Any) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(4):
        optimizer.zero_grad()
        total = torch.zeros(())
        for share in shares:
            loss = (model(tokens(10 * step + share)) - 1).square().mean() / len(shares)
            loss.backward()
            total += loss.detach()
        optimizer.step()
        if group is not None:
            dist.all_reduce(total, group=group)
            total /= 2
        losses.append(float(total))
    return losses


@pytest.mark.parametrize(("codec", "tolerance"), [("none", 1e-5), ("int8", 0.01)])
def test_ddp_and_tensor_parallelism_on_one_mesh(codec: str, tolerance: float) -> None:
    expected = run_ranks(alone, 1)[0]
    assert expected[-1] < 0.95 * expected[0]
    for losses in run_ranks(two_dimensions, 4, codec):
        assert losses == pytest.approx(expected, rel=tolerance)
