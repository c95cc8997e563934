"""torch's join context: ranks with fewer inputs than others, with compressed gradients; what cannot join is refused."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import dtcomm.ddp
import dtcomm.fsdp
import dtcomm.tp
from dtcomm.launch.ranks import run_ranks

INPUTS = (2, 5, 3)  # of each rank


class SyncBatchNorm(nn.BatchNorm1d):
    """A layer that would average statistics over the ranks."""

    process_group = None


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 64), nn.Tanh(), nn.Linear(64, 8))


def inputs_of(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(4, 40, generator=generator) for _ in range(INPUTS[rank])]


def train(
    rank: int, spec: str | None, *, by_initial: bool = True
) -> tuple[nn.Module, dtcomm.ddp.DDPState | None]:
    model = make_model()
    ddp = DistributedDataParallel(model)
    state = None if spec is None else dtcomm.ddp.compress(ddp, spec)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    with Join([ddp], divide_by_initial_world_size=by_initial):
        for x in inputs_of(rank):
            ddp(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return model, state


def compare(rank: int, ranks: int) -> None:
    for by_initial in (True, False):
        plain, _ = train(rank, None, by_initial=by_initial)
        for spec, tolerance in (("none", 1e-5), ("int8", 0.02), ("powersgd:rank=2", 0.9)):
            model, state = train(rank, spec, by_initial=by_initial)
            assert state is not None and state.error is None
            for name, expected in plain.named_parameters():
                actual = model.get_parameter(name)
                everywhere = [torch.empty_like(actual) for _ in range(ranks)]
                dist.all_gather(everywhere, actual.detach())
                assert all(torch.equal(other, actual) for other in everywhere), (spec, name)
                change = (expected - make_model().get_parameter(name)).norm()
                assert (actual - expected).norm() <= tolerance * change, (spec, by_initial, name)
            assert state.steps == max(INPUTS)  # those who have joined take part in the others' steps


@pytest.mark.parametrize("backend", ["gloo", "dtcomm"])
def test_gradients_are_those_of_plain_ddp(backend: str) -> None:
    run_ranks(compare, 3, backend=backend, timeout=60)


def join_data_parallel_axis(rank: int, ranks: int) -> None:
    """Of a mesh of data and tensor parallelism: the ranks that share layers share inputs, and join together."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    replica = mesh["dp"].get_local_rank()
    results = []
    for codec in ("none", "int8"):
        model = make_model()
        dtcomm.tp.compress(model, mesh["tp"], codec, {"0": "column", "2": "row"}, latency=False)
        ddp = DistributedDataParallel(model, process_group=mesh.get_group("dp"))
        dtcomm.ddp.compress(ddp, codec)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        with Join([ddp]):
            for x in inputs_of(replica):
                ddp(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        results.append(dtcomm.tp.full_state_dict(model)["0.weight"])
    before = make_model().get_parameter("0.weight")
    assert (results[0] - results[1]).norm() < 0.1 * (results[0] - before).norm()


def test_the_data_parallel_axis_of_a_mesh_can_join() -> None:
    run_ranks(join_data_parallel_axis, 4, timeout=60)


def refuse(rank: int, ranks: int) -> None:
    sharded = make_model()
    fully_shard(sharded)
    state = dtcomm.fsdp.compress(sharded, "int8")
    with pytest.raises(
        ValueError, match="Join: FSDPSequential is under FSDP, in which every rank takes part"
    ):
        Join([sharded])  # type: ignore[list-item]
    state.detach()
    assert not hasattr(sharded, "join_hook")
    cut = make_model()
    dtcomm.tp.compress(cut, None, "none", {"0": "column", "2": "row"})
    with pytest.raises(ValueError, match="Join: Sequential is under tensor parallelism"):
        Join([cut])  # type: ignore[list-item]
    assert callable(pickle.loads(pickle.dumps(cut.__dict__["join_hook"])))
    model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), SyncBatchNorm(4)))
    dtcomm.ddp.compress(model, "int8")
    with (
        pytest.raises(ValueError, match="join: 1 is a SyncBatchNorm, which waits for all ranks"),
        model.join(),
    ):
        model(torch.randn(4, 4))
    with model.join(throw_on_early_termination=True, enable=False):
        model(torch.randn(4, 4)).sum().backward()
    assert copy.deepcopy(cut.__dict__["join_hook"])


def test_models_that_cannot_join_are_refused_by_name() -> None:
    run_ranks(refuse, 2)
