"""Layers, gradients and trained weights have the same bits on 1, 2, 4 and 8 ranks, in every layout."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import dtcomm
from dtcomm import tp
from dtcomm.extensions.extras import fix_terms, scale_tokens, sum_microbatches
from dtcomm.extensions.extras.invariant_sum import sum_terms
from dtcomm.launch.ranks import run_ranks
from dtcomm.tp.layers import ReplicatedModule
from tests.support.rank_tests import on_ranks

ROUNDED = "exact:rounded=true"
RANKS = (1, 2, 4, 8)
TERMS = 8
SAMPLES, LENGTH, WIDTH, HEADS = 8, 8, 32, 8
STEPS = 50


class Block(nn.Module):
    """Attention and a feed-forward block of layers whose heads and hidden features are cut over the ranks."""

    def __init__(self, mesh: DeviceMesh, sequence_parallel: bool) -> None:
        super().__init__()
        options: dict[str, Any] = {"group": mesh, "sequence_parallel": sequence_parallel}
        self.group = mesh if sequence_parallel else None
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = tp.ColumnParallelLinear(WIDTH, 3 * WIDTH, packed=3, **options)
        self.out = tp.RowParallelLinear(WIDTH, WIDTH, **options)
        self.up = tp.ColumnParallelLinear(WIDTH, 2 * WIDTH, **options)
        self.down = tp.RowParallelLinear(2 * WIDTH, WIDTH, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = F.layer_norm(x, (WIDTH,))
        qkv = self.qkv(scale_tokens(normed, self.norm.weight, self.norm.bias, group=self.group))
        q, k, v = (part.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in qkv.chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = self.out(attended.transpose(1, 2).flatten(2), residual=x)
        return self.down(torch.relu(self.up(F.rms_norm(x, (WIDTH,)))), residual=x)


def block(mesh: DeviceMesh, sequence_parallel: bool = False) -> Block:
    torch.manual_seed(0)
    model = Block(mesh, sequence_parallel)
    fix_terms(model, TERMS)
    return model


def batch(step: int) -> torch.Tensor:
    return torch.randn(SAMPLES, LENGTH, WIDTH, generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, samples: list[slice], part: slice = slice(None)) -> None:
    """Train with a backward pass for each of these slices of the batch, on this part of the sequences."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        x = batch(step)
        target = x.roll(1, 1)
        for own in samples:
            (model(x[own, part]) - target[own, part]).square().sum().backward()
        optimizer.step()


def data_parallel(rank: int, ranks: int) -> dict[str, dict[str, torch.Tensor]]:
    """Return the weights after a training with DDP and with FSDP2, where every sample is a microbatch."""
    own = [slice(i, i + 1) for i in range(rank * SAMPLES // ranks, (rank + 1) * SAMPLES // ranks)]

    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(WIDTH, 48), nn.LayerNorm(48), nn.Tanh(), nn.Linear(48, WIDTH, bias=False)
        )

    results = {"start": model().state_dict()}
    replica = DistributedDataParallel(model(), bucket_cap_mb=0.006)
    sum_microbatches(replica, SAMPLES)
    train(replica, own)
    results["DDP"] = replica.module.state_dict()
    sharded = fully_shard(model(), mesh=init_device_mesh("cpu", (ranks,)))
    sum_microbatches(sharded, SAMPLES)
    train(sharded, own)
    results["FSDP2"] = {name: tensor.full_tensor() for name, tensor in sharded.state_dict().items()}
    if ranks == SAMPLES:
        replica = DistributedDataParallel(model())
        dtcomm.ddp.compress(replica, f"* -> {ROUNDED}")
        train(replica, own)
        results["ddp.compress"] = replica.module.state_dict()
        sharded = fully_shard(model(), mesh=init_device_mesh("cpu", (ranks,)))
        dtcomm.fsdp.compress(sharded, gradients=ROUNDED, parameters="none")
        train(sharded, own)
        results["fsdp.compress"] = {
            name: tensor.full_tensor() for name, tensor in sharded.state_dict().items()
        }
    if ranks == 1:
        alone = model()
        sum_microbatches(alone, SAMPLES)
        train(alone, own)
        results["a module"] = alone.state_dict()
    return results


def tensor_parallel(rank: int, ranks: int) -> dict[str, dict[str, torch.Tensor]]:
    """Return the weights after a training with tensor parallelism, with and without sequence parallelism."""
    mesh = init_device_mesh("cpu", (ranks,))
    results = {"start": tp.full_state_dict(block(mesh))}
    length = LENGTH // ranks
    for layout, part in (
        ("TP", slice(None)),
        ("TP, sequence parallel", slice(rank * length, (rank + 1) * length)),
    ):
        model = block(mesh, layout != "TP")
        train(model, [slice(None)], part)
        results[layout] = tp.full_state_dict(model)
    return results


@pytest.mark.parametrize("layout", [data_parallel, tensor_parallel])
def test_fifty_steps_give_the_same_weights_on_every_number_of_ranks(
    layout: Callable[[int, int], dict[str, dict[str, torch.Tensor]]],
) -> None:
    by_ranks = {ranks: run_ranks(layout, ranks) for ranks in RANKS}
    expected = by_ranks[1][0]
    reference = expected["TP" if "TP" in expected else "DDP"]
    for ranks, by_rank in by_ranks.items():
        for rank, results in enumerate(by_rank):
            for name, start in results.pop("start").items():
                assert not torch.equal(start, reference[name]), name
                for kind, weights in results.items():
                    assert torch.equal(weights[name], reference[name]), (kind, ranks, rank, name)


TOKENS = (1, 3, 33, 100)


def outputs(rank: int, ranks: int, dtype: torch.dtype, fixed: bool) -> list[torch.Tensor]:
    """Return a column and a row layer's outputs, the gradients, and the outputs for fewer tokens."""
    torch.manual_seed(0)
    column = tp.ColumnParallelLinear(48, 192, dtype=dtype, gather_output=True)
    row = tp.RowParallelLinear(192, 80, dtype=dtype, input_is_parallel=False)
    layers = nn.Sequential(column, row)
    if fixed:
        fix_terms(layers, TERMS)
    x = features(dtype).requires_grad_()
    y = layers(x)
    of_x, *gradients = torch.autograd.grad(y.float().square().sum(), [x, *layers.parameters()])
    gradients = [
        gradient if dim is None else gathered(gradient, dim)
        for gradient, dim in zip(gradients, (0, 0, 1, None), strict=True)
    ]
    with torch.no_grad():
        return [y.detach(), of_x, *gradients, *(layers(x[:tokens]) for tokens in TOKENS)]


def gathered(part: torch.Tensor, dim: int = 0) -> torch.Tensor:
    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part)
    return torch.cat(parts, dim)


