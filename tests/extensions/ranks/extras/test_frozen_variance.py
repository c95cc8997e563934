"""Adam with a frozen variance behind the DDP hook and in `ShardedOptimizer`, on two ranks."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dtcomm import ddp, fsdp
from dtcomm.extensions import extras
from dtcomm.launch.ranks import run_ranks
from tests.support.rank_tests import on_ranks

WARMUP, STEPS = 3, 8
RATE = 0.01


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(64, 64), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))


def step(model: nn.Module, optimizer: Any, rank: int, number: int) -> float:
    generator = torch.Generator().manual_seed(100 * number + rank)
    tokens = torch.randint(48, (32,), generator=generator)  # some rows of the embedding never get a gradient
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(tokens), tokens)
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def variances(optimizer: torch.optim.Optimizer) -> torch.Tensor:
    return torch.cat([entry["exp_avg_sq"].flatten() for entry in optimizer.state.values()])


def require_equal_on_all_ranks(values: torch.Tensor) -> None:
    gathered = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, values)
    assert all(torch.equal(other, values) for other in gathered)


def with_the_hook(rank: int, n: int, codec: str) -> None:
    def make() -> tuple[nn.Module, ddp.DDPState, extras.FrozenVariance]:
        model = DistributedDataParallel(net())
        state = ddp.compress(model, codec, warmup=WARMUP)
        inner = torch.optim.AdamW(model.parameters(), lr=RATE)
        return model, state, extras.FrozenVariance(inner, WARMUP)

    model, state, optimizer = make()
    losses = [step(model, optimizer, rank, number) for number in range(WARMUP)]
    exact = DistributedDataParallel(net())
    adam = torch.optim.AdamW(exact.parameters(), lr=RATE)
    for number in range(WARMUP):
        step(exact, adam, rank, number)
    assert torch.equal(flat(model), flat(exact)), "the warm-up is plain DDP with Adam"

    frozen = variances(optimizer)
    losses += [step(model, optimizer, rank, WARMUP)]
    saved = [copy.deepcopy(part.state_dict()) for part in (model, state, optimizer)]
    losses += [step(model, optimizer, rank, number) for number in range(WARMUP + 1, STEPS)]
    assert torch.equal(variances(optimizer), frozen)
    assert losses[-1] < losses[0]
    assert any(row.codec == str(codec) for row in state.report().rows)
    require_equal_on_all_ranks(flat(model))

    resumed = make()
    for part, state_dict in zip(resumed, saved, strict=True):
        part.load_state_dict(state_dict)
    for number in range(WARMUP + 1, STEPS):
        step(resumed[0], resumed[2], rank, number)
    assert torch.equal(flat(resumed[0]), flat(model)), "a resumed run continues bit for bit"


def test_with_the_ddp_hook() -> None:
    run_ranks(with_the_hook, 2, "int2")


def sharded(codec: str = "none", *, freeze: bool = False) -> tuple[nn.Module, fsdp.ShardedOptimizer]:
    model = net()
    optimizer = fsdp.ShardedOptimizer(
        model.named_parameters(),
        torch.optim.AdamW,
        lr=RATE,
        gradients=codec,
        bucket_bytes=20_000,
        sample_every=0,
    )
    if freeze:
        extras.freeze_variance(optimizer, WARMUP)
    return model, optimizer


@on_ranks(2)
def test_in_the_sharded_optimizer(rank: int, n: int) -> None:
    model, optimizer = sharded("int2", freeze=True)
    plain, adam = sharded()
    for number in range(WARMUP):
        assert step(model, optimizer, rank, number) == step(plain, adam, rank, number)
    assert torch.equal(flat(model), flat(plain)), "the warm-up is uncompressed Adam"
    assert {row.codec for row in optimizer.report().rows} == {"none"}

    # The floors are those of whole parameters, which bucket and shard boundaries cut.
    whole = DistributedDataParallel(net())
    unsharded = extras.FrozenVariance(torch.optim.AdamW(whole.parameters(), lr=RATE), WARMUP)
    for number in range(WARMUP):
        step(whole, unsharded, rank, number)
    names = [name for name, _ in plain.named_parameters()]
    by_name = dict(zip(names, [entry["exp_avg_sq"] for entry in unsharded.state.values()], strict=True))
    for bucket, entry in zip(optimizer._buckets, optimizer.state.values(), strict=True):
        padded = bucket.layout.join(by_name, n)
        covered = bucket.layout.join({name: torch.ones_like(v) for name, v in by_name.items()}, n).bool()
        mask = bucket.shard_of(covered)
        torch.testing.assert_close(
            entry["exp_avg_sq"][mask], bucket.shard_of(padded)[mask], rtol=1e-4, atol=0
        )

    frozen = variances(optimizer)
    step(model, optimizer, rank, WARMUP)
    saved_model, saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    for number in range(WARMUP + 1, STEPS):
        step(model, optimizer, rank, number)
    assert torch.equal(variances(optimizer), frozen)
    assert any(row.codec.endswith("int2") for row in optimizer.report().rows)
    require_equal_on_all_ranks(flat(model))

    resumed, restored = sharded("int2", freeze=True)
    resumed.load_state_dict(saved_model)
    restored.load_state_dict(saved)
    for number in range(WARMUP + 1, STEPS):
        step(resumed, restored, rank, number)
    assert torch.equal(flat(resumed), flat(model)), "a resumed run continues bit for bit"
