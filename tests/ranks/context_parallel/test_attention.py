"""Context-parallel attention compared to attention over the whole sequence on one rank."""

from __future__ import annotations

import itertools
import time
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

import dtcomm
from dtcomm import context_parallel as cp
from dtcomm.context_parallel.state import METHODS
from dtcomm.errors import PeerLost
from dtcomm.launch.ranks import send_to_parent, spawn_ranks
from tests.support.rank_tests import on_ranks

HEADS, DIM = 12, 8


class Case(NamedTuple):
    """Whole sequences, the same on all ranks."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    gradient: torch.Tensor


def make_case(
    tokens: int, *, key_heads: int = HEADS, v_dim: int = DIM, dtype: torch.dtype = torch.float32
) -> Case:
    generator = torch.Generator().manual_seed(tokens)
    shapes = [(2, HEADS, tokens, DIM), (2, key_heads, tokens, DIM), (2, key_heads, tokens, v_dim)]
    shapes.append((2, HEADS, tokens, v_dim))
    return Case(*(torch.randn(shape, generator=generator).to(dtype) for shape in shapes))


def full(case: Case, is_causal: bool) -> list[torch.Tensor]:
    """Return output and gradients of attention over the whole sequence, fp32."""
    q, k, v = (x.float().clone().requires_grad_() for x in case[:3])
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)
    out.backward(case.gradient.float())
    return [out.detach(), *(x.grad for x in (q, k, v) if x.grad is not None)]


def sharded(case: Case, is_causal: bool, layout: str = "zigzag", **options: Any) -> list[torch.Tensor]:
    """Return the same of `attention`, gathered from all ranks, fp32."""
    tokens = case.q.shape[2]
    padded = cp.padded_length(tokens, dist.get_world_size(), layout)
    q, k, v = (cp.shard(x, 2, layout=layout).clone().requires_grad_() for x in case[:3])
    length = None if padded == tokens else tokens
    out = cp.attention(q, k, v, is_causal=is_causal, layout=layout, length=length, enable_gqa=True, **options)
    out.backward(cp.shard(case.gradient, 2, layout=layout))
    assert out.dtype == case.q.dtype
    parts = [out, *(x.grad for x in (q, k, v) if x.grad is not None)]
    return [cp.unshard(part, 2, layout=layout, length=tokens).float() for part in parts]


def require_close(
    actual: list[torch.Tensor], expected: list[torch.Tensor], limit: float, name: object
) -> None:
    assert len(actual) == len(expected) == 4
    for part, a, b in zip(("out", "dq", "dk", "dv"), actual, expected, strict=True):
        error = float((a - b).norm() / b.norm())
        assert error <= limit, (name, part, error)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@on_ranks(timeout=120)
def test_uncompressed_equals_full_attention(rank: int, ranks: int) -> None:
    # 22 and 13 tokens leave ranks with padding, 2 tokens leave ranks with nothing but padding.
    cases = [(make_case(24), 2e-6), (make_case(22, key_heads=HEADS // 2 if ranks < 4 else 4), 2e-6)]
    cases += [(make_case(13, dtype=torch.bfloat16), 6e-3), (make_case(2), 2e-6)]
    for (case, limit), is_causal in itertools.product(cases, (False, True)):
        expected = full(case, is_causal)
        for method, layout in itertools.product(METHODS, ("zigzag", "contiguous")):
            if method == "ulysses" and case.k.shape[1] % ranks:
                continue
            actual = sharded(case, is_causal, layout, method=method)
            name = (case.q.shape[2], is_causal, method, layout)
            require_close(actual, expected, limit, name)


@on_ranks(2)
def test_other_head_dimensions_lengths_and_scales(rank: int, ranks: int) -> None:
    """Values with a head dimension of their own; queries and keys of different lengths; a scale."""
    case = make_case(12, v_dim=5)
    for method in METHODS:
        require_close(sharded(case, True, method=method), full(case, True), 2e-6, method)
    q, k, v = case.q, case.k[:, :, :6], case.v[:, :, :6]
    expected = functional.scaled_dot_product_attention(q, k, v, scale=0.1)
    for method in METHODS:
        parts = [cp.shard(x, 2, layout="contiguous") for x in (q, k, v)]
        out = cp.attention(*parts, scale=0.1, layout="contiguous", method=method)
        torch.testing.assert_close(cp.unshard(out, 2, layout="contiguous"), expected)


def decoded_case(case: Case, ranks: int, layout: str, codec: str) -> Case:
    """Return the case with the keys and values that each rank's payload decodes to."""
    parts = []
    chunks = cp.padded_length(1, ranks, layout)
    size = case.k.shape[2] // chunks
    owners = [[r, 2 * ranks - 1 - r] if layout == "zigzag" else [r] for r in range(ranks)]
    k, v = torch.empty_like(case.k), torch.empty_like(case.v)
    for owned in owners:
        tokens = torch.cat([torch.arange(chunk * size, (chunk + 1) * size) for chunk in owned])
        flat = torch.cat([x[:, :, tokens].flatten() for x in (case.k, case.v)])
        decoded = dtcomm.decode(codec, dtcomm.encode(codec, flat), flat.numel())
        parts = [part.view(2, -1, len(tokens), DIM) for part in decoded.chunk(2)]
        k[:, :, tokens], v[:, :, tokens] = parts
    return case._replace(k=k, v=v)


