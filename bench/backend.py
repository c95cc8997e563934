"""Compare ``dist.all_reduce`` on the "dtcomm" backend with ``dtcomm.all_reduce`` and Gloo: the cost of the backend.

    python -m bench.backend            # 2 ranks, one line per size and operation; --json keeps the result

The three take turns in short batches on the same ranks, so that a change of the machine's speed affects all. "more" is
the median difference of consecutive batches, and "at best" that of the fastest ones. The target is at most 8
microseconds more than ``dtcomm.all_reduce``; the exit status is 1 if it is missed. Other operations are compared with
Gloo only.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import dtcomm
from bench.common import output
from bench.common.machine import describe, steady
from bench.common.turns import in_turn
from dtcomm.launch.ranks import run_ranks

MOST_US = 8.0
SIZES = (1024, 65536, 1 << 20)
BATCHES = 60


def main(argv: list[str] | None = None) -> int:
    """Measure and print; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench.backend", description=__doc__)
    parser.add_argument("-n", "--nproc", type=int, default=2, help="ranks")
    parser.add_argument("--json", action="store_true", help="keep bench/results/backend.json")
    args = parser.parse_args(argv)
    rows, conditions = steady(lambda: run_ranks(measure, args.nproc, backend="dtcomm", timeout=200)[0])
    misses = 0
    print(
        f"{'operation':20}{'bytes':>9}{'backend us':>12}{'dtcomm us':>11}{'more us':>9}{'at best':>9}{'gloo us':>9}"
        f"{'gloo / backend':>16}"
    )
    for row in rows:
        own, more, best = "", "", ""
        if row["dtcomm_us"] is not None:
            own, more = f"{row['dtcomm_us']:.1f}", f"{row['more_us']:.1f}"
            best = f"{row['more_at_best_us']:.1f}"
            misses += row["more_us"] > MOST_US
        print(
            f"{row['operation']:20}{row['bytes']:>9}{row['backend_us']:>12.1f}{own:>11}{more:>9}{best:>9}"
            f"{row['gloo_us']:>9.1f}{row['gloo_us'] / row['backend_us']:>15.1f}x"
        )
    verdict = "MISS" if misses else "PASS"
    print(
        f"{verdict}: dist.all_reduce through the backend costs at most {MOST_US:g} us over dtcomm.all_reduce"
    )
    if args.json:
        record = {
            "machine": describe(),
            "measured": conditions,
            "ranks": args.nproc,
            "most_us": MOST_US,
            "rows": rows,
        }
        output.write("backend", record)
    return 1 if misses else 0


def measure(rank: int, world_size: int) -> list[dict[str, Any]]:
    """Return a row for every operation and size."""
    gloo = dist.new_group(backend="gloo")
    rows = []
    for size in SIZES:
        for name, calls in _operations(size, rank, world_size, gloo).items():
            times = _batches(calls, 10 if size > 100_000 else 25)
            medians = {called: statistics.median(values) for called, values in times.items()}
            fastest = {called: min(values) for called, values in times.items()}
            own = medians.get("dtcomm")
            rows.append(
                {
                    "operation": name,
                    "bytes": size,
                    "backend_us": medians["backend"],
                    "dtcomm_us": own,
                    "more_us": None if own is None else _more(times["backend"], times["dtcomm"]),
                    "more_at_best_us": None if own is None else fastest["backend"] - fastest["dtcomm"],
                    "gloo_us": medians["gloo"],
                }
            )
    return rows


def _operations(size: int, rank: int, world_size: int, gloo: Any) -> dict[str, dict[str, Callable[[], Any]]]:
    tensor = torch.ones(size // 4)
    full = torch.ones(size // 4 // world_size * world_size)
    part = full[: full.numel() // world_size].clone()
    gathered = [torch.empty_like(part) for _ in range(world_size)]
    peer = rank ^ 1

    def on_both_backends(call: Callable[[Any], Any]) -> dict[str, Callable[[], Any]]:
        return {"backend": lambda: call(None), "gloo": lambda: call(gloo)}

    def ping(group: Any) -> None:
        if rank == 0:
            dist.send(tensor, peer, group=group)
            dist.recv(tensor, peer, group=group)
        elif rank == 1:
            dist.recv(tensor, peer, group=group)
            dist.send(tensor, peer, group=group)

    through_torch = on_both_backends(lambda group: dist.all_reduce(tensor, group=group))
    operations: dict[str, dict[str, Callable[[], Any]]] = {
        "all_reduce": {
            "dtcomm": lambda: dtcomm.all_reduce(tensor),
            **through_torch,
        },
        "all_reduce async": on_both_backends(
            lambda group: dist.all_reduce(tensor, group=group, async_op=True).wait()
        ),
        "all_gather": on_both_backends(lambda group: dist.all_gather(gathered, part, group=group)),
        "broadcast": on_both_backends(lambda group: dist.broadcast(tensor, 0, group=group)),
        "send and back": on_both_backends(ping),
    }
    if size == SIZES[0]:
        operations["barrier"] = on_both_backends(lambda group: dist.barrier(group))
    return operations


def _more(backend: list[float], own: list[float]) -> float:
    return statistics.median(ours - least for ours, least in zip(backend, own, strict=True))


def _batches(calls: dict[str, Callable[[], Any]], calls_per_batch: int) -> dict[str, list[float]]:
    """Return the microseconds of a call in every batch, by contestant."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for batch in range(BATCHES + 1):
        for name, call in in_turn(list(calls.items()), batch):
            call()  # so that the ranks begin together
            start = time.perf_counter()
            for _ in range(calls_per_batch):
                call()
            if batch:  # the first one plans and connects
                times[name].append((time.perf_counter() - start) / calls_per_batch * 1e6)
    return times


if __name__ == "__main__":
    raise SystemExit(main())
