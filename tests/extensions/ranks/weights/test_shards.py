"""Ranks of a trainer publish their own shards; no rank gathers the model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from dtcomm.extensions.weights import Publisher, Subscriber
from tests.support.rank_tests import on_ranks


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 9))


@on_ranks(2)
def test_fsdp_shards_are_published_by_their_ranks(rank: int, ranks: int, tmp_path: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    trained = model()
    for layer in trained:
        fully_shard(layer, mesh=mesh)
    fully_shard(trained, mesh=mesh)
    publisher = Publisher(trained, tmp_path)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    engine = nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 9))
    columns = {
        name: distribute_tensor(torch.zeros_like(tensor), mesh, [Shard(tensor.dim() - 1)])
        for name, tensor in engine.state_dict().items()
    }
    followers = [Subscriber(engine, tmp_path), Subscriber(columns, tmp_path)]
    for version in range(3):
        trained(torch.ones(2, 7)).sum().backward()
        optimizer.step()
        assert publisher.publish() == version
        whole = {name: tensor.full_tensor() for name, tensor in trained.state_dict().items()}
        for follower in followers:
            assert follower.update(at_least=version) == version
        for name, tensor in whole.items():
            assert torch.equal(engine.state_dict()[name], tensor)
            assert torch.equal(columns[name].full_tensor(), tensor)
    assert publisher.report()["elements"] == sum(tensor.numel() for tensor in whole.values())
    # The slice of a tensor that only one rank holds, and values that differ without a Slice.
    stage = {f"stage{rank}": torch.full((3,), float(rank)), "both": torch.ones(2)}
    publisher = Publisher(stage, tmp_path / "stages")
    publisher.publish()
    target = {"stage0": torch.zeros(3), "stage1": torch.zeros(3), "both": torch.zeros(2)}
    assert Subscriber(target, tmp_path / "stages").update() == 0
    assert target["stage1"].tolist() == [1.0] * 3 and target["both"].tolist() == [1.0] * 2
    if rank == 1:
        with pytest.raises(ValueError, match="'x'"):
            Publisher({"x": torch.ones(2)}, tmp_path / "x")
    else:
        Publisher({"x": torch.zeros(2)}, tmp_path / "x")
