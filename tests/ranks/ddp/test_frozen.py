"""Parameters that are frozen before DDP wraps the model, or later."""

from __future__ import annotations

import torch
from torch.nn.parallel import DistributedDataParallel

from dtcomm import ddp
from tests.support.rank_tests import on_ranks
from tests.unit.ddp.models import SMALL_BUCKETS, Net, backward, gradients


def plain_and_compressed(
    codec: str, *frozen: str
) -> tuple[DistributedDataParallel, DistributedDataParallel, ddp.DDPState]:
    """Return two equal models with frozen layers, the second one compressed, and its state."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        net = Net()
        for name in frozen:
            net.get_submodule(name).requires_grad_(False)
        models.append(DistributedDataParallel(net, find_unused_parameters=True, **SMALL_BUCKETS))
    return *models, ddp.compress(models[1], codec)


@on_ranks(2)
def test_parameters_frozen_from_the_start_are_neither_sent_nor_reported(rank: int, world_size: int) -> None:
    *models, state = plain_and_compressed("int8", "first")
    for step in range(3):
        for model in models:
            model.zero_grad()
            backward(model, rank, step)
    plain, compressed = map(gradients, models)
    assert sorted(compressed) == sorted(plain)
    for name, expected in plain.items():
        error = float((compressed[name] - expected).norm() / expected.norm())
        assert (error == 0) if expected.dim() < 2 else (0 < error < 0.05), name
    rows = {row["codec"]: sorted(row["names"]) for row in state.report().to_dict()["rows"]}
    assert rows == {
        "int8": ["branch.weight", "last.weight"],
        "none": ["last.bias", "norm.bias", "norm.weight"],
    }


@on_ranks(2)
def test_parameters_frozen_later_get_no_gradient_and_the_others_those_of_ddp(
    rank: int, world_size: int
) -> None:
    for codec in ("none", "int8"):
        *models, state = plain_and_compressed(codec)
        for step in range(5):
            for model in models:
                if step == 2:
                    model.module.branch.requires_grad_(False)
                model.zero_grad()
                backward(model, rank, step)
        plain, compressed = map(gradients, models)
        assert sorted(compressed) == sorted(plain) and "branch.weight" not in compressed
        for name, expected in plain.items():
            error = float((compressed[name] - expected).norm() / expected.norm())
            assert error < 0.05 if codec == "int8" else error == 0, name
        report = state.report()
        assert report.steps == 5 and state.error is None
        names = [name for row in report.to_dict()["rows"] for name in row["names"]]
        assert "branch.weight" in names  # it still has its place in the buckets
