"""Ranks of a trainer publish their own shards; no rank gathers the model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dtcomm.extensions.weights import Part, Publisher, Resharded, Subscriber, published_tensors
from dtcomm.extensions.weights.engines import Receiver, Sender
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


@on_ranks(4)
def test_tensor_parallel_shards_that_fsdp_splits_along_the_same_dimension(
    rank: int, ranks: int, tmp_path: Path
) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(3)
    trained = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))
    parallelize_module(trained, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    fully_shard(trained, mesh=mesh["dp"])
    weight = trained.state_dict()["0.weight"]
    assert [each.dim for each in weight.placements] == [0, 0] and weight.to_local().shape == (2, 6)
    publisher = Publisher(trained, tmp_path)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    follower: Subscriber | None = None
    layout = {
        "0.weight": (Part("0.weight"),),
        "0.bias": (Part("0.bias"),),
        "1.weight": (Part("1.weight", dim=1),),
    }
    part = {"0.weight": torch.zeros(2, 6), "0.bias": torch.zeros(2), "1.weight": torch.zeros(4, 2),
            "1.bias": torch.zeros(4)}  # fmt: skip
    for version in range(3):
        trained(torch.ones(2, 6) * (rank // 2 + 1)).sum().backward()
        optimizer.step()
        publisher.publish()
        whole = {name: tensor.full_tensor() for name, tensor in trained.state_dict().items()}
        if follower is None:
            weights = Resharded(published_tensors(str(tmp_path)), part, layout, rank=rank, ranks=ranks)
            follower = Subscriber(weights, tmp_path)
        assert follower.update(at_least=version) == version
        for name, dim in (("0.weight", 0), ("0.bias", 0), ("1.weight", 1)):
            assert torch.equal(part[name], whole[name].chunk(ranks, dim)[rank]), name
        assert torch.equal(part["1.bias"], whole["1.bias"])
    assert publisher.report()["elements"] == sum(tensor.numel() for tensor in whole.values())


@on_ranks(2)
def test_the_first_rank_alone_sends_whole_tensors(rank: int, ranks: int, tmp_path: Path) -> None:
    if rank == 0:  # the other ranks of the group take no part
        sender = Sender(str(tmp_path))
        for version in range(2):
            weights = {"a": torch.full((3,), float(version)), "b": torch.ones(2).bfloat16()}
            assert sender.next_version() == version
            assert sender.send(weights.items())["weights/version"] == version
            assert torch.equal(Receiver(str(tmp_path)).receive(version)["a"], weights["a"])
        assert Sender(str(tmp_path)).next_version() == 2
