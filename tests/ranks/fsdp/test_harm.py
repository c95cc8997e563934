"""Sharded models compare the gradients that they apply with the uncompressed ones, whoever reduces them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, ShardingStrategy

from dtcomm import fsdp
from dtcomm.codecs import codec
from dtcomm.compress.guard import Guard
from dtcomm.fsdp.guard import SKETCHED_SHARDS, GradientShards
from dtcomm.launch.ranks import run_ranks
from tests.ranks.fsdp.models import WIDTH, Net, sharded

COARSE = "topk:ratio=0.02"  # without feedback; a window has 25 steps
GUARD = Guard(window=4, cosine=0.98, on_error="ignore")
STEPS = {"int8": 10, COARSE: 52}


def fully_sharded(spec: str, ranks: int, **options: Any) -> Any:
    model = sharded(init_device_mesh("cpu", (ranks,)))
    return fsdp.compress(model, spec, **options), model


def with_sums(spec: str, ranks: int, **options: Any) -> Any:
    model = sharded(init_device_mesh("cpu", (ranks,)))
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    return fsdp.compress(model, spec, **options), model


def with_replicas(spec: str, ranks: int, **options: Any) -> Any:
    mesh = init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicate", "shard"))
    model = sharded(mesh["shard"])
    return fsdp.compress(model, spec, replicas=mesh["replicate"], **options), model


def fsdp1(spec: str, ranks: int, **options: Any) -> Any:
    return compressed_fsdp1(spec, ShardingStrategy.FULL_SHARD, options)


def fsdp1_without_shards(spec: str, ranks: int, **options: Any) -> Any:
    return compressed_fsdp1(spec, ShardingStrategy.NO_SHARD, options)


def compressed_fsdp1(spec: str, strategy: ShardingStrategy, options: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    model = FullyShardedDataParallel(Net(), device_id=torch.device("cpu"), sharding_strategy=strategy)
    return fsdp.compress(model, spec, **options), model


def train(model: Any, optimizer: Any, rank: int, steps: int) -> None:
    generator = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        x, y = torch.randn(4, WIDTH, generator=generator), torch.randn(4, 5, generator=generator)
        (model(x) - y).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def sharded_optimizer(spec: str, ranks: int, **options: Any) -> Any:
    torch.manual_seed(0)
    model = Net()
    optimizer = fsdp.ShardedOptimizer(
        model.named_parameters(), torch.optim.SGD, lr=1e-3, gradients=spec, **options
    )
    return optimizer, model


def check_guard(rank: int, ranks: int, make: Callable[..., Any], spec: str) -> None:
    options: dict[str, Any] = {"feedback": False, "allow_inaccurate": True, "guard": GUARD}
    source, model = make(spec, ranks, **options)
    optimizer = source if make is sharded_optimizer else torch.optim.SGD(model.parameters(), lr=1e-3)
    train(model, optimizer, rank, STEPS[spec])
    report = source.report()
    assert report.fidelity is not None and f"guard: {report.fidelity}" in str(report)
    if spec == COARSE:
        assert report.fidelity.steps == 25 and report.fidelity.cosine < 0.98, report.fidelity
        assert report.events["harm: warn"] == 1
        assert all(event.cause == "compression" for event in source.events if event.kind == "harm")
    else:
        assert report.fidelity.cosine > 0.999 and abs(report.fidelity.norm_ratio - 1) < 0.01, report.fidelity
        assert report.events == {}


@pytest.mark.parametrize("spec", STEPS)
@pytest.mark.parametrize(
    ("make", "ranks"),
    [
        *[(fully_sharded, 2), (with_sums, 3), (with_replicas, 4)],
        *[(fsdp1, 2), (fsdp1_without_shards, 2), (sharded_optimizer, 3)],
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_harm_is_measured(make: Callable[..., Any], ranks: int, spec: str) -> None:
    run_ranks(check_guard, ranks, make, spec, fresh=make is sharded_optimizer)  # its hooks outlive the task


@pytest.mark.parametrize("ranks", [1, 2, SKETCHED_SHARDS, SKETCHED_SHARDS + 1, 3 * SKETCHED_SHARDS + 1])
def test_the_sketches_of_shards_add_up_to_that_of_the_whole(ranks: int) -> None:
    int8, cpu = codec("int8"), torch.device("cpu")
    x = torch.randn(ranks * 20_000)
    whole = GradientShards("m", int8, 20_000, range(ranks), ranks).sketch(cpu)(x)
    parts = [
        GradientShards("m", int8, 20_000, (rank,), ranks).sketch(cpu)(shard)
        for rank, shard in enumerate(x.view(ranks, -1))
    ]
    torch.testing.assert_close(torch.stack(parts).sum(0), whole)
    assert 1 <= sum(bool(part.any()) for part in parts) <= SKETCHED_SHARDS
