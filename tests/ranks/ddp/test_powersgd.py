"""PowerSGD in the hook: the paper's equations, equal ranks in every mode of DDP, checkpoints, NaN."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import dtcomm
from dtcomm import ddp
from dtcomm.compress.powersgd import PowerSGD, _key
from dtcomm.kernels import counter_rng, low_rank
from dtcomm.launch.ranks import run_ranks
from tests.unit.ddp.models import SMALL_BUCKETS, WIDTH, backward, gradients, local_gradients, train, wrapped


@pytest.mark.parametrize(
    "spec", ["powersgd:rank=1", "powersgd:rank=4,alternate=true", "powersgd:rank=2,factors=int8:block=64"]
)
def test_specs_print_and_parse(spec: str) -> None:
    assert str(PowerSGD.parse(spec)) == spec
    assert PowerSGD.parse(str(PowerSGD.parse(spec))) == PowerSGD.parse(spec)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("powersgd:rank=0", "rank is 0; valid: 1 to 64"),
        ("powersgd:rang=2", "option 'rang=2'; valid: rank"),
        ("powersgd:rank=2,factors=int9", "unknown codec 'int9'"),
        ("power", "unknown codec or compressor 'power'"),
    ],
)
def test_invalid_specs_are_named(spec: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ddp.State(spec)


def orthonormal(p: np.ndarray) -> np.ndarray:
    for k in range(p.shape[1]):
        for j in range(k):
            p[:, k] -= (p[:, j] @ p[:, k]) * p[:, j]
        p[:, k] /= np.linalg.norm(p[:, k])
    return p


class ReferencePowerSGD:
    """Algorithms 1 and 2 of the paper in float64, for all ranks at once."""

    def __init__(self, name: str, rows: int, columns: int, rank: int) -> None:
        start = counter_rng.uniform(_key(name), columns, rank * columns) - np.float32(0.5)
        self.q = start.astype(np.float64).reshape(rank, columns).T
        self.errors: list[np.ndarray] | None = None

    def step(self, mine: list[np.ndarray]) -> np.ndarray:
        errors = self.errors or [np.zeros_like(m) for m in mine]
        matrices = [m + e for m, e in zip(mine, errors)]
        p = orthonormal(np.mean([m @ self.q for m in matrices], axis=0))
        self.q = np.mean([m.T @ p for m in matrices], axis=0)
        result = p @ self.q.T
        self.errors = [m - result for m in matrices]
        return result


def compare_to_paper(rank: int, world_size: int, low: int) -> None:
    model = wrapped(**SMALL_BUCKETS)
    state = ddp.compress(model, f"powersgd:rank={low}")
    papers: dict[str, ReferencePowerSGD] = {}
    with local_gradients(model) as mine:
        for step in range(5):
            model.zero_grad()
            backward(model, rank, step)
            for name, ours in gradients(model).items():
                all_ranks = [torch.empty_like(mine[name]) for _ in range(world_size)]
                dist.all_gather(all_ranks, mine[name])
                if ours.ndim < 2:
                    torch.testing.assert_close(ours, torch.stack(all_ranks).mean(0), rtol=1e-5, atol=1e-7)
                    continue
                paper = papers.setdefault(name, ReferencePowerSGD(name, *ours.shape, low))
                expected = torch.from_numpy(
                    paper.step([gradient.double().numpy() for gradient in all_ranks])
                ).float()
                scale = float(expected.abs().max())
                torch.testing.assert_close(ours / scale, expected / scale, rtol=0, atol=1e-5)
                # The residuals hold what is not in the result.
                lost = [torch.empty_like(ours.view(-1)) for _ in range(world_size)]
                dist.all_gather(lost, state._reducer.error_state._residuals.get(name, ours.view(-1)))
                assert paper.errors is not None
                for theirs, own in zip(paper.errors, lost):
                    torch.testing.assert_close(
                        own.view_as(ours) / scale, torch.from_numpy(theirs).float() / scale, rtol=0, atol=2e-5
                    )


@pytest.mark.parametrize(("ranks", "low"), [(2, 1), (2, 4), (3, 2)])
def test_gradients_and_residuals_equal_those_of_the_paper(ranks: int, low: int) -> None:
    run_ranks(compare_to_paper, ranks, low)


MODES: dict[str, dict[str, Any]] = {
    "default": {},
    "small_buckets": SMALL_BUCKETS,
    "static_graph": {"static_graph": True, **SMALL_BUCKETS},
    "bucket_view": {"gradient_as_bucket_view": True, **SMALL_BUCKETS},
    "find_unused": {"find_unused_parameters": True, **SMALL_BUCKETS},
}


def train_and_compare_ranks(rank: int, world_size: int, spec: str, mode: str, dtype: torch.dtype) -> bool:
    model = wrapped(dtype=dtype, **MODES[mode])
    state = ddp.compress(model, spec)
    losses = []
    for step in range(6):
        model.zero_grad()
        backward(model, rank, step % 2, branch=mode != "find_unused" or (step + rank) % 3 == 0)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.05 * parameter.grad
        losses.append(float(model(torch.ones(2, WIDTH, dtype=dtype)).float().square().mean()))
    mine = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    theirs = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(theirs, mine)
    report = state.report()
    assert {row.codec for row in report.rows} == {"none", str(PowerSGD.parse(spec))}
    assert report.wire_bytes < 0.5 * report.plain_bytes
    return all(torch.equal(mine, other) for other in theirs) and bool(torch.isfinite(mine).all())


@pytest.mark.parametrize(
    "spec", ["powersgd:rank=2", "powersgd:rank=2,alternate=true", "powersgd:rank=2,factors=int8"]
)
@pytest.mark.parametrize("mode", MODES)
def test_weights_stay_equal_on_all_ranks(mode: str, spec: str) -> None:
    assert run_ranks(train_and_compare_ranks, 2, spec, mode, torch.float32) == [True] * 2


def test_weights_stay_equal_on_three_ranks_in_bf16() -> None:
    assert (
        run_ranks(train_and_compare_ranks, 3, "powersgd:rank=4", "small_buckets", torch.bfloat16)
        == [True] * 3
    )


def compare_resumed(rank: int, world_size: int, spec: str) -> bool:
    """Return whether a run that stopped after 3 of 6 steps and continued in a new DDP model has the same gradients."""
    uninterrupted = wrapped(**SMALL_BUCKETS)
    ddp.compress(uninterrupted, spec)
    expected = train(uninterrupted, rank, range(6))[3:]
    first = wrapped(**SMALL_BUCKETS)
    state = ddp.compress(first, spec)
    train(first, rank, range(3))
    saved, weights = state.state_dict(), first.module.state_dict()
    second = DistributedDataParallel(wrapped(1).module, **SMALL_BUCKETS)
    second.module.load_state_dict(weights)
    again = ddp.compress(second, spec)
    again.load_state_dict(saved)
    continued = train(second, rank, range(3, 6))
    return all(torch.equal(a[name], b[name]) for a, b in zip(expected, continued) for name in a)


@pytest.mark.parametrize("spec", ["powersgd:rank=2", "powersgd:rank=2,alternate=true"])
def test_a_resumed_run_continues_bit_for_bit(spec: str) -> None:
    assert run_ranks(compare_resumed, 2, spec) == [True] * 2


def train_with_infinite_gradient(rank: int, world_size: int) -> tuple[bool, bool, bool]:
    model = wrapped(**SMALL_BUCKETS)
    state = ddp.compress(model, "powersgd:rank=2")
    train(model, rank, range(2))
    before = state.state_dict()["residuals"]
    model.zero_grad()
    backward(model, rank, 2, scale=float("inf") if rank == 1 else 1.0)
    bad = all(gradient.isnan().any() for name, gradient in gradients(model).items() if gradient.ndim == 2)
    after = state.state_dict()["residuals"]
    unchanged = all(torch.equal(before[name], after[name]) for name in before)
    model.zero_grad()
    backward(model, rank, 3)
    good = all(gradient.isfinite().all() for gradient in gradients(model).values())
    return bool(bad), unchanged, bool(good)


def test_nan_of_one_rank_reaches_all_gradients_no_residual_and_no_later_step() -> None:
    assert run_ranks(train_with_infinite_gradient, 2) == [(True, True, True)] * 2


def train_with_zero_gradients(rank: int, world_size: int) -> bool:
    """Train with zero gradients, tiny ones, then ordinary ones; return whether the last ones arrive."""
    model = wrapped(**SMALL_BUCKETS)
    ddp.compress(model, "powersgd:rank=3")
    for scale in (0.0, 0.0, 1e-20, 1.0, 1.0):
        model.zero_grad()
        backward(model, rank, 0, scale=scale)
        assert all(gradient.isfinite().all() for gradient in gradients(model).values())
    return any(gradient.abs().max() > 0 for gradient in gradients(model).values() if gradient.ndim == 2)


def test_factors_recover_from_zero_gradients() -> None:
    assert run_ranks(train_with_zero_gradients, 2) == [True] * 2


def train_two_models(rank: int, world_size: int) -> bool:
    """Two models in one loss: the thread of the first is late on rank 0, that of the second on rank 1."""
    late = (32, 48)[rank]
    project_rows = low_rank.project_rows

    def late_project_rows(gradient: torch.Tensor, *args: Any) -> None:
        if gradient.numel() == late * late:
            time.sleep(0.02)
        project_rows(gradient, *args)

    low_rank.project_rows = late_project_rows
    torch.manual_seed(0)
    models = [
        DistributedDataParallel(nn.Sequential(*(nn.Linear(width, width) for _ in range(2))))
        for width in (32, 48)
    ]
    for model in models:
        ddp.compress(model, "* -> powersgd:rank=2")
    equal = True
    for step in range(4):
        torch.manual_seed(step * world_size + rank)
        sum(model(torch.randn(8, 32 + 16 * i)).square().mean() for i, model in enumerate(models)).backward()
        mine = torch.cat([p.grad.flatten() for model in models for p in model.parameters()])
        dtcomm.all_reduce(torch.ones(1))  # on the communicator of the group
        others = [torch.empty_like(mine) for _ in range(world_size)]
        dist.all_gather(others, mine)
        equal = equal and all(torch.equal(mine, other) for other in others)
    return equal


def test_two_models_in_one_loss_keep_their_collectives_apart() -> None:
    assert run_ranks(train_two_models, 2) == [True, True]


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


def compare_checkpoints(rank: int, world_size: int, spec: str) -> bool:
    """Whether gradients with reentrant checkpoints, of which each is a backward pass, equal those with others."""
    results = []
    for reentrant in (False, True):
        torch.manual_seed(0)
        model = DistributedDataParallel(Checkpointed(reentrant), **SMALL_BUCKETS)
        state = ddp.compress(model, spec)
        for step in range(3):
            torch.manual_seed(step * world_size + rank)
            model.zero_grad()
            model(torch.randn(8, WIDTH, requires_grad=True)).square().mean().backward()
        results.append((gradients(model), state.steps, state.report().messages))
    (ours, *counts), (theirs, *others) = results
    return counts == others and all(torch.equal(ours[name], theirs[name]) for name in theirs)


@pytest.mark.parametrize("spec", ["powersgd:rank=2", "int8"])
def test_reentrant_checkpoints_change_nothing(spec: str) -> None:
    assert run_ranks(compare_checkpoints, 2, spec) == [True, True]
