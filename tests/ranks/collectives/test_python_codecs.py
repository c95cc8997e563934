"""Codecs written in Python in the collectives of every runtime: the bits of the codecs that have the same bytes."""

from __future__ import annotations

import re
import time

import pytest
import torch
import torch.distributed as dist

import dtcomm
from dtcomm import algorithms, codecs, collectives
from dtcomm.errors import CollectiveMismatch, DtcommError, PeerLost
from dtcomm.launch.ranks import run_ranks, send_to_parent, spawn_ranks
from tests.support import python_codecs
from tests.support.python_codecs import bf16_bytes, decode_bf16, encode_bf16
from tests.support.rank_tests import on_ranks
from tests.unit.runtime.every_collective import OVER_GLOO, calls

OVER_TCP = {"DTCOMM_TRANSPORT": "sockets"}


def same_as_native(rank: int, n: int, name: str) -> None:
    mine = python_codecs.register()[name]
    theirs = calls(rank, n, specs=(name,), sizes=(1, 5000, 40_001))
    ours = calls(rank, n, specs=(str(mine),), sizes=(1, 5000, 40_001))
    assert len(theirs) == len(ours) and all(map(torch.equal, theirs, ours))
    info = dtcomm.info()
    if info["runtime"] == "native":
        assert re.match(
            r"\d+ calls: torch encodes and sums on a thread, the engine moves", info["python_codecs"]
        )


@pytest.mark.parametrize("name", ["bf16", "int8"])
@pytest.mark.parametrize("environment", [{}, OVER_TCP, OVER_GLOO], ids=["memory", "tcp", "gloo"])
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_collective_gives_the_bits_of_the_native_codec(
    ranks: int, environment: dict[str, str], name: str
) -> None:
    run_ranks(same_as_native, ranks, name, fresh=True, env={**environment, "DTCOMM_CHECKSUM": "1"})


def other_calls(rank: int, n: int) -> list[torch.Tensor]:
    """Return the results of the calls that `calls` does not make, with a codec that rounds at random."""
    codec = python_codecs.register()["scaled"]
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(30_000, generator=generator)
    results = []
    for algorithm in algorithms.available("all_reduce"):
        total = x.clone()
        residual = torch.randn(30_000, generator=generator) / 10
        before = residual.clone()
        collectives.all_reduce(total, codec=codec, algorithm=algorithm, residual=residual)
        parts = [torch.empty_like(x) for _ in range(n)]
        dist.all_gather(parts, total)
        assert all(torch.equal(part, total) for part in parts)  # the same bits on all ranks
        kept = torch.stack([x + before, -residual])
        dist.all_reduce(kept)
        assert (total - kept.sum(0)).abs().max() < 1e-4 * n  # what was not sent is in the residuals
        results += [total, residual]
    splits = [100 * (rank + other) for other in range(n)]
    received = torch.empty(sum(splits))
    collectives.all_to_all(received, x[: sum(splits)], splits, splits, codec=codec)
    gathered = torch.empty(5000 * n)
    collectives.gather(x[:5000], gathered if rank == 1 else None, 1, codec=codec)
    scattered = torch.empty(700)
    collectives.scatter(scattered, x[: 700 * n] if rank == 0 else None, 0, codec=codec)
    reduced = x[:999].clone()
    collectives.reduce(reduced, 1, codec=codec)
    message = x[:3000].clone()
    if rank == 0:
        collectives.send(message, 1, codec=codec)
    elif rank == 1:
        collectives.recv(message, 0, codec=codec)
    tensors = [x[:2000].clone(), x[2000:2500].clone(), x[2500:9000].clone()]
    collectives.all_reduce_coalesced(tensors, codec=[codec, "none", "int8"])
    results += [received, scattered, message, *tensors]
    return results + ([gathered, reduced] if rank == 1 else [])


def test_all_runtimes_give_the_same_bits_of_a_codec_that_scales_whole_chunks() -> None:
    native, gloo = (run_ranks(other_calls, 3, fresh=True, env=env) for env in ({}, OVER_GLOO))
    for theirs, ours in zip(native, gloo, strict=True):
        assert len(theirs) == len(ours) > 15
        assert all(torch.equal(a, b) for a, b in zip(theirs, ours, strict=True))


def interleaved(rank: int, n: int) -> None:
    """Calls with codecs of both kinds run in the order in which they are issued, on the same tensor too."""
    codec = python_codecs.register()["int8"]
    x, y = torch.full((50_000,), float(rank)), torch.full((50_000,), float(rank))
    works = []
    for step in range(12):
        if rank == step % n:
            time.sleep(0.01)
        spec = (codec, "none", "int8")[step % 3]
        works.append(collectives.all_reduce(x, "avg", codec=spec, async_op=True))
        if step % 4 == 3:
            collectives.all_reduce(y, "avg", codec=(codec, "int8")[step % 8 == 3])
    done: list[int] = []
    works[-1].get_future().add_done_callback(lambda future: done.append(len(future.value())))
    for work in works:
        work.wait()
        assert work.seconds > 0 and work.wire_bytes > 0
    expected = torch.full((50_000,), float(rank))
    for step in range(12):
        collectives.all_reduce(expected, "avg", codec=("int8", "none", "int8")[step % 3])
    assert torch.equal(x, expected)
    while not done:
        time.sleep(0.001)
    assert done == [1]


