"""Streaming DiLoCo: fragments, averages in flight, mixing and islands."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from dtcomm.launch.ranks import run_ranks, send_to_parent, spawn_ranks
from dtcomm.local_sgd import LocalSGD
from dtcomm.local_sgd.fragments import make_fragments
from dtcomm.local_sgd.islands import local_shard
from tests.support.simulated_ranks import SimulatedLocalSGD
from tests.unit.ddp.models import batch

WIDTH = 48
LAYERS = 3


class Stack(nn.Module):
    """Layers between an embedding and a head."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        out: torch.Tensor = self.head(x)
        return out


def nesterov(weights: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, lr=0.7, momentum=0.9, nesterov=True)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range, local: LocalSGD | None = None
) -> list[bool]:
    """Train on this rank's batches; return whether an average was applied after each step."""
    applied = []
    for step in steps:
        optimizer.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()
        applied.append(local is not None and local.step())
    return applied


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def flat(tensors: Any) -> torch.Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def is_equal_on_all_ranks(own: torch.Tensor, group: dist.ProcessGroup | None = None) -> bool:
    all_ranks = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(all_ranks, own, group=group)
    return all(torch.equal(own, other) for other in all_ranks)


def parts(model: nn.Module, fragments: Any, every: int = 30) -> list[set[str]]:
    """Return the modules of each fragment."""
    names = [name for name, _ in model.named_parameters()]
    divided = make_fragments(model, names, [], fragments, every)
    assert sorted(name for part in divided for name in part.weights) == sorted(names)
    return [{name.rpartition(".")[0] for name in part.weights} for part in divided]


def test_fragments_are_whole_layers() -> None:
    assert parts(Stack(), 2) == [{"embed", "layers.1", "head"}, {"layers.0", "layers.2"}]
    assert parts(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)), 2) == [{"0"}, {"2"}]


def test_buffers_belong_to_the_fragment_of_their_layer() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    names = [name for name, _ in model.named_parameters()]
    first, second = make_fragments(model, names, ["1.1.running_mean"], 2, 4)
    assert first.buffers == [] and second.buffers == ["1.1.running_mean"]
    assert [first.is_due(step, 4) for step in range(1, 9)] == [False, True, False, False] * 2
    assert [second.is_due(step, 4) for step in range(1, 9)] == [False, False, False, True] * 2


@pytest.mark.parametrize(
    ("fragments", "every", "message"),
    [
        (0, 30, "fragments=0: expected 1 or more"),
        (6, 30, "fragments=6: the model has 5 layers .* valid: 1 to 5"),
        (4, 3, "4 fragments cannot start in 3 different steps"),
    ],
)
def test_impossible_fragments_are_refused(fragments: Any, every: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parts(Stack(), fragments, every)


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "int4, late and mixed": ("int4", {"fragments": 3, "delay": 2, "mixing": 0.5, "feedback": True}),
    "mxfp4": ("mxfp4", {"fragments": 2, "delay": 4}),
    "int2, several in flight": ("int2", {"fragments": 5, "delay": 5, "mixing": 0.75}),
    "PowerSGD": ("powersgd:rank=2,alternate=true", {"fragments": 2, "delay": 1}),
    "EF21": ("int2", {"fragments": 2, "delay": 2, "feedback": "ef21"}),
    "all at once": ("int4", {"bucket_bytes": 12_000}),
    "without an outer optimizer or feedback": ("int4", {"outer": None, "feedback": False}),
}


def compare_to_reference(rank: int, world_size: int, spec: str, options: dict[str, Any]) -> list[bool]:
    """Compare with the reference, which trains the replicas of all ranks; return when averages were applied."""
    model, replicas = Stack(seed=rank), [Stack() for _ in range(world_size)]
    options = {"outer": nesterov} | options
    local = LocalSGD(model, 6, spec, algorithm="one_shot", **options)
    fragments = [fragment.weights for fragment in local._fragments]
    kept = {name: options[name] for name in ("delay", "mixing", "feedback", "outer") if name in options}
    reference = SimulatedLocalSGD(replicas, 6, spec, fragments=fragments, **kept)
    optimizer, optimizers = adam(model), [adam(replica) for replica in replicas]
    applied = []
    for step in range(20):
        applied += train(model, optimizer, rank, range(step, step + 1), local)
        for other, (replica, own) in enumerate(zip(replicas, optimizers)):
            train(replica, own, other, range(step, step + 1))
        reference.step()
        assert torch.equal(flat(model.parameters()), flat(replicas[rank].parameters())), step
        assert torch.equal(flat(local._common), flat(reference.common.values())), step
    local.sync()
    reference.sync()
    assert torch.equal(flat(model.parameters()), flat(replicas[rank].parameters()))
    assert is_equal_on_all_ranks(flat(model.parameters()))
    return applied


