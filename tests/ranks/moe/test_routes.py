"""Routes of experts' rows: bits, capacity, deduplication, hierarchies of hosts, encoded rows and differing ranks."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import dtcomm
from dtcomm import moe
from dtcomm.errors import CollectiveMismatch
from dtcomm.launch.ranks import run_ranks
from tests.support.rank_tests import on_ranks

EXPERTS, FEATURES = 12, 48


class Case:
    """Tokens of a rank, with different experts for each token."""

    def __init__(self, rank: int, choices: int, tokens: int = 40) -> None:
        generator = torch.Generator().manual_seed(17 * rank + choices)
        tokens += 3 * rank
        self.x = torch.randn(tokens, FEATURES, generator=generator)
        scores = torch.rand(tokens, EXPERTS, generator=generator)
        self.weights, self.experts = scores.topk(choices, 1)
        self.gradient = torch.randn(tokens, FEATURES, generator=generator)

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x.clone().requires_grad_(), self.weights.clone().requires_grad_()


def expert_rows(rows: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """The experts: elementwise, so that bits do not depend on the number of rows."""
    return torch.tanh(rows * (0.5 + numbers[:, None] / EXPERTS))


def numbers_of(route: Any, rank: int) -> torch.Tensor:
    """The number of each row's expert."""
    first = rank * len(route.counts)
    return torch.arange(first, first + len(route.counts)).repeat_interleave(torch.tensor(route.counts))


def mixture(case: Case, rank: int, **options: Any) -> list[torch.Tensor]:
    """Return rows, result, and gradients of tokens and weights."""
    x, weights = case.inputs()
    rows, route = moe.dispatch(x, case.experts, EXPERTS, **options)
    y = moe.combine(expert_rows(rows, numbers_of(route, rank)), route, weights)
    y.backward(case.gradient)
    assert x.grad is not None and weights.grad is not None
    return [rows.detach(), y.detach(), x.grad, weights.grad]


def padded_mixture(case: Case, rank: int, ranks: int, **options: Any) -> list[torch.Tensor]:
    x, weights = case.inputs()
    rows, route = moe.dispatch_padded(x, case.experts, EXPERTS, 40 + 3 * ranks, **options)
    numbers = torch.arange(rank * len(rows), (rank + 1) * len(rows))
    outputs = expert_rows(rows.flatten(0, 1), numbers.repeat_interleave(rows.shape[1])).view_as(rows)
    y = moe.combine_padded(outputs, route, weights)
    y.backward(case.gradient)
    assert x.grad is not None and weights.grad is not None
    return [rows.detach()[route.mask], y.detach(), x.grad, weights.grad]


def reference(case: Case) -> list[torch.Tensor]:
    """The same in one process: result, and gradients of tokens and weights."""
    x, weights = case.inputs()
    terms = [
        expert_rows(x, case.experts[:, choice]) * weights[:, choice, None]
        for choice in range(case.experts.shape[1])
    ]
    y = terms[0] if len(terms) == 1 else terms[0] + terms[1]
    y.backward(case.gradient)
    assert x.grad is not None and weights.grad is not None
    return [y.detach(), x.grad, weights.grad]


@pytest.mark.parametrize("ranks", [2, 4])
@on_ranks()
def test_uncompressed_has_the_bits_of_one_process(rank: int, ranks: int) -> None:
    for choices in (1, 2):
        case = Case(rank, choices)
        expected = reference(case)
        for actual in (
            mixture(case, rank, codec="none"),
            mixture(case, rank, codec="none", hierarchical=True),
            mixture(case, rank, codec="none", capacity=40 + 3 * ranks),
            padded_mixture(case, rank, ranks, codec="none"),
        ):
            for a, b in zip(actual[1:], expected, strict=True):
                assert torch.equal(a, b)


