"""The public collectives on real processes over shared memory: results, dtypes, asynchronous and coalesced calls."""

from __future__ import annotations

import gc
import itertools

import pytest
import torch
import torch.distributed as dist

from dtcomm import algorithms, collectives
from dtcomm.codecs import codec
from dtcomm.codecs.base import ELEMENT_TYPES
from dtcomm.launch.ranks import run_ranks
from dtcomm.measure import exact_inputs
from dtcomm.schedule.ir import COLLECTIVES
from tests.support.rank_tests import on_ranks
from tests.unit.collectives.call_by_name import call, require_alike

SIZES = (0, 1, 7, 1024, 5000, 70_001, 1_500_000)


def expected_output(name: str, everyone: torch.Tensor, rank: int) -> torch.Tensor:
    """Return what ``rank`` gets of the inputs of all ranks, the rows of ``everyone``."""
    n, empty = len(everyone), everyone[0][:0]
    if name == "all_reduce":
        return everyone.sum(0)
    if name == "broadcast":
        return everyone[0]
    if name == "all_gather":
        return everyone.flatten()
    if name in ("reduce", "gather"):
        whole = everyone.sum(0) if name == "reduce" else everyone.flatten()
        return whole if rank == 0 else empty
    if not everyone.numel():
        return empty
    if name == "reduce_scatter":
        return everyone.sum(0).chunk(n)[rank]
    if name == "scatter":
        return everyone[0].view(n, -1)[rank]
    assert name == "all_to_all"
    return everyone.view(n, n, -1)[:, rank].flatten()


def check_every_algorithm(rank: int, n: int) -> str:
    for name, count in itertools.product(COLLECTIVES, SIZES if n < 4 else SIZES[:-1]):
        everyone = torch.stack(
            [exact_inputs.inputs(name, min(count, 400_000), rank=r, world_size=n) % 64 for r in range(n)]
        )
        expected = expected_output(name, everyone, rank)
        for algorithm in (*algorithms.available(name), "auto", "direct"):
            for spec in ("none", "fp16", "int8"):
                if algorithm != "auto" and (count not in (0, 1, 5000, 70_001) or spec == "fp16"):
                    continue
                output = call(name, everyone[rank].clone(), n, codec=spec, algorithm=algorithm)
                if spec != "int8":
                    assert torch.equal(output, expected), (name, algorithm, count, spec)
                if name in ("all_reduce", "broadcast", "all_gather"):
                    require_alike(output, (name, algorithm, count, spec))
    return str(collectives.info()["runtime"])


@pytest.mark.parametrize("n", [2, 3, 4])
def test_every_algorithm_on_processes(n: int) -> None:
    assert run_ranks(check_every_algorithm, n, timeout=600) == ["native"] * n


@on_ranks(3)
def test_every_dtype(rank: int, n: int) -> None:
    for dtype in ELEMENT_TYPES:
        if dtype in (torch.bool, torch.int16):
            continue  # no exact inputs; the kernels' tests have them
        for op in ("sum", "avg", "min", "max"):
            if op == "avg" and not dtype.is_floating_point:
                continue
            for name in ("all_reduce", "reduce_scatter"):
                source = exact_inputs.inputs(name, 3001, dtype, op=op, rank=rank, world_size=n)
                expected = exact_inputs.expected(name, 3001, dtype, op=op, rank=rank, world_size=n)
                output = call(name, source, n, op=op)
                assert exact_inputs.count_mismatches(output, expected) == 0, (dtype, op, name)
        if dtype in (torch.float32, torch.float64, torch.int32, torch.int64, torch.int8, torch.uint8):
            torch.manual_seed(rank)
            tensor = torch.randint(0, 20, (513,)).to(dtype)
            torch_sum = tensor.clone()
            dist.all_reduce(torch_sum)
            assert torch.equal(call("all_reduce", tensor, n), torch_sum), dtype


@pytest.mark.parametrize("n", [2, 4])
@on_ranks()
def test_async_operations_run_in_issue_order(rank: int, n: int) -> None:
    torch.manual_seed(5)  # equal inputs on all ranks, so that expected results need no communication
    tensors = [torch.randint(-9, 9, (1 + 40_000 * (i % 3),)).float() for i in range(30)]
    expected = [tensor * n for tensor in tensors]
    works = [collectives.all_reduce(tensor, async_op=True) for tensor in tensors]
    inline = torch.ones(100)
    collectives.all_reduce(inline)  # behind the queue: in issue order
    assert all(work is not None and work.is_completed() for work in works)
    assert torch.equal(inline, torch.full((100,), float(n)))
    for tensor, want, work in zip(tensors, expected, works, strict=True):
        work.wait()
        assert torch.equal(tensor, want)
        assert work.wire_bytes > 0 and work.seconds > 0

    futures = []
    for i in range(20):
        tensor = torch.full((1000 * i + 1,), float(rank))
        work = collectives.all_reduce(tensor, async_op=True)
        futures.append(work.get_future().then(lambda completed: completed.value()[0].sum().item()))
        del work, tensor  # only the engine holds them
    gc.collect()
    sums = [future.wait() for future in futures]
    assert sums == [(1000 * i + 1) * n * (n - 1) / 2 for i in range(20)]

    empty = collectives.all_reduce(torch.empty(0), async_op=True)
    assert empty.get_future().wait()[0].numel() == 0