def features(dtype: torch.dtype) -> torch.Tensor:
    """Return tokens whose features have very different magnitudes, so that the order of additions matters."""
    x = torch.randn(max(TOKENS), 48, generator=torch.Generator().manual_seed(1))
    return (x * torch.logspace(-3, 3, 48)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_do_not_depend_on_ranks_or_on_other_tokens(dtype: torch.dtype) -> None:
    results = [run_ranks(outputs, ranks, dtype, True) for ranks in RANKS]
    first = results[0][0]
    for by_rank in results:
        for own in by_rank:
            assert all(torch.equal(a, b) for a, b in zip(own, first, strict=True))
    for tokens, output in zip(TOKENS, first[-len(TOKENS) :], strict=True):
        assert torch.equal(output, first[0][:tokens])

    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(48, 192, dtype=dtype), nn.Linear(192, 80, dtype=dtype)).double()
    x = features(dtype).double().requires_grad_()
    y = dense(x)
    y.square().sum().backward()
    for actual, expected in zip(first, [y, x.grad, *(p.grad for p in dense.parameters())], strict=False):
        error = torch.linalg.vector_norm(actual.double() - expected)
        assert error < (1e-6 if dtype is torch.float32 else 2e-2) * torch.linalg.vector_norm(expected)


class Dense(nn.Module):
    """Grouped queries beside keys and values, as in phi3, and a vocabulary."""

    class config:
        num_attention_heads, num_key_value_heads = 16, 8

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, WIDTH)
        self.qkv = nn.Linear(WIDTH, 4 * WIDTH)
        self.out = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self.words(tokens))
        half = qkv.shape[-1] // 2
        q, k, v = qkv.split([half, half // 2, half // 2], -1)
        k, v = (part.unflatten(-1, (-1, 1, 4)) for part in (k, v))
        return self.out((q.unflatten(-1, (-1, 2, 4)) * k.tanh() + v).flatten(-3))


def converted(rank: int, ranks: int) -> torch.Tensor:
    torch.manual_seed(0)
    model = Dense()
    plan = {"words": "vocabulary", "qkv": "column_qkv", "out": "row"}
    tp.compress(model, None, "int8", plan)
    fix_terms(model, TERMS)
    y = model(torch.arange(40).view(5, 8))
    assert model.out.comm.traffic.calls == 1
    return y.detach()


def test_models_of_compress() -> None:
    expected = run_ranks(converted, 1)[0]
    torch.manual_seed(0)
    torch.testing.assert_close(expected, Dense()(torch.arange(40).view(5, 8)).detach())
    for ranks in (2, 8):
        assert all(torch.equal(y, expected) for y in run_ranks(converted, ranks))


def test_without_fixed_terms_they_do() -> None:
    one, eight = (run_ranks(outputs, ranks, torch.float32, False)[0] for ranks in (1, 8))
    assert not torch.equal(one[0], eight[0])


def sums(rank: int, ranks: int, scatter: bool) -> list[torch.Tensor]:
    results = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for scale in (0, 1, 40):
            own = list(terms(dtype, scale).chunk(ranks)[rank])
            total = sum_terms(own, TERMS, divisor=3, scatter=scatter)
            assert torch.equal(total, sum_terms(own[::-1], TERMS, divisor=3, scatter=scatter))
            results.append(gathered(total) if scatter else total)
    infinite = torch.tensor([[math.inf, 1, math.nan, 2.0**127], [-math.inf, -math.inf, 3, 2.0**127]] * 4)
    own = [term.repeat(2) for term in infinite.chunk(ranks)[rank]]
    total = sum_terms(own, TERMS, scatter=scatter)
    results.append((gathered(total) if scatter else total).nan_to_num(0.5, 2.0, -2.0))
    return results


def terms(dtype: torch.dtype, scale: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(TERMS, 24, 11, generator=generator)
    return (x * torch.exp2((torch.randn(x.shape, generator=generator) * scale).clamp(-14, 14))).to(dtype)


def nearest(value: Fraction, dtype: torch.dtype) -> float:
    """Return the number of ``dtype`` nearest to ``value``; ties to even."""
    guess = torch.tensor(float(value), dtype=torch.float64).to(dtype)
    around = [torch.nextafter(guess, torch.tensor(limit, dtype=dtype)) for limit in (-math.inf, math.inf)]
    kind = torch.int32 if dtype == torch.float32 else torch.int16
    return min(
        (guess, *around), key=lambda x: (abs(Fraction(float(x)) - value), int(x.view(kind)) & 1)
    ).item()


def test_sums_of_terms_are_exact_and_rounded_once() -> None:
    expected = run_ranks(sums, 1, False)[0]
    for ranks in RANKS:
        for scatter in (False, True):
            for results in run_ranks(sums, ranks, scatter):
                assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
    made = iter(expected)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for scale in (0, 1, 40):
            columns = terms(dtype, scale).double().flatten(1).t().tolist()
            exact = [nearest(sum(map(Fraction, column), Fraction(0)) / 3, dtype) for column in columns]
            assert next(made).double().flatten().tolist() == exact
    assert next(made).tolist() == [0.5, -2.0, 0.5, 2.0] * 2


def test_the_gradients_of_a_norm() -> None:
    x, weight, bias, dy = (torch.randn(*shape) for shape in ((3, 16, 6), (6,), (6,), (3, 16, 6)))
    results = []
    for norm in (
        lambda x, w, b: scale_tokens(F.layer_norm(x, (6,)), w, b, terms=4),
        lambda x, w, b: F.layer_norm(x, (6,), w, b),
    ):
        inputs = [tensor.clone().requires_grad_() for tensor in (x, weight, bias)]
        y = norm(*inputs)
        results.append([y.detach(), *torch.autograd.grad(y, inputs, dy)])
    for actual, expected in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)


@on_ranks(2)
def test_arguments(rank: int, ranks: int) -> None:
    layer = tp.RowParallelLinear(48, 80)
    for count in (3, 10):
        with pytest.raises(ValueError, match=f"terms: {count}"):
            fix_terms(layer, count)
    with pytest.raises(ValueError, match="terms: 64"):
        fix_terms(tp.ColumnParallelLinear(48, 192, packed=(128, 32, 32)), 64)
    with pytest.raises(ValueError, match="model: 0 is a ReplicatedModule"):
        fix_terms(nn.Sequential(ReplicatedModule(nn.RMSNorm(4), layer.comm, "norm")))
    with pytest.raises(ValueError, match="microbatches: 3"):
        sum_microbatches(DistributedDataParallel(nn.Linear(2, 2)), 3)
    table = DistributedDataParallel(nn.Embedding(9, 4, sparse=True))
    sum_microbatches(table, 2)
    with pytest.raises(ValueError, match=r"model: a gradient of shape \(9, 4\) is sparse"):
        table(torch.tensor([1, 1, 2])).sum().backward()
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicas", "shards"))
    with pytest.raises(ValueError, match="model: its FSDP2 modules have replicas"):
        sum_microbatches(fully_shard(nn.Linear(2, 2), mesh=mesh))
    with pytest.raises(ValueError, match="float64"):
        sum_terms([torch.ones(2, dtype=torch.float64)], 2)
    with pytest.raises(ValueError, match=r"terms: 8.* the 6 tokens"):
        scale_tokens(torch.ones(1, 3, 2), torch.ones(2), group=mesh["shards"])
    fix_terms(layer, 4)
    assert layer(torch.ones(0, 24)).shape == (0, 80)
    y, normed = layer.with_norm(torch.ones(3, 24), torch.ones(3, 80), None)
    torch.testing.assert_close(normed, F.rms_norm(y, (80,), None, 1e-6))
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.ones(3, 24)).dtype == torch.bfloat16
    assert layer.comm.traffic.calls == 3
