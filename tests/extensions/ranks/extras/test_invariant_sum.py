"""A row-parallel layer in codec ``exact`` has the same bits on 1, 2, 4 and 8 ranks, for messages of any size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import dtcomm
from dtcomm import tp
from dtcomm.codecs import Exact
from dtcomm.extensions.extras.invariant_sum import InvariantRowParallelLinear, sum_of_terms
from dtcomm.launch.ranks import run_ranks
from tests.support.rank_tests import on_ranks

IN, OUT, TERMS = 192, 80, 8
TOKENS = (1, 3, 64, 1000)
RANKS = (1, 2, 4, 8)


def features(rank: int, ranks: int, tokens: int, dtype: torch.dtype) -> torch.Tensor:
    """Return this rank's features; magnitudes vary, so that the order of additions matters."""
    generator = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, IN, generator=generator) * torch.logspace(-3, 3, IN)
    return x.to(dtype).chunk(ranks, 1)[rank].contiguous()


def outputs(rank: int, ranks: int, options: dict[str, Any], dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    kind = InvariantRowParallelLinear if "terms" in options else tp.RowParallelLinear
    layer = kind(IN, OUT, dtype=dtype, **options)
    with torch.no_grad():
        return [layer(features(rank, ranks, tokens, dtype)) for tokens in TOKENS]


def on_every_number_of_ranks(options: dict[str, Any], dtype: torch.dtype) -> list[list[torch.Tensor]]:
    """Return the outputs for each size on 1, 2, 4 and 8 ranks, whose ranks agree."""
    results = []
    for ranks in RANKS:
        by_rank = run_ranks(outputs, ranks, options, dtype)
        assert all(torch.equal(a, b) for own in by_rank for a, b in zip(own, by_rank[0], strict=True))
        results.append(by_rank[0])
    return results


@pytest.mark.parametrize(
    ("codec", "dtype"),
    [("exact", torch.float32), ("exact", torch.bfloat16), ("exact:bits=16", torch.float32)],
)
def test_the_bits_do_not_depend_on_the_number_of_ranks(codec: str, dtype: torch.dtype) -> None:
    results = on_every_number_of_ranks({"codec": codec, "terms": TERMS}, dtype)
    for result in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))
    torch.manual_seed(0)
    dense = nn.Linear(IN, OUT, dtype=dtype).double()
    for tokens, output in zip(TOKENS, results[0], strict=True):
        with torch.no_grad():
            expected = dense(features(0, 1, tokens, dtype).double())
        error = torch.linalg.vector_norm(output.double() - expected) / torch.linalg.vector_norm(expected)
        assert error < (1e-6 if codec == "exact" and dtype is torch.float32 else 1e-2)


def test_without_terms_they_do() -> None:
    """The control: uncompressed sums, and exact ones of one term a rank, differ between numbers of ranks."""
    for codec in ("none", "exact"):
        results = on_every_number_of_ranks({"codec": codec}, torch.float32)
        assert any(not torch.equal(a, b) for a, b in zip(results[0], results[-1], strict=True)), codec


def exact_sums(rank: int, ranks: int) -> list[torch.Tensor]:
    """Sum the same eight tensors, dealt out over the ranks, by every algorithm."""
    results = []
    for numel in (1, 33, 1000, 70_000):
        tensors = torch.randn(TERMS, numel, generator=torch.Generator().manual_seed(numel))
        own = list(tensors.chunk(ranks)[rank])
        results.append(sum_of_terms(own, TERMS, Exact()))
        assert torch.equal(results[-1], sum_of_terms(own[::-1], TERMS, Exact()))
        if ranks == TERMS:
            for algorithm in ("one_shot", "two_shot", "ring", "tree"):
                total = own[0].clone()
                dtcomm.all_reduce(total, codec="exact", algorithm=algorithm)
                assert torch.equal(total, results[-1]), algorithm
    return results


def test_it_is_the_sum_of_all_reduce() -> None:
    first = run_ranks(exact_sums, 1)[0]
    for ranks in RANKS[1:]:
        for results in run_ranks(exact_sums, ranks):
            assert all(torch.equal(a, b) for a, b in zip(results, first, strict=True))


@on_ranks(2)
def test_gradients_and_options(rank: int, ranks: int) -> None:
    torch.manual_seed(0)
    layer = InvariantRowParallelLinear(IN, OUT, terms=4)
    dense = nn.Linear(IN, OUT)
    dense.load_state_dict(layer.full_state_dict())
    x = features(rank, ranks, 5, torch.float32).requires_grad_()
    whole = features(0, 1, 5, torch.float32).requires_grad_()
    residual = torch.ones(5, OUT)
    layer(x, residual=residual).square().sum().backward()
    (dense(whole) + residual).square().sum().backward()
    for actual, expected in (
        (x.grad, whole.grad.chunk(ranks, 1)[rank]),
        (layer.weight.grad, dense.weight.grad.chunk(ranks, 1)[rank]),
        (layer.bias.grad, dense.bias.grad),
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    assert layer(x[:0]).shape == (0, OUT)
    assert layer.comm.traffic.calls == 2
    y, normed = layer.with_norm(x, residual, None)
    torch.testing.assert_close(normed, torch.nn.functional.rms_norm(y, (OUT,), None, 1e-6))
    for options, argument in (
        ({"codec": "int8", "terms": 4}, "codec: int8"),
        ({"terms": 3}, "terms: 3"),
        ({"terms": 10}, "terms: 10"),
        ({"terms": 4, "sequence_parallel": True}, "sequence_parallel"),
    ):
        with pytest.raises(ValueError, match=argument):
            InvariantRowParallelLinear(IN, OUT, **options)