@pytest.mark.parametrize("ranks", [2, 3])
@on_ranks()
def test_all_ranks_use_the_bytes_of_the_owner(rank: int, ranks: int) -> None:
    case = make_case(24)
    for codec, layout, is_causal in itertools.product(
        ("int8", "fp8_e4m3", "mxfp4"), ("zigzag", "contiguous"), (False, True)
    ):
        # Every rank computes with the keys and values that their owner's bytes decode to, its own ones included.
        expected = full(decoded_case(case, ranks, layout, codec), is_causal)
        ring = sharded(case, is_causal, layout, kv_codec=codec, backward_codec="none")
        require_close(ring, expected, 2e-6, (codec, layout, is_causal))
        gathered = sharded(
            case, is_causal, layout, kv_codec=codec, backward_codec="none", method="all_gather"
        )
        assert torch.equal(gathered[0], ring[0])
        assert torch.equal(gathered[1], ring[1])
        again = sharded(case, is_causal, layout, kv_codec=codec, backward_codec="none")
        assert all(map(torch.equal, ring, again))


@on_ranks(2)
def test_errors_of_codecs(rank: int, ranks: int) -> None:
    case = make_case(48)
    for is_causal, method in itertools.product((False, True), METHODS):
        expected = full(case, is_causal)
        for codec, limit in (("bf16", 0.01), ("int8", 0.02), ("fp8_e4m3", 0.1), ("int4", 0.3)):
            options = {"qo_codec": codec} if method == "ulysses" else {}
            actual = sharded(case, is_causal, method=method, kv_codec=codec, **options)
            require_close(actual, expected, limit, (codec, is_causal, method))
            if codec != "bf16":
                assert float((actual[0] - expected[0]).norm() / expected[0].norm()) > 1e-4
            # A codec of gradients changes the gradients and nothing else.
            rounded = sharded(
                case, is_causal, method=method, kv_codec=codec, backward_codec="int8", **options
            )
            assert torch.equal(rounded[0], actual[0])
            assert not torch.equal(rounded[2], actual[2])
            require_close(rounded, expected, limit + 0.02, (codec, is_causal, method))


@on_ranks(2)
def test_stochastic_rounding_depends_on_the_seed(rank: int, ranks: int) -> None:
    case = make_case(24)
    for method in METHODS:
        options = {
            "method": method,
            "kv_codec": "int4:round=stochastic",
            "backward_codec": "int8:round=stochastic",
        }
        first, again, other = (sharded(case, True, seed=seed, **options) for seed in (1, 1, 2))
        assert all(map(torch.equal, first, again))
        assert not torch.equal(first[0], other[0])
        require_close(first, full(case, True), 0.3, method)


@on_ranks(2)
def test_the_report_counts_what_was_sent(rank: int, ranks: int) -> None:
    state, of_other_group = cp.ContextParallelState(), cp.ContextParallelState(dist.new_group())
    case = make_case(32)
    sharded(case, True, kv_codec="int8", backward_codec="bf16")
    report = state.report()
    rows = {row.what: row for row in report.rows}
    half = case.k.numel()  # elements of the keys and values of one rank
    assert rows["keys and values"].codec == "int8"
    assert rows["keys and values"].calls == 2  # forward and backward
    assert rows["keys and values"].plain_bytes == 2 * 4 * half
    assert rows["keys and values"].wire_bytes == 2 * dtcomm.codec("int8").wire_bytes(half)
    # Rank 1 sees the first chunk of rank 0 only; rank 0 sees all keys of rank 1.
    assert rows["gradients"].codec == "bf16"
    assert rows["gradients"].plain_bytes == 4 * half // (2 if rank == 1 else 1)
    assert rows["gradients"].wire_bytes == rows["gradients"].plain_bytes // 2
    assert report.wire_bytes == sum(row.wire_bytes for row in report.rows)
    assert report.integration == "context parallel"
    assert of_other_group.report().messages == 0
    assert "ring: gradients bf16, keys and values int8" in str(report)
    before = report.wire_bytes
    sharded(case, False, method="ulysses")
    assert {row.what for row in state.report().rows} == {
        "keys and values",
        "queries and outputs",
        "gradients",
    }
    assert state.report().wire_bytes > before


