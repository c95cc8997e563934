"""Compare an all_reduce of large tensors on 1, 2, 4, ... threads a rank, without a codec and with some.

python -m bench.threads [--ranks 2] [--threads 1 2 4] [--sizes 64M 256M] [--codecs none bf16 int8] [--seconds S]
[--json FILE]

The operation is an fp32 average in place, in ordinary memory and in `dtcomm.empty` (codec none). Every rank is bound
to its share of the cores. Contestants take turns within every repetition; figures are medians of the slowest rank, with
the quartiles and the best. With ``DTCOMM_TRIALS=never`` every number of threads works in the same way; set
``DTCOMM_STAGING`` to compare stores. The default numbers of threads go up to the cores of each rank; on more than that,
threads share cores. The exit status is 1 if a number of threads changes a bit of a result.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.common import report
from bench.common.budget import Budget
from bench.common.harness import Timing
from bench.common.pool import Pool
from bench.common.ranks import Rank

CODECS = ("none", "bf16", "int8")
EMPTY = "none, dtcomm.empty"
REPETITIONS = 9
CHECKED_BYTES = 16 << 20  # of the tensor whose result is compared between numbers of threads


class ThreadsRank(Rank):
    """A rank with a communicator for each number of threads.

    Args:
        rank: The rank.
        ranks: Number of ranks.
        store_file: A file through which the ranks connect.
        counts: The numbers of threads.
    """

    def __init__(self, rank: int, ranks: int, store_file: str, counts: list[int]) -> None:
        cores = sorted(os.sched_getaffinity(0))
        share = max(1, len(cores) // ranks)
        first = rank * share % len(cores)
        os.sched_setaffinity(0, cores[first : first + share])
        super().__init__(rank, ranks, store_file, pinned=False)
        from dtcomm import collectives

        os.environ["DTCOMM_TRIALS"] = "never"
        self._collectives = collectives
        self._groups: dict[int, Any] = {}
        for count in counts:
            os.environ["DTCOMM_THREADS"] = str(count)
            self._groups[count] = dist.new_group(list(range(ranks)))
            collectives.all_reduce(torch.ones(1), group=self._groups[count])
        self._tensors: dict[bool, torch.Tensor] = {}

    def measure_threads(self, codec: str, nbytes: int, count: int, calls: int) -> float:
        """Return the seconds of a call on this rank."""
        tensor = self._tensor(codec, nbytes)
        self._call(tensor, codec, count)
        begin = time.perf_counter()
        for _ in range(calls):
            self._call(tensor, codec, count)
        return (time.perf_counter() - begin) / calls

    def digest(self, codec: str, count: int) -> str:
        """Return the checksum of a result on ``count`` threads."""
        tensor = self._tensor(codec, CHECKED_BYTES)
        tensor.copy_(torch.randn(tensor.numel(), generator=torch.Generator().manual_seed(self.rank)))
        self._call(tensor, codec, count)
        return hashlib.sha256(tensor.numpy()).hexdigest()

    def _call(self, tensor: torch.Tensor, codec: str, count: int) -> None:
        codec = "none" if codec == EMPTY else codec
        self._collectives.all_reduce(tensor, "avg", codec=codec, group=self._groups[count])

    def _tensor(self, codec: str, nbytes: int) -> torch.Tensor:
        shared = codec == EMPTY
        if shared not in self._tensors or self._tensors[shared].nbytes != nbytes:
            self._tensors.pop(shared, None)
            make = self._collectives.empty if shared else torch.empty
            self._tensors[shared] = make(nbytes // 4, dtype=torch.float32)
        return self._tensors[shared]


def compare(
    ranks: int, counts: list[int], sizes: list[int], codecs: list[str], budget: Budget, repetitions: int
) -> dict[str, Any]:
    """Compare the bits of every codec, and measure every codec and size, on every number of threads."""
    rows: list[dict[str, Any]] = []
    wrong: list[str] = []
    names = [name for codec in codecs for name in ((codec, EMPTY) if codec == "none" else (codec,))]
    with (
        tempfile.TemporaryDirectory(prefix="dtcomm-bench-") as folder,
        Pool(ThreadsRank, ranks, store_file=f"{folder}/store", counts=counts) as pool,
    ):
        for name in names:
            digests = {count: pool.call("digest", codec=name, count=count) for count in counts}
            wrong += [
                f"{name} on {count} threads" for count in counts if digests[count] != digests[counts[0]]
            ]
        for nbytes in sizes:
            if not budget.allows(report.size_name(nbytes)):
                break
            contestants = [(name, count) for name in names for count in counts]
            row: dict[str, Any] = {"bytes": nbytes, "ranks": ranks}
            times: dict[tuple[str, int], list[float]] = {contestant: [] for contestant in contestants}
            longest = 0.0
            for repetition in range(repetitions):
                if repetition > 0 and not budget.allows(
                    f"{report.size_name(nbytes)}, repetition {repetition + 1}", longest
                ):
                    break
                begin = time.monotonic()
                for name, count in contestants:
                    seconds = pool.call("measure_threads", codec=name, nbytes=nbytes, count=count, calls=1)
                    times[name, count].append(max(seconds))
                longest = max(longest, time.monotonic() - begin)
            timings = {contestant: Timing.of(series) for contestant, series in times.items()}
            row["timings"] = [
                {"codec": name, "threads": count, **timing.as_dict()}
                for (name, count), timing in timings.items()
            ]
            rows.append(row)
            show(f"all_reduce of {report.size_name(nbytes)}", names, counts, timings)
    return {"wrong": wrong, "rows": rows}


def show(title: str, names: list[str], counts: list[int], timings: dict[tuple[str, int], Timing]) -> None:
    """Print the times of a size, beside one thread, and beside no codec on as many threads."""
    columns = ["codec", "threads", "ms", "quartiles", "best", f"vs {counts[0]} thread", "vs none"]
    lines = []
    for name in names:
        for count in counts:
            timing = timings[name, count]
            plain = timings.get(("none", count))
            lines.append(
                [
                    name,
                    str(count),
                    f"{timing.median * 1e3:.2f}",
                    f"{timing.low * 1e3:.2f} to {timing.high * 1e3:.2f}",
                    f"{timing.best * 1e3:.2f}",
                    f"{timings[name, counts[0]].median / timing.median:.2f}x",
                    "-" if plain is None else f"{plain.median / timing.median:.2f}x",
                ]
            )
    report.table(title, columns, lines)


def default_counts(ranks: int) -> list[int]:
    """Return 1, 2, 4, ... up to the cores of each rank."""
    most = max(1, len(os.sched_getaffinity(0)) // ranks)
    counts = [1]
    while counts[-1] < most:
        counts.append(min(2 * counts[-1], most))
    return counts


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.threads", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, nargs="+", help="numbers of threads; default: 1, 2, 4, ...")
    parser.add_argument("--sizes", type=report.parse_size, nargs="+", default=[64 << 20, 256 << 20])
    parser.add_argument("--codecs", nargs="+", default=list(CODECS))
    parser.add_argument("--repetitions", type=int, default=REPETITIONS)
    parser.add_argument(
        "--seconds", type=float, default=120, help="measurements that no longer fit are skipped"
    )
    parser.add_argument("--json", type=Path, help="write the result to this file")
    options = parser.parse_args(argv)
    counts = options.threads or default_counts(options.ranks)
    description = report.describe()
    print(f"{description['cpu']}, {description['cores']} cores, {options.ranks} ranks")
    budget = Budget(options.seconds)
    result = compare(options.ranks, counts, options.sizes, options.codecs, budget, options.repetitions)
    if result["wrong"]:
        print(f"WRONG: other bits than on one thread: {', '.join(result['wrong'])}")
    if options.json:
        report.write(options.json, {**result, "cuts": budget.cuts})
    return 1 if result["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
