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
from tests.support.rank_tests import on_ranks

WIDTH, HIDDEN, VOCABULARY = 32, 64, 48


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        output: torch.Tensor = x + self.down(torch.tanh(self.up(x)))
        return output


def parallelize(mesh: Any, plan: dict[str, Any]) -> nn.Module:
    torch.manual_seed(0)
    return torch_styles.parallelize_module(Block(), mesh, plan)


def run(model: nn.Module, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    model.to(dtype)
    tokens = torch.arange(24).view(2, 12) * 7 % VOCABULARY
    output = model(tokens)
    results = {"out": output.to_local() if isinstance(output, DTensor) else output}
    (
        results["out"].float() * torch.linspace(-1, 1, results["out"].numel()).view_as(results["out"])
    ).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        gradient = parameter.grad
        results[name] = gradient.to_local() if isinstance(gradient, DTensor) else gradient
    return {name: tensor.detach() for name, tensor in results.items()}


def plans(**options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    torch_plan = {
        "embed": torch_styles.RowwiseParallel(input_layouts=Replicate()),
        "up": torch_styles.ColwiseParallel(),
        "down": torch_styles.RowwiseParallel(),
    }
    forward = {
        key: expected_value for key, expected_value in options.items() if key in ("codec", "algorithm")
    }
    plan = {
        "embed": tp.RowwiseParallel(input_layouts=Replicate(), **forward),
        "up": tp.ColwiseParallel(**options),
        "down": tp.RowwiseParallel(**options),
    }
    return torch_plan, plan


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@on_ranks(2)
def test_uncompressed_styles_equal_torchs_bit_for_bit_on_two_ranks(
    rank: int, ranks: int, dtype: torch.dtype
) -> None:
    mesh = init_device_mesh("cpu", (ranks,))
    torch_plan, plan = plans()
    expected, actual = run(parallelize(mesh, torch_plan), dtype), run(parallelize(mesh, plan), dtype)
    assert expected.keys() == actual.keys()
    for name, expected_value in expected.items():
        assert torch.equal(actual[name], expected_value), name


@pytest.mark.parametrize(
    ("ranks", "options", "tolerance"),
    [
        (4, {}, 1e-5),
        (2, {"codec": "int8", "backward_codec": "int8", "latency": False}, 0.05),
        (2, {"codec": "fp16", "backward_codec": "bf16", "algorithm": "one_shot"}, 0.02),
    ],
    ids=str,
)
@on_ranks()
def test_compressed_styles_are_close_to_torchs(
    rank: int, ranks: int, options: dict[str, Any], tolerance: float
) -> None:
    mesh = init_device_mesh("cpu", (ranks,))
    torch_plan, plan = plans(**options)
    expected, actual = run(parallelize(mesh, torch_plan)), run(parallelize(mesh, plan))
    for name, expected_value in expected.items():
        error = (actual[name] - expected_value).norm() / expected_value.norm()
        assert error < tolerance, (name, float(error))
        if tolerance > 1e-3 and name == "out":
            assert not torch.equal(actual[name], expected_value)


class Sequence(nn.Module):
    """Sequence parallelism between layers: inputs are gathered, outputs scattered."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.down(torch.tanh(self.up(x)))
        return output


@pytest.mark.parametrize(
    ("options", "tolerance"), [({}, 0.0), ({"codec": "int8", "backward_codec": "int8"}, 0.05)], ids=str
)
@on_ranks(2)
def test_sequence_parallel(rank: int, ranks: int, options: dict[str, Any], tolerance: float) -> None:
    mesh = init_device_mesh("cpu", (ranks,))
    results = []
    for styles, codec_options in ((torch_styles, {}), (tp, options)):
        torch.manual_seed(0)
        plan = {
            "up": styles.ColwiseParallel(input_layouts=Shard(1), **codec_options),
            "down": styles.RowwiseParallel(output_layouts=Shard(1), use_local_output=False, **codec_options),
        }
        model = torch_styles.parallelize_module(Sequence(), mesh, plan)
        x = torch.randn(2, 6, WIDTH, generator=torch.Generator().manual_seed(rank), requires_grad=True)
        output = model(x)
        assert output.placements == (Shard(1),) and tuple(output.shape) == (2, 6 * ranks, WIDTH)
        output.to_local().square().sum().backward()
        results.append([output.to_local().detach(), x.grad, model.up.weight.grad.to_local()])
    for expected_value, actual in zip(*results):
        if not options:
            assert torch.equal(actual, expected_value)
        torch.testing.assert_close(
            actual, expected_value, rtol=0, atol=tolerance * float(expected_value.abs().max())
        )


@on_ranks(2)
def test_shards_of_different_sizes_are_left_to_torch_or_refused(rank: int, ranks: int) -> None:
    mesh = init_device_mesh("cpu", (ranks,))
    for codec in ("none", "int8"):
        torch.manual_seed(0)
        plan = {"down": tp.RowwiseParallel(output_layouts=Shard(1), codec=codec)}
        model = torch_styles.parallelize_module(Sequence(), mesh, plan)
        x = torch.randn(2, 5, HIDDEN // ranks)
        if codec == "none":
            torch.manual_seed(0)
            plan = {"down": torch_styles.RowwiseParallel(output_layouts=Shard(1))}
            torch_model = torch_styles.parallelize_module(Sequence(), mesh, plan)
            actual, expected = model.down(x), torch_model.down(x)
            assert actual.shape == expected.shape and torch.equal(actual, expected), (
                actual.shape,
                expected.shape,
            )
        else:
            with pytest.raises(ValueError, match=r"output_layouts: .*cannot be compressed; valid"):
                model.down(x)


def test_an_unknown_codec_is_refused_when_the_plan_is_written() -> None:
    with pytest.raises(ValueError, match="unknown codec 'int9'"):
        tp.RowwiseParallel(codec="int9")
    with pytest.raises(ValueError, match=r"^backward_codec: unknown codec 'int9'"):
        tp.ColwiseParallel(backward_codec="int9")
    with pytest.raises(ValueError, match=r"^codec: 'lossless' cannot be summed"):
        tp.RowwiseParallel(codec="lossless")