def compare_hierarchy(rank: int, ranks: int, hosts: list[int]) -> None:
    os.environ["DTCOMM_HOST_ID"] = f"host {hosts[rank]}"
    state = moe.MoEState()
    for choices in (3, 5):
        case = Case(rank, choices)
        flat = mixture(case, rank, codec="none", hierarchical=False)
        hierarchical = mixture(case, rank, codec="none")
        assert all(map(torch.equal, flat, hierarchical))
        # Payloads are passed on as they are, so the rows of every codec are the same.
        options = {"codec": "fp8_e4m3", "combine_codec": "none", "backward_codec": "none"}
        flat = mixture(case, rank, hierarchical=False, **options)
        hierarchical = mixture(case, rank, hierarchical=True, **options)
        assert all(map(torch.equal, flat, hierarchical))
        with_sums = mixture(case, rank, hierarchical=True)  # sums on hosts are encoded in bf16 once more
        for a, b in zip(with_sums[1:], flat[1:], strict=True):
            assert float((a - b).norm()) < 0.02 * float(b.norm())

    # A token travels once to each other host, and once to each other rank of the host that it arrives at.
    state = moe.MoEState()
    case = Case(rank, 5)
    _, route = moe.dispatch(case.x, case.experts, EXPERTS)
    owners = case.experts // (EXPERTS // ranks)
    host_of = torch.tensor(hosts)
    to_hosts = sum(int((host_of[owners] == host).any(1).sum()) for host in set(hosts) if host != hosts[rank])
    assert route.rows_between_hosts == to_hosts
    flat_route = moe.dispatch(case.x, case.experts, EXPERTS, hierarchical=False)[1]
    to_ranks = {peer: int((owners == peer).any(1).sum()) for peer in range(ranks)}
    assert flat_route.rows_between_hosts == sum(
        count for peer, count in to_ranks.items() if hosts[peer] != hosts[rank]
    )
    assert flat_route.rows_inside_host == sum(
        count for peer, count in to_ranks.items() if peer != rank and hosts[peer] == hosts[rank]
    )
    row_bytes = dtcomm.codec("fp8_e4m3").wire_bytes(FEATURES)

    def message(rows: int) -> int:
        """Bytes of rows for one rank, with 5 experts and a rank of 4 bytes each for every row."""
        return row_bytes * (rows + -(-rows * 4 * 6 // row_bytes))

    others = [peer for peer in range(ranks) if peer != rank]
    assert route.rows_inside_host == sum(route.hops[1].sent[peer] for peer in others)
    sent = {entry.name: entry.wire_bytes for entry in state.report().by_message}
    assert sent == {
        "between hosts": sum(message(route.hops[0].sent[peer]) for peer in others),
        "inside hosts": sum(message(route.hops[1].sent[peer]) for peer in others),
        "all ranks": sum(message(to_ranks[peer]) for peer in others),
    }
    totals = torch.tensor([route.rows_between_hosts, flat_route.rows_between_hosts])
    dtcomm.all_reduce(totals)
    assert totals[0] < 0.9 * totals[1]  # fewer than flat, in which a token goes to both ranks of a host


@pytest.mark.parametrize("hosts", [[0, 0, 1, 1], [0, 1, 0, 1], [0, 0, 1]])
def test_hierarchical_has_the_bits_of_flat_and_sends_each_token_once_to_a_host(hosts: list[int]) -> None:
    run_ranks(compare_hierarchy, len(hosts), hosts)


def compare_padded_hierarchy(rank: int, ranks: int, hosts: list[int]) -> None:
    os.environ["DTCOMM_HOST_ID"] = f"host {hosts[rank]}"
    for options in (
        {"codec": "none"},
        {},
        {"codec": "int4", "combine_codec": "int8", "backward_codec": "int8"},
    ):
        case = Case(rank, 3)
        results, reports = [], []
        for hierarchical in (False, True):
            state = moe.MoEState()
            results.append(padded_mixture(case, rank, ranks, hierarchical=hierarchical, **options))
            reports.append({(entry.name, entry.what): entry for entry in state.report().by_message})
        assert all(map(torch.equal, *results))
        # As many bytes go to other hosts, in one message to each of them.
        outside = sum(host != hosts[rank] for host in hosts)
        for what in ("tokens", "outputs", "gradients of tokens", "gradients of outputs"):
            direct = reports[0]["all ranks, padded", what]
            relayed = reports[1]["between hosts, padded", what]
            assert direct.calls == relayed.calls == reports[1]["inside hosts, padded", what].calls == 1
            assert relayed.wire_bytes * (ranks - 1) == direct.wire_bytes * outside


@pytest.mark.parametrize("hosts", [[0, 0, 1, 1], [0, 1, 0, 1], [0, 0, 1], [0, 1]])
def test_padded_rows_are_the_same_hierarchically(hosts: list[int]) -> None:
    run_ranks(compare_padded_hierarchy, len(hosts), hosts)


@on_ranks(2)
def test_capacity_drops_the_last_rows_or_those_of_the_lowest_priority(rank: int, ranks: int) -> None:
    """Tokens 0 to 5 choose experts 0 and 1; of an expert's 6 rows of a rank 2 or 4 are kept."""
    x = torch.arange(1.0, 7.0)[:, None].repeat(1, 8) + 100 * rank
    experts = torch.tensor([[0, 1]]).repeat(6, 1)
    weights = torch.stack(
        [torch.arange(6.0), torch.arange(6.0).flip(0)], 1
    )  # token 5 matters most to expert 0
    for capacity, priorities, kept in (
        (2, None, ([0, 1], [0, 1])),
        (4, None, ([0, 1, 2, 3], [0, 1, 2, 3])),
        (2, weights, ([4, 5], [0, 1])),
        (9, weights, (range(6), range(6))),
    ):
        rows, route = moe.dispatch(x, experts, ranks, capacity=capacity, priorities=priorities, codec="none")
        counts = tuple(len(k) for k in kept)
        assert int(route.dropped) == 12 - sum(counts)
        assert route.counts == ((ranks * counts[rank],) if rank < 2 else (0,))
        if rank < 2:
            expected = torch.cat(
                [torch.tensor([1.0 + k for k in kept[rank]]) + 100 * r for r in range(ranks)]
            )
            assert rows[:, 0].tolist() == expected.tolist()
        y = moe.combine(rows, route)
        times = torch.tensor([sum(token in k for k in kept) for token in range(6)])
        assert torch.equal(y, x * times[:, None])
        padded, padded_route = moe.dispatch_padded(
            x, experts, ranks, capacity, priorities=priorities, codec="none"
        )
        assert int(padded_route.dropped) == 12 - sum(counts)
        assert padded.shape == (1, ranks * capacity, 8)
        assert sorted(padded[padded_route.mask][:, 0].tolist()) == sorted(rows[:, 0].tolist())
        assert torch.equal(moe.combine_padded(padded, padded_route), y)


@on_ranks(3)
def test_ranks_with_different_numbers_of_tokens_agree_on_the_capacity(rank: int, ranks: int) -> None:
    """Ranks compute capacities from their own tokens; the padded form takes the largest, the other one each rank's."""
    for tokens in ((8, 8, 8), (8, 5, 1), (0, 6, 0), (0, 0, 0)):
        x = torch.randn(tokens[rank], 8).requires_grad_()
        experts = torch.arange(2 * len(x)).view(-1, 2) % ranks
        capacity = moe.expert_capacity(len(x), ranks, choices=2, factor=1.5)
        largest = moe.expert_capacity(max(tokens), ranks, choices=2, factor=1.5)
        for hierarchical in (False, True):
            padded, padded_route = moe.dispatch_padded(
                x, experts, ranks, capacity, hierarchical=hierarchical, codec="none"
            )
            assert padded_route.capacity == largest and padded.shape == (1, ranks * largest, 8)
            y = moe.combine_padded(padded, padded_route)
            assert int(padded_route.dropped) == 0 and torch.allclose(y, 2 * x)
        rows, route = moe.dispatch(x, experts, ranks, capacity=capacity, codec="none")
        assert int(route.dropped) == 0 and torch.allclose(moe.combine(rows, route), y)
        (gradient,) = torch.autograd.grad(y.sum(), x)
        assert torch.equal(gradient, torch.full_like(x, 2))
    # One expert takes all: the ranks drop by the same capacity, which all of them know.
    x = torch.ones(6 - 2 * rank, 8)
    _, padded_route = moe.dispatch_padded(
        x, torch.zeros(len(x), dtype=torch.long), ranks, len(x) // 2, codec="none"
    )
    assert int(padded_route.dropped) == max(0, len(x) - 3)
    assert padded_route.counts.tolist() == ([[3, 3, 2]] if rank == 0 else [[0, 0, 0]])


@on_ranks(2)
def test_rows_and_gradients_are_encoded_once_in_their_codecs(rank: int, ranks: int) -> None:
    """Each row and each gradient is what its codec decodes to, encoded once and alone."""

    def through(codec: str, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([dtcomm.decode(codec, dtcomm.encode(codec, row), row.numel()) for row in x])

    case = Case(rank, 1)
    x = case.x.clone().requires_grad_()
    experts = case.experts[:, 0]
    for padded in (False, True):
        dispatch, combine = (
            (moe.dispatch_padded, moe.combine_padded) if padded else (moe.dispatch, moe.combine)
        )
        options: dict[str, Any] = {"codec": "mxfp8", "combine_codec": "fp16", "backward_codec": "fp8_e5m2"}
        if padded:
            options["capacity"] = 60
        rows, route = dispatch(x, experts, EXPERTS, **options)  # type: ignore[operator]
        y = combine(rows, route)
        assert torch.equal(y, through("fp16", through("mxfp8", case.x)))
        (gradient,) = torch.autograd.grad(y, x, case.gradient)
        assert torch.equal(gradient, through("fp8_e5m2", through("fp8_e5m2", case.gradient)))
        # By default tokens are fp8, outputs and gradients bf16.
        defaults = {"capacity": 60} if padded else {}
        rows, route = dispatch(x, experts, EXPERTS, **defaults)  # type: ignore[operator]
        y = combine(rows, route)
        assert torch.equal(y, through("bf16", through("fp8_e4m3", case.x)))
        (gradient,) = torch.autograd.grad(y, x, case.gradient)
        assert torch.equal(gradient, through("bf16", case.gradient))

        # The expert may take the payload.
        encoded, route = dispatch(x, experts, EXPERTS, encoded=True, **defaults)  # type: ignore[operator]
        assert isinstance(encoded, moe.EncodedRows)
        assert encoded.payload.dtype == torch.uint8 and str(encoded.codec) == "fp8_e4m3"
        assert torch.equal(encoded.decode(), rows)
        (same,) = torch.autograd.grad(combine(encoded.decode(), route), x, case.gradient)
        assert torch.equal(same, gradient)
        (same,) = torch.autograd.grad(encoded.gradient_edge, x, torch.ones(rows.shape))
        assert torch.equal(same, torch.ones_like(x))
    bf16, _ = moe.dispatch(x.bfloat16(), experts, EXPERTS)
    assert bf16.dtype == torch.bfloat16


@on_ranks(2)
def test_ranks_that_pass_different_arguments_raise_an_error_that_names_them(rank: int, ranks: int) -> None:
    """All ranks raise the same error, and none waits for rows."""
    experts = torch.zeros(4, 2, dtype=torch.long)

    def call(name: str, **changed: Any) -> None:
        arguments: dict[str, Any] = {"x": torch.ones(4, 8), "experts": experts, "num_experts": 4}
        arguments |= {"capacity": 3} if name == "dispatch_padded" else {}
        getattr(moe, name)(**(arguments | (changed if rank else {})))

    for name in ("dispatch", "dispatch_padded"):
        for changed, message in (
            ({"x": torch.ones(4, 16)}, "x: rank 0 passes 8 features and rank 1 16 features; all ranks"),
            ({"x": torch.ones(4, 8).half()}, "x: rank 0 passes torch.float32 and rank 1 torch.float16"),
            ({"experts": experts[:, :1]}, "experts: rank 0 passes 2 choices and rank 1 1 choices"),
            ({"codec": "int8"}, "codec: rank 0 and rank 1 pass different codecs"),
            ({"backward_codec": "none"}, "codec: rank 0 and rank 1 pass different codecs"),
        ):
            with pytest.raises(CollectiveMismatch, match=message):
                call(name, **changed)
        where = "" if rank else " on rank 1"
        with pytest.raises(ValueError, match=f"experts: expected 0 to 3, got 0 to 4{'' if rank else where}"):
            call(name, experts=torch.tensor([[0, 4]] * 4))
    with pytest.raises(CollectiveMismatch, match="hierarchical: rank 0 passes False and rank 1 True"):
        call("dispatch", hierarchical=True)
    call("dispatch")  # the group still works
    with pytest.raises(CollectiveMismatch, match=r"num_experts: .* different numbers of experts \(this one"):
        call("dispatch", num_experts=6)


@on_ranks(3)
def test_ranks_without_tokens(rank: int, ranks: int) -> None:
    """No rank has a token; then only rank 1 has some, which all choose the last rank's expert twice."""
    for total in (0, 3):
        tokens = total if rank == 1 else 0
        x = torch.ones(tokens, 8, requires_grad=True)
        rows, route = moe.dispatch(x, torch.full((tokens, 2), ranks - 1), ranks, hierarchical=True)
        assert sum(route.counts) == len(rows) == (2 * total if rank == ranks - 1 else 0)
        y = moe.combine(rows * 1.0, route, torch.ones(tokens, 2))
        assert y.shape == (tokens, 8)
        y.sum().backward()
        assert x.grad is not None and x.grad.shape == x.shape
