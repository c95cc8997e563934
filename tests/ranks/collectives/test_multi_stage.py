"""`exact` and `randk:positions=shared` on real ranks: both engines, asynchronous, coalesced, with bits flipped in the
memory that the ranks share."""

from __future__ import annotations

import ctypes
import os
import re
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import dtcomm
from dtcomm import algorithms
from dtcomm.codecs import codec
from dtcomm.errors import CollectiveMismatch, PayloadCorrupt
from dtcomm.kernels import local_tasks, ops
from dtcomm.launch.ranks import run_ranks
from dtcomm.runtime.native import NativeOperation
from tests.support.rank_tests import on_ranks
from tests.unit.collectives.call_by_name import require_alike
from tests.unit.collectives.test_reproducible_sum import bits, contributions, true_sum
from tests.unit.collectives.test_rounded_sum import adversarial, sum_of

ROUNDED = "exact:rounded=true"
SHARED = "randk:ratio=0.05,positions=shared,values=fp32"


def compare_every_form(rank: int, n: int) -> None:
    """Call all_reduce in every form: exact returns the true sum, randk the sum at the shared positions."""
    for numel in (1, 5000, 300_001):
        inputs = contributions(n, numel, seed=numel)
        total = inputs[0].clone()
        for x in inputs[1:]:
            total += x
        key = local_tasks.shared_key(9)
        decoded_sum = ops.decode(SHARED, ops.encode(SHARED, total, key=key), numel)
        for spec, truth in (("exact", true_sum("exact", inputs)), (SHARED, decoded_sum)):
            for algorithm in algorithms.available("all_reduce"):
                reduced = inputs[rank].clone()
                dtcomm.all_reduce(reduced, codec=spec, algorithm=algorithm, seed=9)
                require_alike(reduced, (spec, algorithm))
                result, uncompressed = inputs[rank].clone(), torch.full((50_000,), float(rank))
                works = [
                    dtcomm.all_reduce(result, codec=spec, algorithm=algorithm, seed=9, async_op=True),
                    dtcomm.all_reduce(uncompressed, async_op=True),
                    dtcomm.all_reduce(inputs[rank].clone(), codec=spec, algorithm=algorithm, async_op=True),
                ]
                for work in works:
                    work.wait()
                assert torch.equal(bits(result), bits(reduced))
                assert torch.equal(uncompressed, torch.full((50_000,), n * (n - 1) / 2))
                if spec == "exact" or algorithm in ("one_shot", "two_shot"):  # fp32 sums in rank order
                    assert torch.equal(bits(reduced), bits(truth)), (spec, algorithm, numel)
                if spec == "exact":
                    audited = inputs[rank].clone()
                    dtcomm.all_reduce(audited, codec=spec, algorithm=algorithm, audit=True)
                    assert torch.equal(bits(audited), bits(truth))
                    work = dtcomm.all_reduce(inputs[rank].clone(), codec=spec, audit=True, async_op=True)
                    assert torch.equal(bits(work.get_future().wait()[0]), bits(truth))


@on_ranks(3)
def test_coalesced_results_equal_single_calls(rank: int, n: int) -> None:
    """Check that each tensor of a coalesced call with several codecs gets the result of a single call."""
    specs = ["exact", "int8", SHARED, "exact:bits=16", "none"]
    numels = [3000, 100, 9000, 77, 1]
    inputs = [contributions(n, numel, seed=i)[rank] for i, numel in enumerate(numels)]
    separate = [x.clone() for x in inputs]
    for x, spec in zip(separate, specs, strict=True):
        dtcomm.all_reduce(x, codec=spec, algorithm="two_shot", seed=1)
    for async_op in (False, True):
        tensors = [x.clone() for x in inputs]
        work = dtcomm.all_reduce_coalesced(
            tensors, codec=specs, algorithm="two_shot", seed=1, async_op=async_op
        )
        if work is not None:
            work.wait()
        for x, y, spec in zip(tensors, separate, specs, strict=True):
            assert torch.equal(bits(x), bits(y)), spec
    shard = torch.empty(1000)
    shares = contributions(n, 1000 * n, seed=5)
    dtcomm.reduce_scatter(shard, shares[rank].clone(), codec="exact")
    own_shards = [x[rank * 1000 : (rank + 1) * 1000] for x in shares]
    assert torch.equal(bits(shard), bits(true_sum("exact", own_shards)))
    copied = shares[0][:500].clone() if rank == 0 else torch.empty(500)
    dtcomm.broadcast(copied, 0, codec="exact")  # a world of one
    assert torch.equal(bits(copied), bits(ops.decode("exact", ops.encode("exact", shares[0][:500]), 500)))
    ring = str(algorithms.build("ring", "all_reduce", n))
    own = inputs[0].clone()
    dtcomm.run(ring, own, codec="exact")
    assert torch.equal(bits(own), bits(separate[0]))


