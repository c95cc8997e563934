"""The hook with compilation, activation checkpointing and autocast."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from dtcomm import ddp
from dtcomm.launch.ranks import run_ranks
from tests.unit.ddp.models import SMALL_BUCKETS, Net, batch, gradients


class Recomputed(nn.Module):
    """`Net` whose activations are computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(self.net, x, use_reentrant=False)
        return out


# Dynamo splits its graphs at DDP's buckets, and is particular about their sizes: compiled models have the usual ones.


def compiled_inside() -> tuple[DistributedDataParallel, Callable[..., Any]]:
    net: Any = torch.compile(Net(), backend="aot_eager")
    model = DistributedDataParallel(net)
    return model, model


def compiled_outside() -> tuple[DistributedDataParallel, Callable[..., Any]]:
    model = DistributedDataParallel(
        Net()
    )  # dynamo splits its graph at buckets, and is particular about their sizes
    return model, torch.compile(model, backend="aot_eager")


def recomputed() -> tuple[DistributedDataParallel, Callable[..., Any]]:
    model = DistributedDataParallel(Recomputed(), **SMALL_BUCKETS)
    return model, model


def autocast() -> tuple[DistributedDataParallel, Callable[..., Any]]:
    model = DistributedDataParallel(Net(), **SMALL_BUCKETS)
    return model, model


WRAPPERS = {make.__name__: make for make in (compiled_inside, compiled_outside, recomputed, autocast)}


def compare_to_ddp(rank: int, world_size: int, wrapper: str) -> None:
    """Compare three steps with plain DDP, bit for bit for `none`; DDP rebuilds its buckets after the first one."""
    runs = {}
    for spec in ("", "none", "int8"):
        torch.manual_seed(0)
        model, call = WRAPPERS[wrapper]()
        state = ddp.compress(model, spec) if spec else None
        by_step = []
        for step in range(3):
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16) if wrapper == "autocast" else nullcontext():
                out = call(batch(rank, step))
            out.float().square().mean().backward()
            by_step.append(gradients(model))
        runs[spec] = by_step
        if state is not None:
            assert state.steps == 3 and state.error is None
            assert {row.codec for row in state.report().rows} == {"none", spec}
    for plain, uncompressed, compressed in zip(runs[""], runs["none"], runs["int8"], strict=True):
        for name, gradient in plain.items():
            assert torch.equal(gradient, uncompressed[name]), name
            torch.testing.assert_close(
                gradient, compressed[name], rtol=0, atol=0.05 * float(gradient.abs().max())
            )


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_gradients_equal_those_of_plain_ddp(wrapper: str) -> None:
    run_ranks(compare_to_ddp, 2, wrapper)
