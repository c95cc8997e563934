"""The symmetric two-shot all-reduce: bytes, fused epilogue, and independence of a token's result from its batch."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn import functional as F

import dtcomm
from dtcomm import tp
from dtcomm.codecs import codec
from dtcomm.launch.ranks import run_ranks
from dtcomm.tp import functional, row_linear
from dtcomm.tp.comm_config import CommConfig
from dtcomm.tp.flash_all_reduce import Epilogue, FlashAllReduce
from tests.support.rank_tests import on_ranks

FEATURES = 96


def rank_input(rank: int, tokens: int = 50, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(tokens, FEATURES, generator=torch.Generator().manual_seed(rank)).to(dtype)


@on_ranks(3)
def test_a_token_does_not_depend_on_its_batch(rank: int, ranks: int) -> None:
    """Compare sums of single tokens to sums of batches. A matrix product need not be invariant, so there is none."""
    tokens = rank_input(rank, 40)
    for spec in "none int8 int4 int2:spikes=1 fp8_e4m3:block=32 mxfp4 int4:symmetric=false fp16".split():
        for algorithm in ("one_shot", "two_shot_symmetric"):
            comm = tp.CommConfig.of(spec, algorithm=algorithm)
            assert comm.batch_invariant(FEATURES)
            single_sums = torch.cat(
                [functional.all_reduce(tokens[index : index + 1], comm) for index in range(40)]
            )
            for start, stop in ((0, 40), (3, 9), (7, 40)):
                batch_sum = functional.all_reduce(tokens[start:stop], comm)
                assert torch.equal(batch_sum, single_sums[start:stop]), (spec, algorithm, start, stop)
    for spec, algorithm, features in (
        ("int8", "direct", 96),
        ("int8:rotate=hadamard", "two_shot_symmetric", 96),
        ("int8:round=stochastic", "one_shot", 96),
        ("int8", "two_shot_symmetric", 100),
        ("topk:ratio=0.1", "two_shot_symmetric", 96),
    ):
        assert not tp.CommConfig.of(spec, algorithm=algorithm).batch_invariant(features)


CONFIGURATIONS = (
    ("int8", "two_shot_symmetric", 1),
    ("int4", "two_shot_symmetric", 3),
    ("int8", "direct", 1),
    ("none", "direct", 4),
    ("none", "two_shot_symmetric", "auto"),
)


@on_ranks(2)
def test_fused_epilogue_equals_separate_operations(rank: int, ranks: int) -> None:
    """Compare bias, residual and norm in the decoding pass to separate torch operations."""
    for (spec, algorithm, chunks), dtype in itertools.product(
        CONFIGURATIONS, (torch.float32, torch.bfloat16)
    ):
        generator = torch.Generator().manual_seed(9)
        stream = torch.randn(5, 10, FEATURES, generator=generator).to(dtype).requires_grad_()
        weight = torch.linspace(0.5, 1.5, FEATURES).to(dtype).requires_grad_()
        torch.manual_seed(1)
        layer = tp.RowParallelLinear(
            64 * ranks, FEATURES, codec=spec, algorithm=algorithm, chunks=chunks, dtype=dtype, latency=False
        )
        plain = tp.RowParallelLinear(
            64 * ranks, FEATURES, bias=False, codec=spec, algorithm=algorithm, chunks=chunks, latency=False
        )
        plain.load_dense({"weight": layer.full_state_dict()["weight"].requires_grad_()})
        generator = torch.Generator().manual_seed(rank)
        x = torch.randn(5, 10, 64, generator=generator).to(dtype).requires_grad_()
        parameters = [x, stream, weight, layer.bias]

        def close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype = dtype) -> None:
            error = float((actual - expected).float().norm() / expected.float().norm())
            assert error < (1e-5 if dtype == torch.float32 else 0.02), error

        y = plain(x) + layer.bias + stream
        expected = [y, F.rms_norm(y, (FEATURES,), weight, 1e-5)]
        actual = list(layer.with_norm(x, stream, weight, 1e-5))
        with torch.no_grad():
            assert all(
                torch.equal(*pair)
                for pair in zip(layer.with_norm(x, stream, weight, 1e-5), actual, strict=True)
            )
            assert torch.equal(layer(x, stream), actual[0])
        gradients = []
        for results, matrix in ((expected, plain.weight), (actual, layer.weight)):
            for outputs in ((0, 1), (1,)):  # the loss depends on both results, or on the norm alone
                loss = torch.stack([(results[index].float() - 1).pow(3).sum() for index in outputs]).sum()
                gradients.append(torch.autograd.grad(loss, [*parameters, matrix], retain_graph=True))
        for value, expected_value in zip(
            [*actual, *gradients[2], *gradients[3]], [*expected, *gradients[0], *gradients[1]]
        ):
            close(value, expected_value)
        (gradient,) = torch.autograd.grad(layer(x, stream).float().pow(2).sum(), x)
        (expected_gradient,) = torch.autograd.grad(y.float().pow(2).sum(), x)
        close(gradient, expected_gradient)


@on_ranks(2)
def test_the_latency_path_is_chosen_and_counted(rank: int, ranks: int) -> None:
    """One token is sent uncompressed because that is faster, many are compressed; the traffic counters say so."""
    torch.manual_seed(0)
    layer = tp.RowParallelLinear(64, FEATURES, codec="int8")
    always_compressed = tp.RowParallelLinear(64, FEATURES, codec="int8", latency=False)
    always_compressed.load_state_dict(layer.state_dict())
    with torch.no_grad():
        for variant in (layer, always_compressed):
            variant(torch.ones(1, 32))
            variant(torch.ones(1000, 32))
    traffic = layer.comm.traffic
    assert (traffic.calls, traffic.elements, traffic.uncompressed) == (2, 1001 * FEATURES, 1)
    reason = traffic.reason
    assert reason.startswith("int8 ") and f"none {reason.split('none ')[1]}" in reason
    assert traffic.payload_bytes == FEATURES * 4 + 1000 * FEATURES * 34 // 32
    assert always_compressed.comm.traffic.uncompressed == 0 and always_compressed.comm.traffic.reason == ""


def test_automatic_chunks_are_used_between_hosts_only(monkeypatch: pytest.MonkeyPatch) -> None:
    comm = CommConfig(codec=codec("int4"), backward_codec=codec("none"))
    y = torch.empty(2048, 4096)
    for hosts, expected in ((1, 1), (2, 8)):
        monkeypatch.setattr(row_linear, "info", lambda group, hosts=hosts: {"hosts": hosts})
        assert row_linear.automatic_chunks(comm, y, comm.codec) == expected
    assert row_linear.automatic_chunks(comm, y[:512], comm.codec) == 2
    assert row_linear.automatic_chunks(comm, y[:4], comm.codec) == 1


@pytest.mark.parametrize(
    ("spec", "reduction"), [("int8", 1.88), ("int4", 3.5), ("int4:block=128", 3.8), ("int2", 6.3)]
)
def test_wire_bytes_compared_to_bf16(spec: str, reduction: float) -> None:
    byte_counts = run_ranks(count_bytes, 2, spec)
    for compressed_bytes, bf16_bytes, two_step_bytes in byte_counts:
        assert bf16_bytes / compressed_bytes >= reduction
        assert bf16_bytes / two_step_bytes >= reduction


def count_bytes(rank: int, ranks: int, spec: str) -> tuple[int, int, int]:
    """Return the bytes a rank sends to sum 512 tokens: in the codec, in bf16, and with `FlashAllReduce`."""
    sent = []
    for codec_spec in (spec, "none"):
        work = dtcomm.all_reduce(
            torch.zeros(512, 1024, dtype=torch.bfloat16),
            codec=codec_spec,
            algorithm="two_shot",
            async_op=True,
        )
        work.wait()
        sent.append(work.wire_bytes)
    operation = FlashAllReduce(torch.zeros(512, 1024, dtype=torch.bfloat16), tp.CommConfig.of(spec))
    operation.start_gather()
    operation.finish(torch.empty(512, 1024, dtype=torch.bfloat16), None, Epilogue())
    return sent[0], sent[1], operation.sent_bytes