@pytest.mark.parametrize("runtime", ["native", "process_group"])
def test_rounded_sums_are_the_same_in_every_form(runtime: str) -> None:
    run_ranks(compare_rounded_forms, 3, env={"DTCOMM_RUNTIME": runtime})


def compare_rounded_forms(rank: int, n: int) -> None:
    """Every collective that sums, every algorithm, asynchronous and coalesced: the exact sum, rounded once."""
    for kind, dtype in (("plain", torch.float32), ("wide", torch.float32), ("outliers", torch.bfloat16)):
        inputs = adversarial(kind, n, 6000, dtype)
        truth, _ = sum_of(inputs)
        for algorithm in algorithms.available("all_reduce"):
            x, y = inputs[rank].clone(), inputs[rank].clone()
            work = dtcomm.all_reduce(x, codec=ROUNDED, algorithm=algorithm, async_op=True)
            dtcomm.all_reduce(y, codec=ROUNDED, algorithm=algorithm)
            work.wait()
            assert torch.equal(bits(x), bits(truth)) and torch.equal(bits(y), bits(truth)), (kind, algorithm)
        shard = torch.empty(2000, dtype=dtype)
        dtcomm.reduce_scatter(shard, inputs[rank].clone(), codec=ROUNDED)
        assert torch.equal(bits(shard), bits(truth[rank * 2000 : (rank + 1) * 2000]))
        reduced = inputs[rank].clone()
        dtcomm.reduce(reduced, 1, codec=ROUNDED)
        assert rank != 1 or torch.equal(bits(reduced), bits(truth))
        averaged = inputs[rank].clone()
        dtcomm.all_reduce(averaged, "avg", codec=ROUNDED)
        assert torch.equal(bits(averaged), bits(sum_of(inputs, n)[0]))
        parts = [inputs[rank][:1000].clone(), inputs[rank][1000:].clone(), torch.ones(50, dtype=dtype)]
        dtcomm.all_reduce_coalesced(parts, codec=[ROUNDED, ROUNDED, "exact"])
        assert torch.equal(bits(torch.cat(parts[:2])), bits(truth))
        assert torch.equal(parts[2], torch.full((50,), float(n), dtype=dtype))
        rows = [x.view(60, 100) * (torch.arange(60) % (n + 1) != r)[:, None] for r, x in enumerate(inputs)]
        sparse = rows[rank].to_sparse(1)  # each rank lacks other rows
        dtcomm.all_reduce(sparse, codec=ROUNDED)
        assert torch.equal(
            bits(sparse.to_dense()), bits(sum_of([x.flatten() for x in rows])[0].view(60, 100))
        )
        sent = inputs[0].clone() if rank == 0 else torch.empty(6000, dtype=dtype)
        dtcomm.broadcast(sent, 0, codec=ROUNDED)
        assert torch.equal(bits(sent), bits(inputs[0]))
    inputs = adversarial("wide", n, 200_003, torch.float32)  # digits are scattered, and results gathered
    truth, _ = sum_of(inputs)
    for algorithm in ("auto", "ring", "hierarchical"):
        x, y = inputs[rank].clone(), inputs[rank].clone()
        work = dtcomm.all_reduce(x, codec=ROUNDED, algorithm=algorithm, async_op=True)
        dtcomm.all_reduce(y, "avg", codec=ROUNDED, algorithm=algorithm)
        work.wait()
        assert torch.equal(bits(x), bits(truth)) and torch.equal(bits(y), bits(sum_of(inputs, n)[0])), (
            algorithm
        )
    parts = [inputs[rank][:70_001].clone(), inputs[rank][70_001:].clone()]
    dtcomm.all_reduce_coalesced(parts, codec=ROUNDED)
    assert torch.equal(bits(torch.cat(parts)), bits(truth))
    x = torch.ones(100)
    x[3], x[5], x[7] = torch.inf, torch.inf if rank else -torch.inf, torch.nan if rank == 1 else 1.0
    dtcomm.all_reduce(x, codec=ROUNDED)
    expected = torch.full((100,), float(n))
    expected[3], expected[5], expected[7] = torch.inf, torch.nan, torch.nan
    assert torch.equal(x.nan_to_num(-5.0), expected.nan_to_num(-5.0))


@on_ranks(2)
def test_unsupported_options_are_refused(rank: int, n: int) -> None:
    x = torch.ones(100)
    for spec in ("none", "int8", SHARED):
        with pytest.raises(ValueError, match="audit: needs a codec whose sums are exact, got"):
            dtcomm.all_reduce(x, codec=spec, audit=True)
    with pytest.raises(ValueError, match="codec: none/exact: exact uses one representation on all levels"):
        dtcomm.all_reduce(x, codec="none/exact", algorithm="hierarchical")
    with pytest.raises(ValueError, match="op: max is valid with"):
        dtcomm.all_reduce(x, "max", codec="exact")
    with pytest.raises(ValueError, match="audit: needs a codec whose sums are exact, got exact:rounded"):
        dtcomm.all_reduce(x, codec=ROUNDED, audit=True)
    for op in ("sum", "avg"):
        with pytest.raises(
            TypeError, match=r"takes float32, .*, got float64: integers of 32 bits do not hold its"
        ):
            dtcomm.all_reduce(x.double(), op, codec=ROUNDED)
    duplicates = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.ones(2), (4,))
    with pytest.raises(ValueError, match="tensor: is not coalesced, and exact:rounded=true rounds once"):
        dtcomm.all_reduce(duplicates, codec=ROUNDED)
    with pytest.raises(ValueError, match="residual: exact:rounded=true loses nothing"):
        dtcomm.all_reduce(x, codec=ROUNDED, residual=torch.zeros(100))
    dtcomm.all_reduce(x, codec="exact")
    assert torch.equal(x, torch.full((100,), float(n)))