@pytest.mark.parametrize("case", CASES)
def test_all_weights_equal_the_reference_bit_for_bit(case: str) -> None:
    first, second = run_ranks(compare_to_reference, 2, *CASES[case])
    assert first == second
    if (
        case == "int4, late and mixed"
    ):  # starts after steps 2, 4, 6, 8, …, and each is applied two steps later
        assert [step for step, applied in enumerate(first, 1) if applied] == [4, 6, 8, 10, 12, 14, 16, 18, 20]


def compare_resumed(rank: int, world_size: int, stop: int, spec: str, options: dict[str, Any]) -> bool:
    """Return whether a run that stopped while averages were in flight ends with the bits of one that did not."""
    options = {"fragments": 5, "delay": 4, "mixing": 0.5, "outer": nesterov} | options

    def start(seed: int) -> tuple[nn.Module, torch.optim.Optimizer, LocalSGD]:
        model = Stack(seed)
        optimizer = adam(model)
        return model, optimizer, LocalSGD(model, 6, spec, **options)

    whole, optimizer, local = start(0)
    train(whole, optimizer, rank, range(20), local)
    model, optimizer, local = start(0)
    train(model, optimizer, rank, range(stop), local)
    saved = local.state_dict()
    assert len(saved["in_flight"]) >= 2
    states = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, rank, range(stop, 20), local)  # saving has changed nothing
    resumed, optimizer, local = start(9)
    resumed.load_state_dict(states[0])
    optimizer.load_state_dict(states[1])
    local.load_state_dict(saved)
    train(resumed, optimizer, rank, range(stop, 20), local)
    with pytest.raises(ValueError, match="which are not whole fragments here"):
        LocalSGD(Stack(), 6, spec, **{**options, "fragments": 2}).load_state_dict(saved)
    expected = flat(whole.parameters())
    return torch.equal(expected, flat(model.parameters())) and torch.equal(
        expected, flat(resumed.parameters())
    )


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        ("int2", {"residual": "int8"}),
        ("topk:ratio=0.05", {"residual": "bf16"}),
        ("int2", {"feedback": "ef21"}),
        ("powersgd:rank=2", {}),
    ],
)
def test_a_run_resumed_with_averages_in_flight_continues_bit_for_bit(
    spec: str, options: dict[str, Any]
) -> None:
    assert run_ranks(compare_resumed, 2, 11, spec, options) == [True, True]


def train_with_nan(rank: int, world_size: int) -> tuple[bool, bool, bool]:
    """Return whether all weights are those of the last averages after a NaN, and stay finite and equal."""
    model = Stack()
    local = LocalSGD(model, 6, "int8", fragments=3, delay=3, mixing=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    train(model, optimizer, rank, range(6), local)
    with torch.no_grad():
        if rank == 1:
            model.head.weight[1, 2] = float("nan")
    with pytest.raises(FloatingPointError, match="a rank sent NaN or Inf"):
        train(model, optimizer, rank, range(6, 16), local)
    restored = torch.equal(flat(model.parameters()), flat(local._common))
    same = is_equal_on_all_ranks(flat(model.parameters()))
    train(model, optimizer, rank, range(16, 30), local)
    return restored, same, bool(torch.isfinite(flat(model.parameters())).all())


def test_after_nan_all_ranks_have_the_common_weights() -> None:
    assert run_ranks(train_with_nan, 2) == [(True, True, True)] * 2


def make_groups(rank: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Return this rank's island, of ranks 0 and 1 or 2 and 3, and its outer group."""
    islands = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    outer = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return islands[rank // 2], outer[rank % 2]


OPTIONS: dict[str, Any] = {
    "fragments": 2,
    "delay": 2,
    "mixing": 0.5,
    "outer": nesterov,
    "algorithm": "one_shot",
}


def train_islands(rank: int, world_size: int) -> tuple[bool, float]:
    """Train two islands of two ranks by DDP and by FSDP2.

    Returns whether DDP's ranks have the bits of each other, and the difference of FSDP2's weights to DDP's.
    """
    island, outer = make_groups(rank)
    wrapped = DistributedDataParallel(Stack(), process_group=island)
    with pytest.raises(TypeError, match=r"got DistributedDataParallel, which synchronises ranks \["):
        LocalSGD(wrapped)
    local = LocalSGD(wrapped, 4, "none", outer, **OPTIONS)
    train(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.05), rank, range(14), local)
    in_island = is_equal_on_all_ranks(flat(wrapped.parameters()), island)
    local.sync()
    everywhere = is_equal_on_all_ranks(flat(wrapped.parameters()))

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "island"))
    sharded = Stack(seed=rank // 2)
    for layer in sharded.layers:
        fully_shard(layer, mesh=mesh["island"])
    fully_shard(sharded, mesh=mesh["island"])
    with pytest.raises(TypeError, match=r"got the DTensor embed\.weight, which synchronises ranks"):
        LocalSGD(sharded, group=island)
    start = Stack().state_dict()
    for name, parameter in sharded.named_parameters():
        assert isinstance(parameter, DTensor)
        with torch.no_grad():
            parameter.to_local().copy_(start[name].chunk(2)[rank % 2])
    local = LocalSGD(sharded, 4, "none", mesh.get_group("outer"), **OPTIONS)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.05)
    train(sharded, optimizer, rank, range(14), local)
    with torch.no_grad():
        sharded(batch(0, 0))  # leaves the root's full parameters in memory
    local.sync()
    full = [parameter.full_tensor() for parameter in sharded.parameters() if isinstance(parameter, DTensor)]
    difference = float((flat(full) - flat(wrapped.parameters())).abs().max())
    with torch.no_grad():
        difference = max(difference, float((sharded(batch(0, 0)) - wrapped(batch(0, 0))).abs().max()))
        shard = local_shard(local._weights["head.weight"])
        shard[0] = float("nan") if rank == 0 else 0.0
    with pytest.raises(FloatingPointError):  # on all ranks, though two of them exchanged finite shards
        local.sync()
    return in_island and everywhere, difference


