"""Local SGD: when weights are averaged, buffers, the guard. `test_streaming_local_sgd` has weights and checkpoints."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from dtcomm import ddp
from dtcomm.compress.guard import Guard
from dtcomm.launch.ranks import run_ranks
from dtcomm.local_sgd import LocalSGD
from tests.unit.ddp.models import Net, backward, wrapped


def make_net(seed: int = 0, dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(seed)
    return Net(dtype)


def train(
    model: nn.Module, local: LocalSGD | None, rank: int, steps: range, rate: float = 0.05
) -> list[bool]:
    """Run plain SGD on this rank's batches; return whether each step ended with an average."""
    averaged = []
    for step in steps:
        model.zero_grad()
        backward(model, rank, step)
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter -= rate * parameter.grad
        averaged.append(local is not None and local.step())
    return averaged


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def from_all_ranks(own: torch.Tensor) -> list[torch.Tensor]:
    all_ranks = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(all_ranks, own)
    return all_ranks


def compare_to_ddp(rank: int, world_size: int) -> float:
    """Return the difference to DDP: with an average after every step, SGD on local weights is SGD on mean gradients."""
    model, plain = make_net(seed=rank), wrapped()
    local = LocalSGD(model, every=1, codec="none")
    train(model, local, rank, range(5))
    train(plain, None, rank, range(5))
    return float((weights(model) - weights(plain)).abs().max())


def test_uncompressed_average_after_every_step_equals_ddp() -> None:
    assert max(run_ranks(compare_to_ddp, 2)) < 1e-6


def train_with_warmup(rank: int, world_size: int) -> tuple[list[bool], list[bool]]:
    model = make_net()
    local = LocalSGD(model, every=3, warmup=2)
    averaged = train(model, local, rank, range(9))
    same = []
    for step in range(9, 12):
        train(model, local, rank, range(step, step + 1))
        all_weights = from_all_ranks(weights(model))
        same.append(all(torch.equal(all_weights[0], other) for other in all_weights))
    return averaged, same


def test_ranks_average_after_each_step_of_the_warm_up_and_then_every_third_step() -> None:
    for averaged, same in run_ranks(train_with_warmup, 3):
        assert averaged == [True, True, False, False, True, False, False, True, False]
        assert same == [False, True, False]


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(48, 48)
        self.norm = nn.BatchNorm1d(48)

    def forward(self, x: torch.Tensor, branch: bool = True) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.layer(x))
        return out


def train_and_report(rank: int, world_size: int) -> tuple[bool, str]:
    model = Normalised()
    local = LocalSGD(model, 2, "int8")
    train(model, local, rank, range(4))
    all_means = from_all_ranks(model.norm.running_mean)  # type: ignore[arg-type]
    return all(torch.equal(all_means[0], other) for other in all_means), str(local.report())


def test_running_means_are_averaged_and_the_report_says_what_was_sent() -> None:
    for same, text in run_ranks(train_and_report, 2):
        assert same
        assert "a buffer" in text
        assert "4 steps, 2 messages" in text
        assert "of common weights" in text


class Uneven(nn.Module):
    """A model in which some elements of `first` change 1e4 times more than the rest, in every block."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(48, 48, bias=False)
        self.last = nn.Linear(48, 48, bias=False)

    def forward(self, x: torch.Tensor, branch: bool = True) -> torch.Tensor:
        heavy = torch.ones(48)
        heavy[::16] = 1e4
        out: torch.Tensor = self.first(x * heavy) * 1e-4 + self.last(x)
        return out


def train_guarded(rank: int, world_size: int) -> tuple[list[str], dict[str, str]]:
    """Average signs without feedback, then observe a loss that jumps; return the events and each weight's codec."""
    model = Uneven()
    guard = Guard(steps=3, cosine=0.95, window=2, on_harm="finer")
    local = LocalSGD(model, 2, "sign", feedback=False, guard=guard)

    def codecs() -> dict[str, str]:
        return {
            member.name: str(segment.codec)
            for _, layout in local._buckets
            for segment in layout.segments
            for member in segment.members
        }

    train(model, local, rank, range(12), rate=1e-3)
    refined = codecs()
    again = LocalSGD(Uneven(), 2, "sign", feedback=False)
    again.load_state_dict(local.state_dict())
    again.sync()
    assert again.state_dict()["watch"] == local.state_dict()["watch"]
    assert not again._buckets[0][1].spec.startswith("sign")
    for step in range(12, 40):
        local.observe(1.0 if step < 32 else 50.0)
        train(model, local, rank, range(step, step + 1), rate=0.0)
    assert set(codecs().values()) == {"none"} and "guard" in str(local.report())
    return [f"{event.kind} {event.name} {event.action}" for event in local.events], refined


def test_the_guard_acts_on_averages() -> None:
    results = run_ranks(train_guarded, 2)
    assert results[0] == results[1]
    events, codecs = results[0]
    assert set(events[:-1]) == {"harm  finer"} and events[-1] == "loss  uncompressed"
    assert set(codecs.values()) == {"int4"}


def compare_single_rank(rank: int, world_size: int, spec: str, options: dict[str, Any]) -> float:
    """Return how far one rank with compression is from one without, which has DGC's momentum for dgc."""
    ours, plain = wrapped(), wrapped()
    ddp.compress(ours, spec, **options)
    optimizers = [
        torch.optim.SGD(ours.parameters(), lr=0.05),
        torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9 if spec == "dgc" else 0.0),
    ]
    for step in range(5):
        for model, optimizer in zip((ours, plain), optimizers):
            optimizer.zero_grad()
            backward(model, rank, step)
            optimizer.step()
    return float((weights(ours) - weights(plain)).abs().max())


@pytest.mark.parametrize(
    ("spec", "options"),
    [
        ("int4", {}),
        ("topk", {"feedback": "ef21"}),
        ("dgc", {}),
        ("powersgd", {}),
        ("int4", {"feedback": True, "residual": "bf16"}),
    ],
)
def test_compression_on_a_single_rank_changes_nothing(spec: str, options: dict[str, Any]) -> None:
    assert run_ranks(compare_single_rank, 1, spec, options)[0] < 1e-6


def average_thawed(rank: int, world_size: int) -> None:
    model = Net()
    model.first.requires_grad_(False)
    local = LocalSGD(model, every=2, codec="none")
    assert not local.step()
    assert local.step()
    model.first.requires_grad_(True)
    assert not local.step()
    with pytest.raises(ValueError, match=r"first\.weight, first\.bias"):
        local.step()


def test_layers_that_are_unfrozen_later_are_named() -> None:
    run_ranks(average_thawed, 2)