@pytest.mark.parametrize("environment", [{}, OVER_GLOO], ids=["memory", "gloo"])
def test_calls_run_in_issue_order(environment: dict[str, str]) -> None:
    run_ranks(interleaved, 3, fresh=True, env=environment)


def inference(rank: int, n: int) -> None:
    codec = python_codecs.register()["int8"]
    with torch.inference_mode():
        x = torch.full((5000,), float(rank))
        collectives.all_reduce(x, codec=codec)
    assert (x - 1).abs().max() < 0.01


@pytest.mark.parametrize("environment", [{}, OVER_GLOO], ids=["memory", "gloo"])
def test_inference_tensors_are_reduced(environment: dict[str, str]) -> None:
    run_ranks(inference, 2, fresh=True, env=environment)


def differ(rank: int, n: int) -> None:
    factor = 1.0 + rank
    codecs.custom("mine", lambda x: encode_bf16(x * factor), decode_bf16, bf16_bytes)
    with pytest.raises(CollectiveMismatch, match=r"codec mine \(probe [0-9a-f]{8}\)"):
        collectives.all_reduce(torch.ones(100), codec="mine")


@pytest.mark.parametrize("environment", [{}, {**OVER_GLOO, "DTCOMM_CHECK": "1"}], ids=["memory", "gloo"])
def test_ranks_whose_functions_differ_raise_mismatch(environment: dict[str, str]) -> None:
    run_ranks(differ, 2, fresh=True, env=environment)


def fail(rank: int, n: int, cause: str) -> None:
    def encode(x: torch.Tensor) -> torch.Tensor:
        if x.numel() > 5000 and rank == 1:
            if cause == "RuntimeError":
                collectives.all_reduce(torch.ones(3))
            raise ArithmeticError("too long")
        return encode_bf16(x)

    codecs.custom("mine", encode, decode_bf16, bf16_bytes)
    collectives.all_reduce(torch.ones(100), codec="mine")
    x = torch.ones(30_000)
    kind, message = (
        (DtcommError, rf"all_reduce\(.* broke off: {cause}") if rank == 1 else (PeerLost, "rank 1")
    )
    if dtcomm.info()["runtime"] != "native" and rank == 1:
        message = f"a call broke off: {cause}"
    begin = time.monotonic()
    with pytest.raises(kind, match=message):
        collectives.all_reduce(x, codec="mine", async_op=True).wait()
    with pytest.raises(DtcommError):
        collectives.all_reduce(x, codec="mine")
    with pytest.raises(DtcommError):
        collectives.all_reduce(x)
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize("environment", [{}, OVER_GLOO], ids=["memory", "gloo"])
@pytest.mark.parametrize("cause", ["ArithmeticError", "RuntimeError"])
def test_an_error_in_a_function_ends_the_call_on_all_ranks(environment: dict[str, str], cause: str) -> None:
    """One that calls a collective of the group, which waits for it, fails as well."""
    run_ranks(fail, 2, cause, fresh=True, env=environment)


def die(rank: int, n: int) -> None:
    codec = python_codecs.register()["int8"]
    x = torch.ones(300_000)
    collectives.all_reduce(x, codec=codec)
    send_to_parent("connected")
    if rank == 0:
        time.sleep(60)
    with pytest.raises(PeerLost, match="rank 0"):
        while True:
            collectives.all_reduce(x, codec=codec)


def test_a_rank_that_dies_is_named() -> None:
    with spawn_ranks(die, 2, fresh=True) as running:
        running.receive(1)
        running.kill(0)
        outcomes = running.join(20.0)
    assert outcomes[1].ok, outcomes[1].traceback


@on_ranks(2, fresh=True)
def test_what_a_python_codec_cannot_do_is_said(rank: int, n: int) -> None:
    codec = python_codecs.register()["int8"]
    x = torch.ones(100)
    with pytest.raises(ValueError, match="op: max is valid with codecs none, fp16 and bf16, got python_int8"):
        collectives.all_reduce(x, "max", codec=codec)
    with pytest.raises(
        TypeError, match="tensor: codec python_int8 takes float32, float16, bfloat16, got int32"
    ):
        collectives.all_reduce(x.int(), codec=codec)
    with pytest.raises(ValueError, match="audit: needs a codec whose sums are exact, got python_int8"):
        collectives.all_reduce(x, codec=codec, audit=True)
    with pytest.raises(ValueError, match="algorithm: two_shot_symmetric needs fused CUDA kernels"):
        collectives.all_reduce(x, codec=codec, algorithm="two_shot_symmetric")


def call_in_a_codec(rank: int, n: int) -> None:
    def encode(x: torch.Tensor) -> torch.Tensor:
        collectives.all_reduce(torch.ones(3))
        return x.clone().view(torch.uint8)

    codec = dtcomm.codecs.custom(
        "calls",
        encode,
        lambda payload, numel: payload.view(torch.float32),
        wire_bytes=lambda numel: 4 * numel,
    )
    with pytest.raises(DtcommError, match="calls a collective of the group that it works for"):
        collectives.all_reduce(torch.ones(10_000), codec=codec)


@pytest.mark.parametrize("runtime", ["native", "process_group"])
def test_a_codec_that_calls_a_collective_is_refused(runtime: str) -> None:
    run_ranks(call_in_a_codec, 2, env={"DTCOMM_RUNTIME": runtime}, fresh=True)
