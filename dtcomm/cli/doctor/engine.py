"""Self-test of the engine: a few ranks reduce tensors with known sums, with and without compression."""

from __future__ import annotations

import hashlib
import statistics
import time
from typing import Any

import torch

from dtcomm.cli.doctor.report import FAIL, NOTE, OK, Check

NUMEL = (1 << 18) + 77  # 1 MiB of fp32 and an odd tail
REPEATS = 20
TIMEOUT_SECONDS = 30.0


def engine(ranks: int) -> Check:
    """Check all_reduce with ``none`` (exact) and ``int8`` (bounded error, equal bits on all ranks) on local ranks."""
    from dtcomm.launch.ranks import run_ranks

    started = time.perf_counter()
    reports: list[dict[str, Any]] = run_ranks(self_test, ranks, timeout=TIMEOUT_SECONDS)
    seconds = time.perf_counter() - started
    first = reports[0]
    problems = [f"rank {rank}: {text}" for rank, report in enumerate(reports) for text in report["problems"]]
    if len({report["digest"] for report in reports}) != 1:
        problems.append("ranks ended with different bits")
    details = {**first, "problems": problems, "seconds": seconds}
    if problems:
        return Check(name="engine", status=FAIL, summary="; ".join(problems), details=details)
    native = first["runtime"] in ("native", "none")
    times = ", ".join(f"{codec} {us:.0f} µs" for codec, us in first["median_us"].items())
    served = first["runtime"] if native else f"{first['runtime']}, because {first['why']}"
    summary = (
        f"{ranks} ranks, {served}: sums exact with none, within int8's bound, the same bits on all ranks; "
        f"1 MiB all_reduce: {times}; {placement(first['round_trip_ns'])}"
        f"; {single_copy(first['single_copy'])}"
    )
    return Check(name="engine", status=OK if native else NOTE, summary=summary, details=details)


def placement(nanoseconds: float) -> str:
    """Describe where two ranks run, given the round trip of a cache line between them."""
    if nanoseconds <= 0:
        return "cache-line round trip not measured (ranks share cores)"
    if nanoseconds < 60:
        where = "one core, or one L3"
    else:
        where = "one L3" if nanoseconds < 250 else "different L3 caches or sockets"
    return f"cache-line round trip {nanoseconds:.0f} ns ({where})"


def single_copy(method: str) -> str:
    """Describe whether receivers read the senders' memory."""
    if method == "process_vm_readv":
        return "large tensors are copied once, directly from the sender's memory"
    return f"every tensor is staged ({method})"


def self_test(rank: int, world_size: int) -> dict[str, Any]:
    """Run the self-test on one rank and return its results."""
    from dtcomm import collectives

    inputs = [_integers(other) for other in range(world_size)]
    exact = inputs[rank].clone()
    collectives.all_reduce(exact)
    problems = [] if torch.equal(exact, sum(inputs, torch.zeros(NUMEL))) else ["none: the sum is wrong"]

    noise = [_noise(other) for other in range(world_size)]
    total = sum(noise, torch.zeros(NUMEL))
    lossy = noise[rank].clone()
    collectives.all_reduce(lossy, codec="int8")
    # The encodings of the inputs and of the sum are each off by at most half a step of 1/127 of their largest element.
    # 2 % are added because scales are rounded to bf16 and the decoded sum may exceed the true one.
    largest = sum(float(x.abs().max()) for x in noise) + float(total.abs().max())
    bound = largest / 254 * 1.02
    error = float((lossy - total).abs().max())
    if error > bound:
        problems.append(f"int8: an element is off by {error:.3g}, the bound is {bound:.3g}")
    if world_size > 1 and error == 0:
        problems.append("int8: nothing was lost, so nothing was compressed")

    info = collectives.info()
    return {
        "problems": problems,
        "digest": hashlib.sha256(lossy.numpy().tobytes()).hexdigest(),
        "median_us": {codec: _median_us(noise[rank], codec) for codec in ("none", "int8")},
        "runtime": info["runtime"],
        "why": info["why"],
        "single_copy": str(info.get("single_copy", "ranks share no memory")),
        "round_trip_ns": float(info.get("round_trip_ns", 0.0)),
    }


def _integers(rank: int) -> torch.Tensor:
    """Return small integers, whose sum is exact in any order."""
    return ((torch.arange(NUMEL) * 31 + rank * 17) % 251).float()


def _noise(rank: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank))


def _median_us(x: torch.Tensor, codec: str) -> float:
    from dtcomm import collectives

    work, times = x.clone(), []
    for _ in range(REPEATS):
        work.copy_(x)
        started = time.perf_counter()
        collectives.all_reduce(work, codec=codec)
        times.append((time.perf_counter() - started) * 1e6)
    return statistics.median(times)
