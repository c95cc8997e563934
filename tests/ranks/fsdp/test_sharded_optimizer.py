"""The sharded optimizer compared to DDP with an unsharded optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dtcomm import fsdp
from dtcomm.launch.ranks import run_ranks
from tests.ranks.fsdp.models import WIDTH, Net


def batch(rank: int, number: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * number + rank))


def made(**options: Any) -> tuple[nn.Module, fsdp.ShardedOptimizer]:
    torch.manual_seed(dist.get_rank())  # all ranks start with rank 0's parameters
    model = Net()
    options = {"optimizer": torch.optim.AdamW, "lr": 0.01, "bucket_bytes": 4096} | options
    return model, fsdp.ShardedOptimizer(model.named_parameters(), **options)


def steps(model: nn.Module, optimiser: torch.optim.Optimizer, rank: int, numbers: range) -> list[float]:
    losses = []
    for number in numbers:
        optimiser.zero_grad()
        loss = model(batch(rank, number)).square().mean()
        loss.backward()
        optimiser.step()
        losses.append(float(loss))
    return losses


def whole(rank: int, n: int) -> nn.Module:
    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    steps(model, torch.optim.AdamW(model.parameters(), lr=0.01), rank, range(4))
    return model.module


def beside_ddp(rank: int, n: int, options: dict[str, Any], tolerance: float) -> None:
    expected = torch.cat([p.detach().flatten() for p in whole(rank, n).parameters()])
    model, optimiser = made(**options)
    steps(model, optimiser, rank, range(4))
    got = torch.cat([p.detach().flatten() for p in model.parameters()])
    error = torch.linalg.vector_norm(got - expected) / torch.linalg.vector_norm(expected)
    assert error <= tolerance, float(error)
    everybody = [torch.empty_like(got) for _ in range(n)]
    dist.all_gather(everybody, got)
    assert all(torch.equal(each, got) for each in everybody)
    report = optimiser.report()
    assert len(report.modules) > 3
    for kinds in report.modules.values():
        assert kinds["gradients"].calls == kinds["parameters"].calls == 4
    memory = optimiser.memory()
    numel = sum(p.numel() for p in model.parameters())
    assert memory["optimizer"] == pytest.approx(2 * 4 * numel / n, rel=0.05)
    assert memory["gradients"] == (
        memory["parameters"] if optimiser.stage == 1 else pytest.approx(8712, rel=0.2)
    )


LOSSY = [
    {"gradients": "int8"},
    {"gradients": "loco:int4", "parameters_codec": "int8"},
    {"gradients": "ef:int4", "parameters_codec": "delta:int4:block=128"},
]


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("n", [2, 3])
def test_uncompressed_is_ddp(stage: int, n: int) -> None:
    # Adam divides by roots of tiny numbers, so on three ranks the order of a sum matters.
    run_ranks(beside_ddp, n, {"stage": stage}, 1e-6 if n == 2 else 1e-4)


@pytest.mark.parametrize("options", LOSSY, ids=str)
def test_compressed_is_near(options: dict[str, Any]) -> None:
    run_ranks(beside_ddp, 2, options, 0.05)


def training_loop_features(rank: int, n: int) -> None:
    """Accumulation, clipping, unused parameters, schedulers, a state loaded into the model."""
    results = []
    for stage in (1, 2):
        model, optimiser = made(stage=stage, optimizer=torch.optim.SGD, lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimiser, 1, 0.5)
        with optimiser.no_sync():
            model(batch(rank, 0)).square().mean().backward()
        model(batch(rank, 1)).square().mean().backward()
        norm = optimiser.clip_grad_norm_(1e-3)
        optimiser.step()
        schedule.step()
        assert optimiser.param_groups[0]["lr"] == 0.05
        optimiser.zero_grad()
        model.blocks[1](batch(rank, 2)).square().mean().backward()  # the other parameters have no gradient
        optimiser.step()
        results.append((norm, [p.detach().clone() for p in model.parameters()]))
    (first, a), (second, b) = results
    assert torch.allclose(first, second) and first > 1e-3
    assert all(torch.allclose(x, y, atol=1e-7) for x, y in zip(a, b, strict=True))
    torch.manual_seed(0)
    reference = Net()
    for number in range(2):
        sum(reference(batch(r, number)).square().mean() / n for r in range(n)).backward()
    want = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1e-3)
    assert torch.allclose(want, first, rtol=1e-4)

    model, optimiser = made(optimizer=torch.optim.SGD, lr=0.0)
    model.load_state_dict(reference.state_dict())
    steps(model, optimiser, rank, range(1))
    assert all(torch.equal(x, y) for x, y in zip(model.parameters(), reference.parameters(), strict=True))


def test_training_loop_features() -> None:
    run_ranks(training_loop_features, 2)


def resumed(rank: int, n: int, options: dict[str, Any]) -> None:
    model, optimiser = made(**options)
    expected = steps(model, optimiser, rank, range(6))
    first, one = made(**options)
    steps(first, one, rank, range(3))
    second, two = made(**options)
    second.load_state_dict(first.state_dict())
    two.load_state_dict(one.state_dict())
    assert steps(second, two, rank, range(3, 6)) == expected[3:]


@pytest.mark.parametrize("options", LOSSY, ids=str)
def test_a_resumed_run_continues_bit_for_bit(options: dict[str, Any]) -> None:
    run_ranks(resumed, 2, options)


def half(rank: int, n: int) -> None:
    """bf16 parameters are updated in fp32: updates below bf16's resolution add up."""
    model = nn.Linear(64, 64, bias=False).to(torch.bfloat16)
    nn.init.ones_(model.weight)
    optimiser = fsdp.ShardedOptimizer(model.named_parameters(), torch.optim.SGD, lr=1e-3)
    for _ in range(8):
        model(torch.ones(1, 64, dtype=torch.bfloat16)).sum().backward()
        optimiser.step()
        optimiser.zero_grad()
    assert torch.equal(model.weight, torch.full((64, 64), 1 - 8e-3).to(torch.bfloat16))


def test_bf16_parameters() -> None:
    run_ranks(half, 2)


def refusals(rank: int, n: int) -> None:
    model = Net()
    with pytest.raises(ValueError, match="stage: expected 1 or 2, got 3"):
        fsdp.ShardedOptimizer(model.named_parameters(), torch.optim.SGD, stage=3)
    with pytest.raises(TypeError, match="parameters: expected named parameters"):
        fsdp.ShardedOptimizer(model.parameters(), torch.optim.SGD)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="gradients: 'delta:' is not valid here"):
        fsdp.ShardedOptimizer(model.named_parameters(), torch.optim.SGD, gradients="delta:int8")


def test_invalid_arguments_are_refused() -> None:
    run_ranks(refusals, 2)
