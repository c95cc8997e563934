"""Coalesced calls give each tensor the result of a call of its own, with any number of messages, on both runtimes."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from dtcomm import algorithms, collectives
from dtcomm.codecs import codec
from dtcomm.launch.ranks import run_ranks

SIZES = (3, 1024, 0, 5000, 300_000, 70_001)  # of a shard; the fifth is large enough to travel alone
SPECS = ("none", "int8", "fp16", "topk:ratio=0.1", "none", "int4:round=stochastic")
DTYPES = (torch.int64, torch.float32, torch.bfloat16, torch.float32, torch.float32, torch.float16)


def _inputs(rank: int, scale: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    sizes_of = zip(SIZES, DTYPES, strict=True)
    return [
        torch.randint(-50, 50, (size * scale,), generator=generator).to(dtype) for size, dtype in sizes_of
    ]


def _residuals(inputs: list[torch.Tensor]) -> list[torch.Tensor | None]:
    lossy = [not codec(spec).lossless(tensor.dtype) for spec, tensor in zip(SPECS, inputs, strict=True)]
    return [
        torch.zeros(tensor.numel()) if is_lossy else None
        for tensor, is_lossy in zip(inputs, lossy, strict=True)
    ]


def _call_twice(
    name: str, rank: int, ranks: int, algorithm: str, bucket_bytes: int | None
) -> list[torch.Tensor]:
    """Run two calls with feedback, one tensor at a time if ``bucket_bytes`` is None; return outputs and residuals."""
    scale_in, scale_out = (1, ranks) if name == "all_gather" else (ranks, 1)
    inputs = _inputs(rank, scale_in)
    residuals = _residuals(inputs)
    outputs = [torch.zeros(size * scale_out, dtype=dtype) for size, dtype in zip(SIZES, DTYPES, strict=True)]
    single: Any = getattr(collectives, name)
    several: Any = getattr(collectives, f"{name}_coalesced")
    for turn in range(2):
        common: dict[str, Any] = {"algorithm": algorithm, "seed": 7 + turn}
        if bucket_bytes is None:
            for output, tensor, spec, residual in zip(outputs, inputs, SPECS, residuals, strict=True):
                single(output, tensor, codec=spec, residual=residual, **common)
            continue
        common |= {
            "codec": SPECS,
            "residuals": residuals,
            "bucket_bytes": bucket_bytes,
            "async_op": turn == 1,
        }
        work = several(outputs, inputs, **common)
        if turn:
            future_outputs = work.get_future().wait()
            assert [tensor.data_ptr() for tensor in future_outputs] == [
                tensor.data_ptr() for tensor in outputs
            ]
            assert work.is_completed() and work.wire_bytes > 0
    return [*outputs, *(tensor for tensor in residuals if tensor is not None)]


def compare(rank: int, ranks: int, two_hosts: bool) -> list[str]:
    """Return the differences between coalesced calls and single calls, in words."""
    if two_hosts:
        os.environ["DTCOMM_HOST_ID"] = (
            f"host {rank}"  # where every size and codec may have an algorithm of its own
        )
    different = []
    for name in ("all_gather", "reduce_scatter"):
        for algorithm in (*algorithms.available(name), "auto"):
            single = _call_twice(name, rank, ranks, algorithm, None)
            for bucket_bytes in (100_000, 25 * 2**20):
                coalesced = _call_twice(name, rank, ranks, algorithm, bucket_bytes)
                same = [torch.equal(a, b) for a, b in zip(coalesced, single, strict=True)]
                if not all(same):
                    different.append(f"{name} {algorithm} buckets of {bucket_bytes}: {same}")
    before = collectives.info()["operations"]
    collectives.all_gather_coalesced(
        [torch.empty(100 * ranks) for _ in range(10)],
        [torch.ones(100) for _ in range(10)],
        bucket_bytes=800 * ranks,
    )
    assert collectives.info()["operations"] == before + 5  # two tensors a bucket
    collectives.all_gather_coalesced([], [])
    collectives.reduce_scatter_coalesced([], [])
    return different


@pytest.mark.parametrize(("ranks", "two_hosts"), [(3, False), (2, True)], ids=["one host", "two hosts"])
def test_coalesced_results_equal_single_calls(ranks: int, two_hosts: bool) -> None:
    assert run_ranks(compare, ranks, two_hosts) == [[]] * ranks
