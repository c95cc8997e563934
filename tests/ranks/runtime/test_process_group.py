"""The torch.distributed executor: over a strict in-memory fabric of threads, and over Gloo against the engine."""

import os
import signal
import threading
import time

import pytest
import torch

import dtcomm.collectives as C
from dtcomm import algorithms
from dtcomm.codecs import codec
from dtcomm.errors import CollectiveMismatch, CollectiveTimeout, DtcommError, PeerLost
from dtcomm.launch.ranks import run_ranks, send_to_parent, spawn_ranks
from dtcomm.measure import exact_inputs
from dtcomm.runtime.torchdist.arithmetic import Arithmetic
from dtcomm.runtime.torchdist.rounds import HOST_LOOKAHEAD, RoundsPlan
from dtcomm.runtime.torchdist.runtime import Execution, MemoryPool
from dtcomm.runtime.types import Buffers, OpSpec, TensorSpec
from dtcomm.schedule.ir import CUT_AT_GRANULES, ROOTED
from dtcomm.streams import HostStreams
from tests.support.stopwatch import Stopwatch
from tests.unit.algorithms.every_algorithm import NAMES, build
from tests.unit.runtime.every_collective import OVER_GLOO, calls
from tests.unit.runtime.simulated_cases import SHARDS_IN, SHARDS_OUT
from tests.unit.runtime.thread_messages import Rendezvous, ThreadMessages


def execute(plan: RoundsPlan, buffers: Buffers, seed: int, fabric: Rendezvous) -> None:
    """Execute one rank's call over the fabric."""
    arithmetic = Arithmetic(plan, [buffers], seed)
    Execution(plan, arithmetic, ThreadMessages(fabric, plan.rank), MemoryPool(HostStreams()), 0).run()


def execute_on_all_ranks(
    collective, name, ranks, numel, spec, op="sum", message_bytes=4096, residuals=None, root=0, seed=1
):
    """Execute one call on all ranks; return their inputs and outputs, and the number of pieces."""
    shape = OpSpec(collective, op, (TensorSpec(numel, torch.float32, codec(spec)),), name, root)
    schedule = build(name, collective, ranks, root)
    fabric, failures = Rendezvous(), []
    count_in = numel * (ranks if collective in SHARDS_IN else 1)
    count_out = numel * (ranks if collective in SHARDS_OUT else 1)
    inputs = [torch.randn(count_in, generator=torch.Generator().manual_seed(rank)) for rank in range(ranks)]
    outputs = [torch.full((count_out,), torch.nan) for _ in range(ranks)]
    plans = [RoundsPlan(shape, schedule, rank, message_bytes, False, HOST_LOOKAHEAD) for rank in range(ranks)]

    def run(rank: int) -> None:
        try:
            residual = None if residuals is None else residuals[rank]
            source = inputs[rank] if collective != "scatter" or rank == root else None
            target = outputs[rank] if collective not in ("reduce", "gather") or rank == root else None
            execute(plans[rank], Buffers(source, target, residual), seed, fabric)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures, failures[0]
    assert not any(fabric.posted.values()) and not any(fabric.sent.values())
    total = numel if collective in CUT_AT_GRANULES else numel * ranks
    if len(plans[0].pieces) == 1 or total % 1024 == 0:
        assert tuple(plan.sent_bytes for plan in plans) == schedule.bytes_on_wire(total, codec(spec))
    return inputs, outputs, len(plans[0].pieces)


