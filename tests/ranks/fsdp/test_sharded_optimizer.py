"""The sharded optimizer compared to DDP with an unsharded optimizer."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dtcomm import fsdp
from dtcomm.launch.ranks import run_ranks
from tests.ranks.fsdp.models import WIDTH, Net
from tests.support.rank_tests import on_ranks


def batch(rank: int, number: int) -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * number + rank))


def make_optimizer(**options: Any) -> tuple[nn.Module, fsdp.ShardedOptimizer]:
    torch.manual_seed(dist.get_rank())  # all ranks start with rank 0's parameters
    model = Net()
    options = {
        "optimizer": torch.optim.AdamW,
        "lr": 0.01,
        "bucket_bytes": 4096,
        "gradients": "none",
    } | options
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
    {"gradients": "loco:int4", "parameters": "int8"},
    {"gradients": "ef:int4", "parameters": "delta:int4:block=128"},
]


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("n", [2, 3])
def test_uncompressed_equals_ddp(stage: int, n: int) -> None:
    # Adam divides by roots of tiny numbers, so on three ranks the order of a sum matters.
    run_ranks(compare_to_ddp, n, {"stage": stage}, 1e-6 if n == 2 else 1e-4)


@pytest.mark.parametrize("options", LOSSY, ids=str)
def test_compressed_training_is_close(options: dict[str, Any]) -> None:
    run_ranks(compare_to_ddp, 2, options, 0.05)


@on_ranks(2)
def test_training_loop_features(rank: int, n: int) -> None:
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


@pytest.mark.parametrize("options", LOSSY, ids=str)
@on_ranks(2)
def test_a_resumed_run_continues_bit_for_bit(rank: int, n: int, options: dict[str, Any]) -> None:
    model, optimizer = make_optimizer(**options)
    expected = train(model, optimizer, rank, range(6))
    first, first_optimizer = make_optimizer(**options)
    train(first, first_optimizer, rank, range(3))
    second, second_optimizer = make_optimizer(**options)
    second.load_state_dict(first.state_dict())
    second_optimizer.load_state_dict(first_optimizer.state_dict())
    assert train(second, second_optimizer, rank, range(3, 6)) == expected[3:]


@on_ranks(2)
def test_bf16_parameters(rank: int, n: int) -> None:
    """bf16 parameters are updated in fp32: updates below bf16's resolution add up."""
    model = nn.Linear(64, 64, bias=False).to(torch.bfloat16)
    nn.init.ones_(model.weight)
    optimizer = fsdp.ShardedOptimizer(model.named_parameters(), torch.optim.SGD, lr=1e-3, gradients="none")
    for _ in range(8):
        model(torch.ones(1, 64, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(model.weight, torch.full((64, 64), 1 - 8e-3).to(torch.bfloat16))


REFUSALS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"stage": 3}, ValueError, "stage: expected 1 or 2, got 3"),
    ({"bucket_bytes": "25MiB"}, TypeError, "bucket_bytes: expected an integer, got '25MiB'"),
    ({"gradients": "auto"}, ValueError, "gradients: 'auto' is for dtcomm.ddp.compress"),
    ({"gradients": "topk", "feedback": False}, ValueError, "gradients: topk loses 96%.*use feedback=True"),
    ({"parameters": "delta:sign"}, ValueError, "parameters: sign loses 60% of each difference"),
    ({"parameters_codec": "int8"}, TypeError, r"parameters_codec: neither .*did you mean 'parameters'"),
    ({"feedbak": True}, TypeError, r"feedbak: neither an argument of .* nor an option of SGD.*'feedback'"),
    ({"momentun": 0.9}, TypeError, r"momentun: neither .*did you mean 'momentum'"),
    ({"exclude": "blocs.0"}, ValueError, r"exclude: 'blocs.0' matches no parameter.*did you mean 'blocks.0'"),
    ({"allow_inaccurate": 1}, TypeError, "allow_inaccurate: expected a bool, got int"),
]


