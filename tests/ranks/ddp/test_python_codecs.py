"""Codecs written in Python in DDP, FSDP and tensor-parallel layers: the results of int8, which has the same bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import dtcomm
from dtcomm.launch.ranks import run_ranks
from tests.support import python_codecs
from tests.unit.compress.test_feedback import EF21, Momentum

OVER_GLOO = {"DTCOMM_RUNTIME": "process_group"}


def network() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.ReLU(), torch.nn.Linear(96, 32))


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(10 * step + rank))


def train(model: Any, rank: int, steps: int = 4) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in range(steps):
        loss = model(batch(rank, step)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def ddp(rank: int, n: int) -> None:
    python_codecs.register()
    results = {}
    for spec in ("int8", "python_int8", "ndim<2 -> none; name=0.* -> python_int8; * -> int8", "scaled"):
        model = DistributedDataParallel(network())
        state = dtcomm.ddp.compress(model, spec, feedback=True)
        losses = train(model, rank)
        saved = state.state_dict()
        parameters = torch.cat([parameter.detach().view(-1) for parameter in model.parameters()])
        others = [torch.empty_like(parameters) for _ in range(n)]
        dist.all_gather(others, parameters)
        assert all(torch.equal(other, parameters) for other in others)
        residuals = list(saved["residuals"].values())
        assert residuals and all(residual.count_nonzero() for residual in residuals)
        results[spec] = losses, parameters, residuals
        report = state.report()
        assert spec.rpartition(" ")[2] in str(report) and report.wire_bytes < 0.4 * report.plain_bytes
    expected = results.pop("int8")
    scaled = results.pop("scaled")
    for losses, parameters, residuals in results.values():
        assert losses == expected[0] and torch.equal(parameters, expected[1])
        assert all(torch.equal(a, b) for a, b in zip(residuals, expected[2], strict=True))
    assert scaled[0][-1] == pytest.approx(expected[0][-1], rel=0.05) and not torch.equal(
        scaled[1], expected[1]
    )


@pytest.mark.parametrize("environment", [{}, OVER_GLOO], ids=["memory", "gloo"])
def test_ddp_trains_with_error_feedback(environment: dict[str, str]) -> None:
    run_ranks(ddp, 2, fresh=True, env=environment)


def resume(rank: int, n: int) -> None:
    python_codecs.register()
    model = DistributedDataParallel(network())
    state = dtcomm.ddp.compress(model, "python_int8", feedback=True)
    train(model, rank, 2)
    saved = state.state_dict(), {name: value.clone() for name, value in model.state_dict().items()}
    train(model, rank, 2)
    again = DistributedDataParallel(network())
    restored = dtcomm.ddp.compress(again, "python_int8", feedback=True)
    restored.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    train(again, rank, 2)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    other = dtcomm.ddp.compress(DistributedDataParallel(network()), "scaled", feedback=True)
    with pytest.raises(ValueError, match=r"python_int8.*scaled|scaled.*python_int8"):
        other.load_state_dict(saved[0])


@pytest.mark.slow
def test_a_ddp_run_resumes_bit_for_bit() -> None:
    run_ranks(resume, 2, fresh=True)


def fsdp(rank: int, n: int, kind: str) -> None:
    python_codecs.register()
    results = {}
    for spec in ("int8", "python_int8"):
        if kind == "FSDP2":
            model: Any = fully_shard(network(), mesh=init_device_mesh("cpu", (n,)))
            state = dtcomm.fsdp.compress(model, gradients=f"ef:{spec}", parameters=spec)
        else:
            model = FullyShardedDataParallel(network(), device_id=torch.device("cpu"))
            state = dtcomm.fsdp.compress(model, gradients=f"ef:{spec}")
        results[spec] = train(model, rank)
        assert spec in str(state.report())
        state.detach()
    assert results["int8"] == results["python_int8"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["FSDP2", "FSDP1"])
def test_fsdp_trains(kind: str) -> None:
    run_ranks(fsdp, 2, kind, fresh=True)


def tensor_parallel(rank: int, n: int) -> None:
    python_codecs.register()
    for algorithm in ("direct", "one_shot"):
        results = []
        for spec in ("int8", "python_int8"):
            torch.manual_seed(0)
            layer = dtcomm.tp.RowParallelLinear(
                64, 96, codec=spec, backward_codec=spec, algorithm=algorithm, latency=False
            )
            column = dtcomm.tp.ColumnParallelLinear(
                64, 64, codec=spec, backward_codec=spec, algorithm=algorithm, latency=False
            )
            x = torch.linspace(-1, 1, 640, requires_grad=True)
            y = layer(column(x.view(10, 64)))
            y.square().sum().backward()
            assert x.grad is not None
            results.append((y.detach(), x.grad))
        assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
    comm = dtcomm.tp.CommConfig.of("python_int8", latency=False)
    assert not comm.batch_invariant(1024)
    compiled = torch.compile(lambda x: dtcomm.tp.functional.reduce_from_ranks(x, comm), backend="eager")
    assert compiled(torch.ones(64)).allclose(torch.full((64,), float(n)), atol=0.05)


@pytest.mark.slow
def test_tensor_parallel_layers() -> None:
    run_ranks(tensor_parallel, 2, fresh=True)


def own_feedback(rank: int, n: int) -> None:
    results = []
    for feedback in ("ef21", EF21()):
        model = DistributedDataParallel(network())
        state = dtcomm.ddp.compress(model, "topk:ratio=0.1", feedback=feedback)
        losses = train(model, rank)
        results.append((losses, [parameter.detach() for parameter in model.parameters()]))
    assert results[0][0] == results[1][0] and all(map(torch.equal, results[0][1], results[1][1]))
    assert "feedback EF21()" in str(state.report())
    saved = state.state_dict()
    again = DistributedDataParallel(network())
    again.load_state_dict(model.state_dict())
    restored = dtcomm.ddp.compress(again, "topk:ratio=0.1", feedback=EF21())
    restored.load_state_dict(saved)
    assert train(again, rank) == train(model, rank)
    other = dtcomm.ddp.compress(DistributedDataParallel(network()), "topk:ratio=0.1", feedback=Momentum(0.5))
    with pytest.raises(
        ValueError, match=r"saved with feedback='EF21\(\)' \(here 'Momentum\(momentum=0.5\)'\)"
    ):
        other.load_state_dict(saved)
    local = dtcomm.local_sgd.LocalSGD(network(), every=1, codec="int4", feedback=EF21())
    local.step()
    assert "feedback EF21()" in str(local.report())
    with pytest.raises(TypeError, match="feedback: got EF21; valid: True, False, 'auto'"):
        dtcomm.fsdp.compress(fully_shard(network(), mesh=init_device_mesh("cpu", (n,))), feedback=EF21())  # type: ignore[arg-type]


@pytest.mark.slow
def test_ddp_takes_a_feedback_of_the_user_s() -> None:
    run_ranks(own_feedback, 2, fresh=True)
