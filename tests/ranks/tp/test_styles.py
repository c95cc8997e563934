"""The styles compared to torch's own: equal bits with codec none, small errors with others, equal layouts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import parallel as torch_styles

from dtcomm import tp
from dtcomm.launch.ranks import run_ranks

WIDTH, HIDDEN, VOCABULARY = 32, 64, 48


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        out: torch.Tensor = x + self.down(torch.tanh(self.up(x)))
        return out


def built(mesh: Any, plan: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    return torch_styles.parallelize_module(Block(), mesh, plan)


def run(model: nn.Module, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    model.to(dtype)
    tokens = torch.arange(24).view(2, 12) * 7 % VOCABULARY
    out = model(tokens)
    found = {"out": out.to_local() if isinstance(out, DTensor) else out}
    (
        found["out"].float() * torch.linspace(-1, 1, found["out"].numel()).view_as(found["out"])
    ).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        gradient = parameter.grad
        found[name] = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    return {name: tensor.detach() for name, tensor in found.items()}


def plans(**options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    theirs = {
        "embed": torch_styles.RowwiseParallel(input_layouts=Replicate()),
        "up": torch_styles.ColwiseParallel(),
        "down": torch_styles.RowwiseParallel(),
    }
    forward = {key: value for key, value in options.items() if key in ("codec", "algorithm")}
    ours = {
        "embed": tp.RowwiseParallel(input_layouts=Replicate(), **forward),
        "up": tp.ColwiseParallel(**options),
        "down": tp.RowwiseParallel(**options),
    }
    return theirs, ours


def parity(rank: int, ranks: int, dtype: torch.dtype) -> None:
    mesh = init_device_mesh("cpu", (ranks,))
    theirs, ours = plans()
    expected, got = run(built(mesh, theirs), dtype), run(built(mesh, ours), dtype)
    assert expected.keys() == got.keys()
    for name, value in expected.items():
        assert torch.equal(got[name], value), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_uncompressed_is_torch_s_to_the_bit_on_two_ranks(dtype: torch.dtype) -> None:
    run_ranks(parity, 2, dtype)


def near(rank: int, ranks: int, options: dict[str, Any], tolerance: float) -> None:
    mesh = init_device_mesh("cpu", (ranks,))
    theirs, ours = plans(**options)
    expected, got = run(built(mesh, theirs)), run(built(mesh, ours))
    for name, value in expected.items():
        error = torch.linalg.vector_norm(got[name] - value) / torch.linalg.vector_norm(value)
        assert error < tolerance, (name, float(error))
        if tolerance > 1e-3 and name == "out":
            assert not torch.equal(got[name], value)


@pytest.mark.parametrize(
    ("ranks", "options", "tolerance"),
    [
        (4, {}, 1e-5),
        (2, {"codec": "int8", "backward_codec": "int8", "latency": False}, 0.05),
        (2, {"codec": "fp16", "backward_codec": "bf16", "algorithm": "one_shot"}, 0.02),
    ],
    ids=str,
)
def test_compressed_is_near(ranks: int, options: dict[str, Any], tolerance: float) -> None:
    run_ranks(near, ranks, options, tolerance)


class Sequence(nn.Module):
    """Sequence parallelism between layers: inputs are gathered, outputs scattered."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(torch.tanh(self.up(x)))
        return out


def sequences(rank: int, ranks: int, options: dict[str, Any], tolerance: float) -> None:
    mesh = init_device_mesh("cpu", (ranks,))
    results = []
    for styles, more in ((torch_styles, {}), (tp, options)):
        torch.manual_seed(0)
        plan = {
            "up": styles.ColwiseParallel(input_layouts=Shard(1), **more),
            "down": styles.RowwiseParallel(output_layouts=Shard(1), use_local_output=False, **more),
        }
        model = torch_styles.parallelize_module(Sequence(), mesh, plan)
        x = torch.randn(2, 6, WIDTH, generator=torch.Generator().manual_seed(rank), requires_grad=True)
        out = model(x)
        assert out.placements == (Shard(1),) and tuple(out.shape) == (2, 6 * ranks, WIDTH)
        out.to_local().square().sum().backward()
        results.append([out.to_local().detach(), x.grad, model.up.weight.grad.to_local()])
    for value, got in zip(*results):
        if not options:
            assert torch.equal(got, value)
        torch.testing.assert_close(got, value, rtol=0, atol=tolerance * float(value.abs().max()))


@pytest.mark.parametrize(
    ("options", "tolerance"), [({}, 0.0), ({"codec": "int8", "backward_codec": "int8"}, 0.05)], ids=str
)
def test_sequence_parallel(options: dict[str, Any], tolerance: float) -> None:
    run_ranks(sequences, 2, options, tolerance)


def uneven(rank: int, ranks: int) -> None:
    mesh = init_device_mesh("cpu", (ranks,))
    for codec in ("none", "int8"):
        torch.manual_seed(0)
        plan = {"down": tp.RowwiseParallel(output_layouts=Shard(1), codec=codec)}
        model = torch_styles.parallelize_module(Sequence(), mesh, plan)
        x = torch.randn(2, 5, HIDDEN // ranks)
        if codec == "none":
            torch.manual_seed(0)
            plan = {"down": torch_styles.RowwiseParallel(output_layouts=Shard(1))}
            theirs = torch_styles.parallelize_module(Sequence(), mesh, plan)
            got, expected = model.down(x), theirs.down(x)
            assert got.shape == expected.shape and torch.equal(got, expected), (got.shape, expected.shape)
        else:
            with pytest.raises(ValueError, match=r"output_layouts: .*cannot be compressed; valid"):
                model.down(x)


def test_shards_of_different_sizes_are_torch_s_or_refused() -> None:
    run_ranks(uneven, 2)


def test_an_unknown_codec_is_refused_when_the_plan_is_written() -> None:
    with pytest.raises(ValueError, match="unknown codec 'int9'"):
        tp.RowwiseParallel(codec="int9")