@pytest.mark.parametrize(("collective", "name"), NAMES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_lossless_results(collective: str, name: str, ranks: int) -> None:
    root = ranks - 1 if collective in ROOTED else 0
    for numel in (0, 1, 1025, 30_000):
        inputs, outputs, pieces = execute_on_all_ranks(collective, name, ranks, numel, "none", root=root)
        assert pieces > 4 or numel < 30_000
        exact_sum = torch.stack(inputs).double().sum(0)
        for rank, output in enumerate(outputs):
            if collective in ("reduce", "gather") and rank != root:
                assert output.isnan().all()
            elif collective == "broadcast":
                assert torch.equal(output, inputs[root])
            elif collective in ("all_gather", "gather"):
                assert torch.equal(output, torch.cat(inputs))
            elif collective == "scatter":
                assert torch.equal(output, inputs[root].view(ranks, -1)[rank])
            elif collective == "all_to_all":
                assert torch.equal(output, torch.cat([tensor.view(ranks, -1)[rank] for tensor in inputs]))
            else:
                shard = (
                    slice(rank * numel, (rank + 1) * numel) if collective == "reduce_scatter" else slice(None)
                )
                torch.testing.assert_close(output, exact_sum[shard].float())


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("spec", ["int8", "int8:round=stochastic", "fp16"])
@pytest.mark.parametrize("name", algorithms.available("all_reduce"))
def test_all_ranks_end_with_the_same_bits(name: str, spec: str, ranks: int) -> None:
    inputs, outputs, _ = execute_on_all_ranks("all_reduce", name, ranks, 20_000, spec, op="avg")
    assert all(torch.equal(output, outputs[0]) for output in outputs)
    mean = torch.stack(inputs).mean(0)
    assert (outputs[0] - mean).abs().max() < (0.1 if "int8" in spec else 0.01)


@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
@pytest.mark.parametrize(
    ("collective", "name"), [case for case in NAMES if case[0] in ("all_reduce", "reduce_scatter")]
)
def test_residuals_conserve_mass(collective: str, name: str, ranks: int, op: str) -> None:
    numel = 9000
    total_numel = numel * (ranks if collective == "reduce_scatter" else 1)
    residuals = [
        torch.randn(total_numel, generator=torch.Generator().manual_seed(99 + r)) for r in range(ranks)
    ]
    before = torch.stack(residuals).double()
    inputs, outputs, _ = execute_on_all_ranks(collective, name, ranks, numel, "int8", op, residuals=residuals)
    assert any(residual.count_nonzero() for residual in residuals)
    result = outputs[0] if collective == "all_reduce" else torch.cat(outputs)
    # mass: n * mean (or the sum) + new residuals = inputs + old residuals
    scale = ranks if op == "avg" else 1
    total_input = torch.stack(inputs).double().sum(0) + before.sum(0)
    assert (result.double() * scale + torch.stack(residuals).double().sum(0) - total_input).abs().max() < 1e-4


def test_nonfinite_block_keeps_its_residual() -> None:
    # In a tree the root adds its residual when it reads its input and settles it when it encodes the sum.
    residuals = [torch.full((2048,), 0.25 * (rank + 1)) for rank in range(4)]
    inputs = [torch.randn(2048, generator=torch.Generator().manual_seed(rank)) for rank in range(4)]
    shape = OpSpec("all_reduce", "sum", (TensorSpec(2048, torch.float32, codec("int8")),), "tree")
    schedule = algorithms.build("tree", "all_reduce", 4)
    inputs[0][5] = torch.inf
    plans = [RoundsPlan(shape, schedule, rank, 4096, False) for rank in range(4)]
    fabric = Rendezvous()

    def run(rank: int) -> None:
        execute(plans[rank], Buffers(inputs[rank], inputs[rank], residuals[rank]), 0, fabric)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert inputs[0][:32].isnan().all() and inputs[0][32:].isfinite().all()
    assert (residuals[0][:32] == 0.25).all()
    assert (residuals[0][32:].abs() < 0.25).all() and residuals[0][32:].count_nonzero()


def compare_runtimes(rank: int, world_size: int) -> dict[str, object]:
    os.environ["DTCOMM_RUNTIME"] = "native"
    native, before = calls(rank, world_size), C.info()
    C.release()
    os.environ.update(OVER_GLOO)
    over_gloo, after = calls(rank, world_size), C.info()
    C.release()
    return {
        "runtimes": (before["runtime"], after["runtime"]),
        "different": [i for i, (a, b) in enumerate(zip(native, over_gloo)) if not torch.equal(a, b)],
        "wire_bytes": (before["wire_bytes"], after["wire_bytes"]),
        "results": len(native),
    }


@pytest.mark.parametrize("world_size", [2, 3])
def test_bits_equal_those_of_the_engine(world_size: int) -> None:
    for report in run_ranks(compare_runtimes, world_size):
        assert report["runtimes"] == ("native", "process_group")
        assert report["different"] == []
        assert report["results"] > 100


def count_wrong_sums(rank: int, world_size: int) -> int:
    wrong = 0
    for op in exact_inputs.OPS:
        for count in (1, 1000, 300_000):
            x = exact_inputs.inputs("all_reduce", count, op=op, rank=rank, world_size=world_size)
            C.all_reduce(x, op)
            wrong += exact_inputs.count_mismatches(
                x, exact_inputs.expected("all_reduce", count, op=op, rank=rank, world_size=world_size)
            )
    return wrong


def test_sums_are_exact() -> None:
    assert run_ranks(count_wrong_sums, 4, env=OVER_GLOO) == [0] * 4


def reduce_unequal_calls(rank: int, world_size: int, how: str) -> str:
    x = torch.ones(1000 + (7 if how == "numel" and rank == 1 else 0))
    C.all_reduce(torch.ones(10))
    if how == "skip" and rank == 1:
        C.all_reduce(x)
        return ""
    try:
        C.all_reduce(
            x.bfloat16() if how == "dtype" and rank == 1 else x,
            "avg" if how == "op" and rank == 1 else "sum",
            codec="int8" if how == "codec" and rank == 1 else "none",
        )
        C.all_reduce(torch.ones(20))
    except CollectiveMismatch as error:
        try:
            C.all_reduce(x)
        except CollectiveMismatch as second:
            return f"{error} / {second}"
    return "no error"


@pytest.mark.parametrize("how", ["numel", "dtype", "op", "codec"])
def test_check_names_the_ranks_and_their_calls(how: str) -> None:
    for errors in run_ranks(reduce_unequal_calls, 3, how, env={**OVER_GLOO, "DTCOMM_CHECK": "1"}):
        first, second = errors.split(" / ")
        assert first == second, "stays failed"
        for rank in range(3):
            assert f"rank {rank}" in first
        assert {"numel": "1007 float32", "dtype": "1000 bfloat16", "op": "avg", "codec": "int8"}[how] in first
        assert "call 1: all_reduce(sum, 1000 float32, codec none" in first


def reduce_unequal_sizes(rank: int, world_size: int) -> str:
    try:
        C.all_reduce(torch.ones(1000 + rank))
    except DtcommError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def test_unchecked_mismatch_times_out() -> None:
    with spawn_ranks(reduce_unequal_sizes, 2, env=OVER_GLOO, group_timeout=2.0) as ranks:
        outcomes = ranks.join(30)
    for rank, outcome in enumerate(outcomes):
        assert outcome.ok, str(outcome)
        assert outcome.result.startswith(f"CollectiveTimeout: rank {1 - rank}")
        assert "DTCOMM_CHECK=1" in outcome.result


def reduce_until_failure(rank: int, world_size: int, algorithm: str) -> None:
    x = torch.ones(2_000_000)
    C.all_reduce(x, algorithm=algorithm)
    send_to_parent("ready")
    try:
        while True:
            watch = Stopwatch()
            C.all_reduce(x, algorithm=algorithm, codec="int8")
    except DtcommError as error:
        elapsed = watch.elapsed()
        try:
            C.all_reduce(x)
        except type(error) as second:
            assert str(second) == str(error)
        send_to_parent((type(error).__name__, str(error), elapsed))


@pytest.mark.parametrize(("sig", "algorithm"), [(signal.SIGKILL, "two_shot"), (signal.SIGSTOP, "ring")])
def test_a_lost_rank_is_named(sig: signal.Signals, algorithm: str) -> None:
    victim, kind = 1, PeerLost if sig == signal.SIGKILL else CollectiveTimeout
    waited = []
    with spawn_ranks(reduce_until_failure, 4, algorithm, env=OVER_GLOO, group_timeout=4.0) as ranks:
        for rank in range(4):
            assert ranks.receive(rank) == "ready"
        time.sleep(0.2)
        ranks.kill(victim, sig)
        for rank in (0, 2, 3):
            name, text, elapsed = ranks.receive(rank)
            assert name == kind.__name__, text
            assert text.startswith(f"rank {victim} "), text
            assert f"pid {ranks.pids[victim]}" in text
            assert elapsed.within(cpu_s=7.0, wall_s=20.0), elapsed
            waited.append(elapsed)
    # Gloo does not report a closed connection to a message that it is writing, so only one rank must be quick: before
    # the group's timeout.
    assert sig == signal.SIGSTOP or any(elapsed.within(cpu_s=2.0, wall_s=3.5) for elapsed in waited), waited
