"""Memory of a sharded model: at its peak compared to plain FSDP's, and by category."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dtcomm import fsdp
from dtcomm.launch.ranks import run_ranks
from tests.support.rank_tests import on_ranks

WIDTH, LAYERS = 768, 6
NUMEL = LAYERS * WIDTH * (WIDTH + 1)
UNIT = 4 * WIDTH * (WIDTH + 1)
SEGMENT = 24 * 2**20  # the engine's shared memory, once per process group


class DeepModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def train(model: nn.Module, optimizer: torch.optim.Optimizer, count: int = 2) -> None:
    for _ in range(count):
        optimizer.zero_grad()
        model(torch.ones(1, WIDTH)).square().mean().backward()
        optimizer.step()


def make_model(
    mesh: Any, codecs: dict[str, Any] | None
) -> tuple[nn.Module, torch.optim.Optimizer, fsdp.FSDPState | None]:
    model = DeepModel()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    state = None if codecs is None else fsdp.compress(model, **codecs)
    return model, torch.optim.AdamW(model.parameters()), state


def peak_memory(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return the peak resident memory of the process during training, in bytes."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    train(model, optimizer)
    status = Path("/proc/self/status").read_text().splitlines()
    high_water_mark = next(line for line in status if line.startswith("VmHWM"))
    return int(high_water_mark.split()[1]) * 1024


def compare_peak(rank: int, ranks: int, codecs: dict[str, Any]) -> tuple[int, int, dict[str, float]]:
    """Return the peak compared to plain FSDP's, its bound, and the lasting memory by category."""
    mesh = init_device_mesh("cpu", (ranks,))
    model, optimizer, _ = make_model(mesh, None)
    train(model, optimizer, 1)
    plain = peak_memory(model, optimizer)
    del model, optimizer
    model, optimizer, state = make_model(mesh, codecs)
    assert state is not None
    train(model, optimizer, 1)
    extra = peak_memory(model, optimizer) - plain
    report = state.report()
    shards = [parameter.to_local() for parameter in model.parameters()]
    gradients = [p.grad.to_local() for p in model.parameters() if p.grad is not None]
    moments = [
        value.to_local() for values in optimizer.state.values() for value in values.values() if value.ndim
    ]
    sizes = {
        "parameters": float(sum(shard.nbytes for shard in shards)),
        "gradients": float(sum(gradient.nbytes for gradient in gradients)),
        "optimizer": float(sum(moment.nbytes for moment in moments)),
        "residuals": float(report.residual_bytes),
        "references": float(report.memory["references"]),
    }
    # Every rank of a host maps all shared buffers; two units in fp32 are added while they are encoded.
    bound = (
        report.residual_bytes
        + report.memory["references"]
        + ranks * report.memory["shared buffers"]
        + 2 * UNIT
        + SEGMENT
    )
    return extra, bound, sizes


#: Options → bytes that a rank keeps for each element of the model.
CONFIGURATIONS: list[tuple[dict[str, Any], dict[str, float]]] = [
    ({"gradients": "int8", "parameters": "fp8_e4m3"}, {"residuals": 0, "references": 0}),
    ({"gradients": "ef:int4", "residual": "bf16"}, {"residuals": 2, "references": 0}),
    ({"preset": "loco", "parameters": "delta:int8"}, {"residuals": 1 + 2 / 256, "references": 4}),
]
#: Of two ranks: a shard in fp32, and two such shards of AdamW.
SHARDED = {"parameters": 2, "gradients": 2, "optimizer": 4}


@pytest.mark.slow
@pytest.mark.parametrize(("codecs", "kept"), CONFIGURATIONS, ids=str)
def test_peak_and_lasting_memory(codecs: dict[str, Any], kept: dict[str, float]) -> None:
    for extra, bound, sizes in run_ranks(compare_peak, 2, codecs, fresh=True):
        assert extra <= bound, (extra / 2**20, bound / 2**20)
        assert sizes == pytest.approx(
            {name: NUMEL * size for name, size in (SHARDED | kept).items()}, rel=0.01
        )


@on_ranks(2)
def test_the_sharded_optimizer_keeps_whole_parameters_and_shards_of_the_rest(rank: int, ranks: int) -> None:
    for stage in (1, 2):
        model = DeepModel()
        optimizer = fsdp.ShardedOptimizer(
            model.named_parameters(), torch.optim.AdamW, stage=stage, gradients="ef:int8", residual="int8"
        )
        train(model, optimizer, 1)
        sizes = optimizer.memory()
        assert sizes["parameters"] == pytest.approx(4 * NUMEL, rel=0.01)
        assert sizes["shards"] == pytest.approx(4 * NUMEL / ranks, rel=0.01)
        assert sizes["optimizer"] == pytest.approx(8 * NUMEL / ranks, rel=0.01)
        assert sizes["residuals"] == pytest.approx((1 + 4 / 64) * NUMEL, rel=0.01)