def test_islands_may_be_ddp_or_fsdp2() -> None:
    for same, difference in run_ranks(train_islands, 4):
        assert same
        assert difference < 1e-5


def train_until_killed(rank: int, world_size: int) -> None:
    model = Stack()
    local = LocalSGD(model, 4, "int4", fragments=2, delay=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(100_000):
        try:
            train(model, optimizer, rank, range(step, step + 1), local)
        except Exception as error:
            send_to_parent((type(error).__name__, str(error)))
            os._exit(0)
        if step == 8:
            send_to_parent("running")


def test_a_killed_rank_is_named_by_step() -> None:
    with spawn_ranks(train_until_killed, 2) as ranks:
        assert [ranks.receive(rank, 120) for rank in (0, 1)] == ["running"] * 2
        ranks.kill(1)
        name, text = ranks.receive(0, 60)  # type: ignore[misc]
    assert name == "PeerLost" and "rank 1" in text


def check_refusals(rank: int, world_size: int) -> None:
    cases: tuple[tuple[dict[str, Any], str], ...] = (
        ({"every": 0}, "every=0: expected 1 or more"),
        ({"codec": "dgc"}, "dgc has a momentum for gradients"),
        ({"feedback": "ef20"}, "feedback: 'ef20'"),
        ({"delay": -1}, "delay=-1: expected 0 or more"),
        ({"every": 4, "delay": 4}, "delay=4: expected less than every=4"),
        ({"mixing": 0.0}, "mixing=0.0: expected a number above 0 and at most 1"),
        ({"mixing": 1.5}, "mixing=1.5: expected a number above 0 and at most 1"),
    )
    for arguments, says in cases:
        with pytest.raises(ValueError, match=says):
            LocalSGD(Stack(), **arguments)
    with pytest.raises(TypeError, match="outer: expected a function that makes an optimizer, got int"):
        LocalSGD(Stack(), outer=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"verify: LocalSGD has none: .*; compare report"):
        LocalSGD(Stack(), verify=5)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="fragments: expected an integer, got 'layers"):
        LocalSGD(Stack(), fragments="layers*")  # type: ignore[arg-type]


def test_invalid_arguments_are_named() -> None:
    run_ranks(check_refusals, 2)


def describe(rank: int, world_size: int) -> str:
    model = Stack()
    local = LocalSGD(model, 4, "int4", fragments=2, delay=1, mixing=0.5)
    train(model, torch.optim.SGD(model.parameters(), lr=0.01), rank, range(8), local)
    return str(local.report())


def test_the_report_says_how_averages_are_made() -> None:
    text = run_ranks(describe, 2)[0]
    assert "every 4 steps, 2 fragments, applied 1 steps late with mixing 0.5" in text