@on_ranks(2)
def test_wrong_arguments_are_refused(rank: int, ranks: int) -> None:
    q = torch.randn(1, 3, 4, 8)
    for options, message in (
        ({"method": "rings"}, "method: 'rings' is not one of ring, all_gather, ulysses .did you mean 'ring'"),
        ({"layout": "zag"}, "layout: 'zag' is not one of zigzag, contiguous"),
        ({"kv_codec": "int9"}, "kv_codec: unknown codec 'int9' .did you mean 'int8'"),
        ({"kv_codec": "int8/int4"}, "kv_codec: 'int8/int4' names a codec for each level of hosts"),
        ({"kv_codec": "exact"}, "kv_codec: exact is for sums"),
        ({"kv_codec": "lossless"}, "kv_codec: lossless has payloads of a length that depends on the data"),
        ({"kv_codec": "topk:ratio=0.01"}, "kv_codec: topk.* loses 96% of the keys and values .*allow_inacc"),
        ({"kv_codec": "sign"}, "kv_codec: sign loses 60% .*use 4 bits or more; allow_inaccurate=True"),
        ({"backward_codec": "int2"}, "backward_codec: int2 loses 66% of the gradients"),
        ({"qo_codec": "int8"}, "qo_codec: int8 is for method='ulysses'"),
        ({"method": "ulysses"}, "q: 3 heads do not divide among 2 ranks, which method='ulysses' needs"),
        ({"length": 9}, "length=9: the ranks have 8 tokens together"),
        ({"seed": -1}, "seed=-1: expected 0 or more"),
    ):
        with pytest.raises(ValueError, match=message):
            cp.attention(q, q, q, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"q: 3 tokens; in the zigzag layout .*context_parallel.shard pads"):
        cp.attention(q[:, :, :3], q[:, :, :3], q[:, :, :3], is_causal=True)
    with pytest.raises(ValueError, match="k: 1 heads, q has 3; enable_gqa=True allows fewer"):
        cp.attention(q, q[:, :1], q[:, :1])
    with pytest.raises(ValueError, match="k: 2 heads do not divide the 3 heads of q"):
        cp.attention(q, q[:, :2], q[:, :2], enable_gqa=True)
    with pytest.raises(ValueError, match="k: 2 tokens, q has 4; causal attention needs as many"):
        cp.attention(q, q[:, :, :2], q[:, :, :2], is_causal=True)
    with pytest.raises(ValueError, match=r"v: expected \[1, 3, 4, head_dim\] as k"):
        cp.attention(q, q, q[:, :, :2])
    with pytest.raises(ValueError, match=r"q: expected \[batch, heads, tokens, head_dim\]"):
        cp.attention(q[0], q[0], q[0])
    with pytest.raises(TypeError, match=r"k: is torch\.float16"):
        cp.attention(q, q.half(), q)
    with pytest.raises(TypeError, match=r"q: expected float32, float16 or bfloat16, got torch\.float64"):
        cp.attention(q.double(), q.double(), q.double())
    with pytest.raises(TypeError, match="group: expected a process group"):
        cp.attention(q, q, q, group="world")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="allow_inaccurate: expected a bool"):
        cp.attention(q, q, q, allow_inaccurate=1)  # type: ignore[arg-type]
    out = cp.attention(q, q, q, kv_codec="int2", allow_inaccurate=True)
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("ranks", [2, 3])
@on_ranks()
def test_sequences_are_sharded_and_gathered(rank: int, ranks: int) -> None:
    x = torch.arange(22).view(1, 22)
    part = cp.shard(x, 1, pad_value=-1)
    assert part.shape == (1, 24 // ranks)
    positions = cp.positions(part.shape[1])
    assert torch.equal(part[0], torch.where(positions < 22, positions, -1))
    assert torch.equal(cp.unshard(part, 1, length=22), x)
    assert torch.equal(cp.unshard(cp.shard(x, -1, layout="contiguous"), 1, layout="contiguous", length=22), x)
    with pytest.raises(ValueError, match="dim=2: the tensor has 2 dimensions"):
        cp.shard(x, 2)
    with pytest.raises(ValueError, match="tokens: 3 tokens are not two equal chunks"):
        cp.positions(3)
    with pytest.raises(ValueError, match="x: dim 1 has 3 tokens"):
        cp.unshard(x[:, :3], 1)


def attend_to_dead_rank(rank: int, ranks: int, method: str, backward: bool) -> str:
    case = make_case(16)
    q, k, v = (cp.shard(x, 2).requires_grad_() for x in case[:3])
    out = cp.attention(q, k, v, is_causal=True, kv_codec="int8", method=method)
    dist.barrier()
    if rank == 1:
        send_to_parent("running")
        time.sleep(60)
    with pytest.raises(PeerLost) as error:
        if backward:
            out.sum().backward()
        else:
            cp.attention(q, k, v, is_causal=True, kv_codec="int8", method=method)
    return str(error.value)


@pytest.mark.parametrize(
    ("method", "backward"), [("ring", False), ("ring", True), ("all_gather", True), ("ulysses", False)]
)
def test_a_killed_rank_is_named(method: str, backward: bool) -> None:
    with spawn_ranks(attend_to_dead_rank, 2, method, backward) as ranks:
        assert ranks.receive(1, 60) == "running"
        ranks.kill(1)
        outcomes = ranks.join(timeout=30)
    assert outcomes[0].ok and "rank 1" in outcomes[0].result
