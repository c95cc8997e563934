"""Sparse gradients of embeddings in the DDP hook: averaged uncompressed, whatever the other parameters travel with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dtcomm import ddp
from dtcomm.launch.ranks import run_ranks
from tests.unit.collectives.call_by_name import require_alike

ROWS, WIDTH = 2000, 8
STEPS = 4


def embedding_model(*, sparse: bool) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=sparse), nn.Linear(WIDTH, 256), nn.Linear(256, 1)
    )


def backward(model: nn.Module, rank: int, step: int) -> None:
    generator = torch.Generator().manual_seed(10 * step + rank)
    model(torch.randint(ROWS, (16, 4), generator=generator)).square().mean().backward()


def parameters_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def train(
    rank: int, spec: str | None, *, sparse: bool = True, adam: bool = False, **options: Any
) -> tuple[torch.Tensor, ddp.DDPState | None]:
    """Train a few steps and return the parameters, and the state of the hook; without a spec DDP has no hook."""
    model = DistributedDataParallel(
        embedding_model(sparse=sparse), find_unused_parameters=options.pop("find_unused", False)
    )
    state = None if spec is None else ddp.compress(model, spec, **options)
    embedding = next(model.parameters())
    others = list(model.parameters())[1:]
    table = torch.optim.SparseAdam([embedding]) if adam else torch.optim.SGD([embedding], 0.01)
    dense = torch.optim.SGD(others, 0.01)
    for step in range(STEPS):
        table.zero_grad()
        dense.zero_grad()
        with model.no_sync():
            backward(model, rank, 2 * step)
        backward(model, rank, 2 * step + 1)
        assert embedding.grad is not None and embedding.grad.is_sparse == sparse
        if sparse and spec is not None:
            assert embedding.grad.is_coalesced()
        table.step()
        dense.step()
    return parameters_of(model), state


def train_uncompressed(rank: int, world_size: int) -> None:
    for adam in (False, True):
        by_ddp, _ = train(rank, None, adam=adam)
        by_hook, _ = train(rank, "none", adam=adam)
        assert torch.equal(by_hook, by_ddp)
        require_alike(by_hook, "none")
    dense, _ = train(rank, "none", sparse=False)
    with_unused, _ = train(rank, "none", find_unused=True)
    by_hook, _ = train(rank, "none")
    assert torch.equal(by_hook, dense)
    assert torch.equal(with_unused, by_hook)


def test_training_equals_that_without_a_hook_and_that_with_dense_gradients() -> None:
    run_ranks(train_uncompressed, 2)


def train_compressed(rank: int, world_size: int) -> None:
    exact, _ = train(rank, "none")
    distance = float((exact - parameters_of(embedding_model(sparse=True))).norm())
    # With int8 the guard's statistics travel with the last bucket, which is the sparse one; powersgd has stages.
    for spec, options in (
        ("int8", {}),
        ("topk:ratio=0.5", {"guard": None}),
        ("powersgd:rank=2", {}),
        ("auto", {}),
        ("name=0.weight -> int8; name=1.* -> powersgd:rank=1", {"timeline": STEPS}),
    ):
        trained, state = train(rank, spec, sample_every=1, **options)
        assert state is not None
        require_alike(trained, spec)
        # The embedding's values lose nothing; they differ by what the other parameters have lost.
        assert float((trained - exact).norm()) < 0.1 * distance, spec
        report = state.report()
        row = next(row for row in report.rows if "0.weight" in row.names)
        assert row.codec == "none" and 0 < row.wire_bytes == row.plain_bytes, (spec, row)
        assert row.wire_bytes < STEPS * ROWS * WIDTH * 4 / 2
        if spec != "auto":
            assert row.reason == "sparse gradient" and "sparse gradient" in report.uncompressed
        if "timeline" in options:
            messages = state.timeline.summary().messages
            assert min(message.plain_bytes for message in messages) < ROWS * WIDTH

    model = DistributedDataParallel(embedding_model(sparse=True))
    state = ddp.compress(model, "int8")
    state.set_samples(1 + rank, 3)
    for step in range(4):
        model.zero_grad()
        backward(model, rank, step)
    weight = next(model.parameters())
    assert weight.grad is not None
    plain = embedding_model(sparse=True)
    plain.load_state_dict(model.module.state_dict())
    expected = torch.zeros(ROWS, WIDTH)
    for member in range(world_size):
        plain.zero_grad()
        backward(plain, member, 3)
        gradient = plain[0].weight.grad
        assert isinstance(gradient, torch.Tensor)
        expected += (1 + member) / 3 * gradient.to_dense()
    torch.testing.assert_close(weight.grad.to_dense(), expected)

    with pytest.raises(TypeError, match=r"bucket 1: 0\.weight: a sparse gradient does not go with dgc"):
        train(rank, "dgc")


def test_the_hook_compresses_the_other_parameters() -> None:
    run_ranks(train_compressed, 2)
