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

WIDTH = 32
REDISTRIBUTIONS = [
    (Shard(1), Replicate()),
    (Replicate(), Shard(1)),
    (Partial(), Replicate()),
    (Partial(), Shard(2)),
    (Shard(1), Shard(2)),
    (Shard(0), Shard(0)),
]
INT8 = {"codec": "int8", "backward_codec": "int8"}


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = nn.Identity()

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x)


def result(out: Any, x: torch.Tensor) -> list[torch.Tensor]:
    local = out.to_local() if isinstance(out, DTensor) else out
    (local * torch.linspace(-1, 1, local.numel()).view_as(local)).sum().backward()
    assert x.grad is not None
    return [local.detach(), x.grad]


def moves(rank: int, ranks: int, local_output: bool, options: dict[str, str]) -> None:
    mesh = init_device_mesh("cpu", (ranks,))
    for given, wanted in REDISTRIBUTIONS:
        if options and isinstance(given, Shard) and isinstance(wanted, Shard) and given != wanted:
            continue
        plans = [
            lambda styles, more, given=given, wanted=wanted: styles.PrepareModuleInput(
                input_layouts=(given,),
                desired_input_layouts=(wanted,),
                use_local_output=local_output,
                **more,
            ),
            lambda styles, more, given=given, wanted=wanted: styles.PrepareModuleOutput(
                output_layouts=given, desired_output_layouts=wanted, use_local_output=local_output, **more
            ),
        ]
        for plan in plans:
            results = []
            for styles, more in ((torch_styles, {}), (tp, options)):
                model = torch_styles.parallelize_module(Halves(), mesh, {"inner": plan(styles, more)})
                x = torch.randn(
                    2, 4, WIDTH, generator=torch.Generator().manual_seed(rank), requires_grad=True
                )
                results.append(result(model(x), x))
            for expected, got in zip(*results, strict=True):
                what = f"{given!r} to {wanted!r}"
                if not options:
                    assert torch.equal(got, expected), what
                torch.testing.assert_close(got, expected, rtol=0, atol=0.02 * float(expected.abs().max()))


@pytest.mark.parametrize("local_output", [True, False])
def test_uncompressed_is_torch_s_to_the_bit(local_output: bool) -> None:
    run_ranks(moves, 2, local_output, {})


def test_compressed_is_near() -> None:
    run_ranks(moves, 2, True, INT8)


def sequence(rank: int, ranks: int) -> None:
    mesh = init_device_mesh("cpu", (ranks,))
    for wrap in (False, True):
        results = []
        for styles, more in ((torch_styles, {}), (tp, {}), (tp, INT8)):
            model = torch_styles.parallelize_module(Halves(), mesh, {"norm": styles.SequenceParallel(**more)})
            seed = 0 if wrap else rank
            x = torch.randn(2, 4, WIDTH, generator=torch.Generator().manual_seed(seed), requires_grad=True)
            given = DTensor.from_local(x, mesh, [Replicate()], run_check=False) if wrap else x
            out = model.norm(given)
            assert out.placements == (Shard(1),)
            results.append(result(out, x))
        for expected, same, near in zip(*results, strict=True):
            assert torch.equal(same, expected)
            torch.testing.assert_close(near, expected, rtol=0, atol=0.02 * float(expected.abs().max()))


def test_sequence_parallel() -> None:
    run_ranks(sequence, 2)


def refused(rank: int, ranks: int) -> None:
    mesh = init_device_mesh("cpu", (ranks,))
    style = tp.PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Shard(2),), codec="int8")
    model = torch_styles.parallelize_module(Halves(), mesh, {"inner": style})
    with pytest.raises(
        ValueError, match=r"input_layouts: .*cannot be compressed; valid: from or to Replicate"
    ):
        model(torch.ones(2, 4, WIDTH))
    style = tp.PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1), codec="int8")
    model = torch_styles.parallelize_module(Halves(), mesh, {"inner": style})
    with pytest.raises(ValueError, match=r"output_layouts: .*cannot be compressed"):
        model(torch.ones(2, 5, WIDTH))


def test_what_cannot_be_compressed_is_refused() -> None:
    run_ranks(refused, 2)