@pytest.mark.parametrize("n", [2, 3])
@on_ranks()
def test_coalesced_tensors_get_the_results_of_single_calls(rank: int, n: int) -> None:
    torch.manual_seed(rank)
    sizes = [3, 1024, 0, 5000, 33, 70_000]
    specs = ["none", "int8", "fp16", "int8:block=64", "bf16", "int8"]
    tensors = [torch.randn(size) for size in sizes]
    residuals = [
        torch.zeros(size) if spec.startswith("int8") else None
        for size, spec in zip(sizes, specs, strict=True)
    ]
    single = [tensor.clone() for tensor in tensors]
    for tensor, spec in zip(single, specs, strict=True):
        collectives.all_reduce(tensor, "avg", codec=spec, algorithm="two_shot")
    for bucket_bytes in (25 * 2**20, 4096):
        coalesced = [tensor.clone() for tensor in tensors]
        new_residuals = [None if residual is None else residual.clone() for residual in residuals]
        collectives.all_reduce_coalesced(
            coalesced,
            "avg",
            codec=specs,
            algorithm="two_shot",
            residuals=new_residuals,
            bucket_bytes=bucket_bytes,
        )
        for packed, alone, spec in zip(coalesced, single, specs, strict=True):
            assert torch.equal(packed, alone), spec  # independent of the other tensors of the message
            require_alike(packed, spec)
        assert all(
            residual is None or residual.numel() == 0 or residual.abs().sum() > 0
            for residual in new_residuals
        )
        work = collectives.all_reduce_coalesced(
            [tensor.clone() for tensor in tensors], codec=specs, async_op=True, bucket_bytes=bucket_bytes
        )
        assert len(work.get_future().wait()) == len(sizes)
        payload = sum(codec(spec).wire_bytes(size) for size, spec in zip(sizes, specs, strict=True))
        assert work.wire_bytes >= payload * 0.5 * (n - 1) / n
    collectives.all_reduce_coalesced([])


@on_ranks(2)
def test_transposed_channels_last_and_unaligned_tensors(rank: int, n: int) -> None:
    transposed = torch.arange(12.0).view(3, 4).t()
    collectives.all_reduce(transposed)
    assert torch.equal(transposed, torch.arange(12.0).view(3, 4).t() * n)
    image = torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)
    collectives.all_reduce(image)
    assert image.eq(n).all()
    gathered = torch.arange(float(3 * n))
    shard = gathered[3 * rank : 3 * rank + 3]
    collectives.all_gather(gathered, shard)  # in place
    collectives.reduce_scatter(shard, gathered)
    assert torch.equal(shard, torch.arange(3.0 * n)[3 * rank : 3 * rank + 3] * n)
    unaligned = torch.zeros(4097, dtype=torch.uint8)[1:]
    collectives.all_reduce(unaligned)


@on_ranks(1)
def test_single_rank_changes_nothing(rank: int, n: int) -> None:
    tensor = torch.randn(1000)
    before = tensor.clone()
    residual = torch.full((1000,), 0.5)
    collectives.all_reduce(tensor, "avg", codec="int8", residual=residual)
    assert torch.equal(tensor, before) and residual.eq(0.5).all()
    output = torch.empty(1000)
    collectives.all_gather(output, tensor, codec="int8")
    assert torch.equal(output, before)
    work = collectives.all_reduce(tensor, async_op=True)
    assert work is not None and work.is_completed()
    assert torch.equal(work.get_future().wait()[0], before)
    with pytest.raises(ValueError, match="codec"):
        collectives.all_reduce(tensor, codec="int9")


@on_ranks(2)
def test_stochastic_rounding_depends_on_the_seed(rank: int, n: int) -> None:
    torch.manual_seed(rank)
    source = torch.randn(5000)
    spec = "int8:round=stochastic"

    def once(seed: int | None) -> torch.Tensor:
        tensor = source.clone()
        collectives.all_reduce(tensor, codec=spec, seed=seed)
        return tensor

    assert torch.equal(once(1), once(1))
    assert not torch.equal(once(1), once(2))
    assert not torch.equal(once(None), once(None))  # the call's number