@pytest.mark.parametrize("difference", ["seed", "residual", "bits"])
@on_ranks(2)
def test_unequal_options_of_ranks_mismatch(rank: int, n: int, difference: str) -> None:
    """All-reduce on ranks that differ in the seed, the residual or the bits of exact."""
    options: dict[str, Any] = {
        "seed": {"codec": SHARED, "seed": rank},
        "residual": {"codec": SHARED, "residual": torch.zeros(9000) if rank else None},
        "bits": {"codec": "exact" if rank else "exact:bits=16"},
    }[difference]
    with pytest.raises(
        CollectiveMismatch, match={"bits": "exponents of exact"}.get(difference, "with number")
    ):
        dtcomm.all_reduce(torch.ones(9000), algorithm="one_shot", **options)


def shared_regions() -> list[tuple[int, int]]:
    """Return the address ranges at which this process has mapped the memory that ranks share."""
    with open("/proc/self/maps", encoding="ascii") as lines:
        matches = [re.match(r"([0-9a-f]+)-([0-9a-f]+) rw.*dtcomm-region", line) for line in lines]
    return [(int(match[1], 16), int(match[2], 16)) for match in matches if match]


def flip_staged_bit(rank: int, n: int, spec: str, async_op: bool) -> None:
    """Rank 0 has staged its integers; rank 1 is late and reads them after one of their bits has changed."""
    numel = 9000
    inputs = contributions(n, numel, seed=4)
    tensor = inputs[rank].clone()
    run, calls = NativeOperation.run, []

    def delayed_run(operation: NativeOperation, *arguments: Any) -> int:
        calls.append(arguments)
        if len(calls) == 2:  # the exponents are agreed on
            dist.barrier()
            time.sleep(0.1)  # until rank 0 has staged
            dist.barrier()
        return run(operation, *arguments)

    if rank == 1:
        NativeOperation.run = delayed_run  # type: ignore[method-assign,assignment]
        with pytest.raises(PayloadCorrupt, match="rank 1: audit of all_reduce with codec"):
            dtcomm.all_reduce(tensor, codec=spec, algorithm="one_shot", audit=True)
        NativeOperation.run = run  # type: ignore[method-assign]
    else:
        work = dtcomm.all_reduce(tensor, codec=spec, algorithm="one_shot", audit=True, async_op=True)
        dist.barrier()
        time.sleep(0.05)
        exact_codec = codec(spec)
        grid, codes = (
            torch.empty(exact_codec.blocks(numel), dtype=torch.uint8),
            torch.empty(numel, dtype=exact_codec.code_type),
        )  # type: ignore[attr-defined]
        largest = torch.stack(inputs).abs().amax(dim=0).nan_to_num(torch.nan)
        largest[torch.stack(inputs).isnan().any(dim=0)] = torch.nan
        local_tasks.measure_exponents(exact_codec, largest, None, grid)()  # type: ignore[arg-type]
        local_tasks.quantize_to_exponents(exact_codec, n, inputs[0], None, grid, codes)()  # type: ignore[arg-type]
        pattern = codes[4500:4600].numpy().tobytes()
        for start, end in shared_regions():
            at = ctypes.string_at(start, end - start).find(pattern)
            if at >= 0:
                ctypes.c_uint8.from_address(start + at + 8).value ^= 4
                break
        else:
            raise AssertionError("the integers are not in shared memory")
        dist.barrier()
        with pytest.raises(PayloadCorrupt, match=r"rank 0: audit of .* of elements 4096 to 8191"):
            work.wait()
    assert torch.equal(bits(tensor), bits(inputs[rank]))
    dtcomm.all_reduce(tensor, codec=spec, audit=True)  # the communicator stays usable
    assert torch.equal(bits(tensor), bits(true_sum(spec, inputs)))


@pytest.mark.parametrize("runtime", ["native", "process_group"])
def test_every_form_of_all_reduce_gives_one_result(runtime: str) -> None:
    run_ranks(compare_every_form, 3, env={"DTCOMM_RUNTIME": runtime})


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="needs /proc/self/maps")
@pytest.mark.parametrize("spec", ["exact", "exact:bits=16"])
def test_audit_detects_a_bit_flipped_in_shared_memory(spec: str) -> None:
    run_ranks(flip_staged_bit, 2, spec, True)
