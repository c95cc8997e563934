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


def make_optimizer(**options: Any) -> tuple[nn.Module, fsdp.ShardedOptimizer]:
    torch.manual_seed(dist.get_rank())  # all ranks start with rank 0's parameters
    model = Net()
    options = {"optimizer": torch.optim.AdamW, "lr": 0.01, "bucket_bytes": 4096} | options
    return model, fsdp.ShardedOptimizer(model.named_parameters(), **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, batches: range) -> list[float]:
    losses = []
    for number in batches:
        optimizer.zero_grad()
        loss = model(batch(rank, number)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses


def train_with_ddp(rank: int, n: int) -> nn.Module:
    torch.manual_seed(0)
    model = DistributedDataParallel(Net())
    train(model, torch.optim.AdamW(model.parameters(), lr=0.01), rank, range(4))
    return model.module


def compare_to_ddp(rank: int, n: int, options: dict[str, Any], tolerance: float) -> None:
    expected = torch.cat([p.detach().flatten() for p in train_with_ddp(rank, n).parameters()])
    model, optimizer = make_optimizer(**options)
    train(model, optimizer, rank, range(4))
    actual = torch.cat([p.detach().flatten() for p in model.parameters()])
    error = torch.linalg.vector_norm(actual - expected) / torch.linalg.vector_norm(expected)
    assert error <= tolerance, float(error)
    gathered = [torch.empty_like(actual) for _ in range(n)]
    dist.all_gather(gathered, actual)
    assert all(torch.equal(parameters, actual) for parameters in gathered)
    report = optimizer.report()
    assert len(report.modules) > 3
    for by_kind in report.modules.values():
        assert by_kind["gradients"].calls == by_kind["parameters"].calls == 4
    memory = optimizer.memory()
    numel = sum(p.numel() for p in model.parameters())
    assert memory["optimizer"] == pytest.approx(2 * 4 * numel / n, rel=0.05)
    assert memory["gradients"] == (
        memory["parameters"] if optimizer.stage == 1 else pytest.approx(8712, rel=0.2)
    )


LOSSY = [
    {"gradients": "int8"},
    {"gradients": "loco:int4", "parameters_codec": "int8"},
    {"gradients": "ef:int4", "parameters_codec": "delta:int4:block=128"},
]


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("n", [2, 3])
def test_uncompressed_equals_ddp(stage: int, n: int) -> None:
    # Adam divides by roots of tiny numbers, so on three ranks the order of a sum matters.
    run_ranks(compare_to_ddp, n, {"stage": stage}, 1e-6 if n == 2 else 1e-4)


@pytest.mark.parametrize("options", LOSSY, ids=str)
def test_compressed_training_is_close(options: dict[str, Any]) -> None:
    run_ranks(compare_to_ddp, 2, options, 0.05)


def training_loop_features(rank: int, n: int) -> None:
    """Accumulation, clipping, unused parameters, schedulers, a state loaded into the model."""
    results = []
    for stage in (1, 2):
        model, optimizer = make_optimizer(stage=stage, optimizer=torch.optim.SGD, lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        with optimizer.no_sync():
            model(batch(rank, 0)).square().mean().backward()
        model(batch(rank, 1)).square().mean().backward()
        norm = optimizer.clip_grad_norm_(1e-3)
        optimizer.step()
        scheduler.step()
        assert optimizer.param_groups[0]["lr"] == 0.05
        optimizer.zero_grad()
        model.blocks[1](batch(rank, 2)).square().mean().backward()  # the other parameters have no gradient
        optimizer.step()
        results.append((norm, [p.detach().clone() for p in model.parameters()]))
    (norm, stage1), (other_norm, stage2) = results
    assert torch.allclose(norm, other_norm) and norm > 1e-3
    assert all(torch.allclose(x, y, atol=1e-7) for x, y in zip(stage1, stage2, strict=True))
    torch.manual_seed(0)
    reference = Net()
    for number in range(2):
        sum(reference(batch(r, number)).square().mean() / n for r in range(n)).backward()
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1e-3)
    assert torch.allclose(expected, norm, rtol=1e-4)

    model, optimizer = make_optimizer(optimizer=torch.optim.SGD, lr=0.0)
    model.load_state_dict(reference.state_dict())
    train(model, optimizer, rank, range(1))
    assert all(torch.equal(x, y) for x, y in zip(model.parameters(), reference.parameters(), strict=True))


def test_training_loop_features() -> None:
    run_ranks(training_loop_features, 2)


def compare_resumed(rank: int, n: int, options: dict[str, Any]) -> None:
    model, optimizer = make_optimizer(**options)
    expected = train(model, optimizer, rank, range(6))
    first, first_optimizer = make_optimizer(**options)
    train(first, first_optimizer, rank, range(3))
    second, second_optimizer = make_optimizer(**options)
    second.load_state_dict(first.state_dict())
    second_optimizer.load_state_dict(first_optimizer.state_dict())
    assert train(second, second_optimizer, rank, range(3, 6)) == expected[3:]


@pytest.mark.parametrize("options", LOSSY, ids=str)
def test_a_resumed_run_continues_bit_for_bit(options: dict[str, Any]) -> None:
    run_ranks(compare_resumed, 2, options)


def check_bf16(rank: int, n: int) -> None:
    """bf16 parameters are updated in fp32: updates below bf16's resolution add up."""
    model = nn.Linear(64, 64, bias=False).to(torch.bfloat16)
    nn.init.ones_(model.weight)
    optimizer = fsdp.ShardedOptimizer(model.named_parameters(), torch.optim.SGD, lr=1e-3)
    for _ in range(8):
        model(torch.ones(1, 64, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(model.weight, torch.full((64, 64), 1 - 8e-3).to(torch.bfloat16))


def test_bf16_parameters() -> None:
    run_ranks(check_bf16, 2)


def check_refusals(rank: int, n: int) -> None:
    model = Net()
    with pytest.raises(ValueError, match="stage: expected 1 or 2, got 3"):
        fsdp.ShardedOptimizer(model.named_parameters(), torch.optim.SGD, stage=3)
    with pytest.raises(TypeError, match="parameters: expected named parameters"):
        fsdp.ShardedOptimizer(model.parameters(), torch.optim.SGD)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="gradients: 'delta:' is not valid here"):
        fsdp.ShardedOptimizer(model.named_parameters(), torch.optim.SGD, gradients="delta:int8")


def test_invalid_arguments_are_refused() -> None:
    run_ranks(check_refusals, 2)