@on_ranks(2)
def test_invalid_arguments_are_refused(rank: int, n: int) -> None:
    model = Net()
    for options, error, message in REFUSALS:
        with pytest.raises(error, match=message):
            fsdp.ShardedOptimizer(model.named_parameters(), torch.optim.SGD, **options)
    with pytest.raises(TypeError, match="params: expected named parameters"):
        fsdp.ShardedOptimizer(model.parameters(), torch.optim.SGD)  # type: ignore[arg-type]
    options = {"parameters": "int2", "gradients": "topk", "feedback": False}
    fsdp.ShardedOptimizer(model.named_parameters(), torch.optim.SGD, allow_inaccurate=True, **options)
    for preset, gradients, parameters in ((None, "int8", "none"), ("loco", "loco:int4:block=128", "none")):
        config = fsdp.ShardedOptimizer(model.named_parameters(), torch.optim.SGD, preset=preset).config()
        assert (config["gradients"], config["parameters"]) == (gradients, parameters)


def report_errors(rank: int, n: int, parameters: str) -> tuple[dict[str, float | None], list[str], str]:
    """Return the report's errors of parameters, what was logged, and the report's first line."""
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dtcomm").addHandler(handler)
    model, optimizer = make_optimizer(gradients="topk:ratio=0.1", parameters=parameters, exclude="blocks.0")
    train(model, optimizer, rank, range(3))
    logging.getLogger("dtcomm").removeHandler(handler)
    report = optimizer.report()
    assert report.integration == "ShardedOptimizer" and report.steps == 3
    assert "not measured: " in str(report) and report.feedback == "ef"
    excluded = [row for row in report.rows if row.reason == "exclude: blocks.0"]
    assert {row.what for row in excluded} == {"parameters", "gradients"}
    assert all(row.codec == "none" and row.wire_bytes >= row.plain_bytes > 0 for row in excluded)
    errors = {row.codec: row.relative_error for row in report.rows if row.what == "parameters"}
    return errors, logged, str(report).splitlines()[0]


@pytest.mark.parametrize(
    ("parameters", "low", "high"), [("fp8_e4m3", 0.01, 0.05), ("delta:int4:block=128", 1e-6, 0.01)]
)
def test_errors_of_parameters_are_measured_and_reported(parameters: str, low: float, high: float) -> None:
    (errors, logged, head), (_, elsewhere, _) = run_ranks(report_errors, 2, parameters)
    error = errors[parameters]
    assert error is not None and low < error < high and errors["none"] is None
    assert head == (
        f"dtcomm ShardedOptimizer: gradients ef:topk:ratio=0.1, parameters {parameters}, "
        "feedback ef (auto: topk:ratio=0.1 loses 75%), rank 0 of 2"
    )
    (line,) = logged
    assert line.startswith("dtcomm.fsdp.ShardedOptimizer: error feedback keeps ")
    assert line.endswith(" on every rank (auto: topk:ratio=0.1 loses 75%)")
    assert elsewhere == []


def log_uncompressed(rank: int, n: int) -> tuple[list[str], str]:
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("dtcomm").addHandler(handler)
    model = nn.Linear(64, 64).double()
    optimizer = fsdp.ShardedOptimizer(
        model.named_parameters(), torch.optim.SGD, lr=0.1, gradients="int8", parameters="int8"
    )
    for _ in range(3):
        model(torch.ones(1, 64, dtype=torch.float64)).sum().backward()
        optimizer.step()
    logging.getLogger("dtcomm").removeHandler(handler)
    return logged, str(optimizer.report()).splitlines()[0]


def test_what_is_not_compressed_is_logged_once_and_heads_the_report() -> None:
    (logged, head), (elsewhere, _) = run_ranks(log_uncompressed, 2)
    reason = "the only bucket (int8 does not support float64)"
    assert head == f"nothing is compressed although asked for: gradients of {reason}; parameters of {reason}"
    assert logged == [f"dtcomm.fsdp.ShardedOptimizer: {head}; see state.report()"] and elsewhere == []
