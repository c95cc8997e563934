"""The styles that redistribute activations, compared to torch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor import parallel as torch_styles

from dtcomm import tp
from dtcomm.launch.ranks import run_ranks
from tests.support.rank_tests import on_ranks

WIDTH = 32
REDISTRIBUTIONS = [
    *[(Shard(1), Replicate()), (Replicate(), Shard(1)), (Partial(), Replicate())],
    *[(Partial(), Shard(2)), (Shard(1), Shard(2)), (Shard(0), Shard(0))],
]
INT8 = {"codec": "int8", "backward_codec": "int8"}


class NormAndInner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Identity()

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x)


def output_and_gradient(output: Any, x: torch.Tensor) -> list[torch.Tensor]:
    local = output.to_local() if isinstance(output, DTensor) else output
    (local * torch.linspace(-1, 1, local.numel()).view_as(local)).sum().backward()
    assert x.grad is not None
    return [local.detach(), x.grad]


def compare_redistributions(rank: int, ranks: int, local_output: bool, options: dict[str, str]) -> None:
    mesh = init_device_mesh("cpu", (ranks,))
    for source, target in REDISTRIBUTIONS:
        if options and isinstance(source, Shard) and isinstance(target, Shard) and source != target:
            continue
        plans = {
            "PrepareModuleInput": {"input_layouts": (source,), "desired_input_layouts": (target,)},
            "PrepareModuleOutput": {"output_layouts": source, "desired_output_layouts": target},
        }
        for style, layouts in plans.items():
            results = []
            for styles, codec_options in ((torch_styles, {}), (tp, options)):
                plan = getattr(styles, style)(**layouts, use_local_output=local_output, **codec_options)
                model = torch_styles.parallelize_module(NormAndInner(), mesh, {"inner": plan})
                x = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(rank)).requires_grad_()
                results.append(output_and_gradient(model(x), x))
            for expected, actual in zip(*results, strict=True):
                redistribution = f"{source!r} to {target!r}"
                if not options:
                    assert torch.equal(actual, expected), redistribution
                torch.testing.assert_close(actual, expected, rtol=0, atol=0.02 * float(expected.abs().max()))


@pytest.mark.parametrize("local_output", [True, False])
def test_uncompressed_styles_equal_torchs_bit_for_bit(local_output: bool) -> None:
    run_ranks(compare_redistributions, 2, local_output, {})


def test_compressed_styles_are_close_to_torchs() -> None:
    run_ranks(compare_redistributions, 2, True, INT8)


@on_ranks(2)
def test_sequence_parallel(rank: int, ranks: int) -> None:
    mesh = init_device_mesh("cpu", (ranks,))
    for wrap in (False, True):
        results = []
        for styles, codec_options in ((torch_styles, {}), (tp, {}), (tp, INT8)):
            model = torch_styles.parallelize_module(
                NormAndInner(), mesh, {"norm": styles.SequenceParallel(**codec_options)}
            )
            seed = 0 if wrap else rank
            x = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(seed), requires_grad=True)
            argument = DTensor.from_local(x, mesh, [Replicate()], run_check=False) if wrap else x
            output = model.norm(argument)
            assert output.placements == (Shard(1),)
            results.append(output_and_gradient(output, x))
        for expected, uncompressed, compressed in zip(*results, strict=True):
            assert torch.equal(uncompressed, expected)
            torch.testing.assert_close(compressed, expected, rtol=0, atol=0.02 * float(expected.abs().max()))


@on_ranks(2)
def test_redistributions_that_cannot_be_compressed_are_refused(rank: int, ranks: int) -> None:
    mesh = init_device_mesh("cpu", (ranks,))
    style = tp.PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Shard(2),), codec="int8")
    model = torch_styles.parallelize_module(NormAndInner(), mesh, {"inner": style})
    with pytest.raises(
        ValueError, match=r"input_layouts: .*cannot be compressed; valid: from or to Replicate"
    ):
        model(torch.ones(2, 4, WIDTH))
    style = tp.PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1), codec="int8")
    model = torch_styles.parallelize_module(NormAndInner(), mesh, {"inner": style})
    with pytest.raises(ValueError, match=r"output_layouts: .*cannot be compressed"):
        model(torch.ones(2, 5, WIDTH))
