"""How many kernels and calls of NCCL a collective takes on a device, counted in plans without a device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch

from dtcomm import algorithms
from dtcomm.codecs import codec
from dtcomm.runtime.torchdist.arithmetic import steps
from dtcomm.runtime.torchdist.rounds import RoundsPlan
from dtcomm.runtime.types import OpSpec, TensorSpec
from tests.support.fake_cuda_tensor import launches_of

Shapes = list[tuple[int, ...]]


class Cost(NamedTuple):
    """What a call takes of the device's queue; calls are those of NCCL."""

    kernels: int
    calls: int


def cost(
    collective: str, parts: Sequence[TensorSpec], ranks: int, algorithm: str, op: str, hosts: int = 1
) -> Cost:
    """Return the cost of one call on rank 0."""
    schedule = algorithms.build(algorithm, collective, ranks, hosts=(ranks // hosts,) * hosts)
    plan = RoundsPlan(OpSpec(collective, op, tuple(parts), algorithm), schedule, 0)
    kernels = calls = 0
    for piece, at in plan.order:
        calls += bool(plan.rounds[at].kind)
        for step in (*steps(plan, piece, at, False), *steps(plan, piece, at, True)):
            kernels += launches_of(step.group) if step.group else len(step.calls)
    return Cost(kernels, calls)


def gpt2() -> Shapes:
    """The parameters of GPT-2 124M in their order."""
    width = 768
    layer: Shapes = [(width,), (width,), (3 * width, width), (3 * width,), (width, width), (width,)]
    layer += [(width,), (width,), (4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    return [(50257, width), (1024, width), *12 * layer, (width,), (width,)]


def seven_billion() -> Shapes:
    """The parameters of a Llama of 7 billion parameters in their order."""
    width, hidden = 4096, 11008
    layer: Shapes = [(width,), *4 * [(width, width)], (width,), *2 * [(hidden, width)], (width, hidden)]
    return [(32000, width), *32 * layer, (width,), (32000, width)]


def buckets(shapes: Shapes, dtype: torch.dtype) -> list[list[TensorSpec]]:
    """Return the parts of DDP's buckets of 1 MiB and then 25 MiB, as ``int8`` compresses them."""
    filled: list[list[TensorSpec]] = [[]]
    size, limit = 0, 2**20
    for shape in reversed(shapes):
        if size >= limit:
            filled.append([])
            size, limit = 0, 25 * 2**20
        numel = math.prod(shape)
        size += numel * dtype.itemsize
        parts, spec = filled[-1], "int8" if len(shape) > 1 else "none"
        if parts and spec == "none" and parts[-1].codec.name == "none":
            numel += parts.pop().numel  # neighbours that are not compressed are one part
        parts.append(TensorSpec(numel, dtype, codec(spec)))
    return filled


@pytest.mark.parametrize(
    ("shapes", "dtype", "most_in_step", "most_in_bucket"),
    [(gpt2(), torch.float32, 13 * 6, Cost(6, 3)), (seven_billion(), torch.bfloat16, 1500, Cost(8, 4))],
)
def test_a_bucket_takes_few_launches(
    shapes: Shapes, dtype: torch.dtype, most_in_step: int, most_in_bucket: Cost
) -> None:
    costs = [cost("all_reduce", parts, 8, "two_shot", "avg") for parts in buckets(shapes, dtype)]
    assert sum(bucket.kernels for bucket in costs) <= most_in_step
    assert max(bucket.kernels for bucket in costs) <= most_in_bucket.kernels
    assert max(bucket.calls for bucket in costs) <= most_in_bucket.calls


def test_a_bucket_on_two_hosts_takes_one_call_for_each_level() -> None:
    for parts in buckets(gpt2(), torch.float32)[1:-1]:  # the last one is the embedding, of 150 MB
        kernels, calls = cost("all_reduce", parts, 16, "hierarchical", "avg", hosts=2)
        assert kernels <= 10
        assert calls == 4  # inside, to the owner on the other host, back, inside


def test_a_layer_of_fsdp_takes_few_launches() -> None:
    shard = (4 * 4096 * 4096 + 3 * 4096 * 11008 + 2 * 4096) // 8
    gather = cost("all_gather", [TensorSpec(shard, torch.bfloat16, codec("fp8_e4m3"))], 8, "one_shot", "sum")
    scatter = cost("reduce_scatter", [TensorSpec(shard, torch.bfloat16, codec("int8"))], 8, "one_shot", "avg")
    assert gather.kernels + scatter.kernels <= 24
    assert gather.calls + scatter.calls <= 12


@pytest.mark.parametrize("tokens", [256, 4096])
def test_a_sum_of_tensor_parallelism_takes_few_launches(tokens: int) -> None:
    parts = [TensorSpec(tokens * 4096, torch.bfloat16, codec("int8"))]
    assert cost("all_reduce", parts, 8, "two_shot", "sum") <= Cost(9, 4)


def test_large_messages_are_cut_whatever_the_number_of_chunks() -> None:
    """A gather's chunks are whole shards, a sum's are parts of the tensor: both are cut by the bytes of all."""
    for ranks in (2, 8, 64):
        shard = TensorSpec(2**30 // ranks, torch.bfloat16, codec("int8"))
        gathered = cost("all_gather", [shard], ranks, "one_shot", "sum").calls
        summed = cost("all_reduce", [shard._replace(numel=2**30)], ranks, "two_shot", "sum").calls
        assert 4 <= gathered <= 8
        assert 8 <= summed <= 16
