"""Compare an all_reduce of large tensors on 1, 2, 4, ... threads a rank, without a codec and with some.

python -m bench.threads [--ranks 2] [--threads 1 2 4] [--sizes 64M 256M] [--codecs none bf16 int8] [--seconds S]
                        [--repeat 9] [--quick] [--json FILE]

The operation is an fp32 average in place, in ordinary memory and in `dtcomm.empty` (codec none). Every rank is bound
to its share of the cores. With ``DTCOMM_TRIALS=never`` every number of threads works in the same way; set
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
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from bench.common import harness, report
from bench.common.budget import Budget
from bench.common.pool import Pool
from bench.common.ranks import Rank

EMPTY = "none, dtcomm.empty"
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


def compare(pool: Pool, results: harness.Results, options: argparse.Namespace, budget: Budget) -> None:
    """Compare the bits of every codec, and measure every codec and size, on every number of threads."""
    counts = options.threads
    names = [name for codec in options.codecs for name in ((codec, EMPTY) if codec == "none" else (codec,))]
    for name in names:
        digests = {count: pool.call("digest", codec=name, count=count) for count in counts}
        results.failed += [
            f"{name} on {count} threads has other bits than on {counts[0]}"
            for count in counts
            if digests[count] != digests[counts[0]]
        ]
    for nbytes in options.sizes:
        if not budget.allows(report.size_name(nbytes)):
            break
        measures: dict[str, harness.Measure] = {}
        extra: dict[str, dict[str, object]] = {}
        for name in names:
            for count in counts:
                label = f"{name}, {count} thread{'s' if count > 1 else ''}"
                measures[label] = partial(_slowest, pool, name, nbytes, count)
                extra[label] = {"codec": name, "threads": count}
        begin, times = time.monotonic(), dict[str, list[float]]()
        for number in range(options.repeat):
            round_seconds = (time.monotonic() - begin) / number if number else 0.0
            if number and not budget.allows(f"{report.size_name(nbytes)}, round {number + 1}", round_seconds):
                break
            for label in harness.in_turn(list(measures), number):
                times.setdefault(label, []).append(measures[label](1))
        ordered = {label: times[label] for label in measures}
        case = {"bytes": nbytes, "ranks": options.ranks}
        results.add(f"all_reduce of {report.size_name(nbytes)}, {options.ranks} ranks", case, ordered, extra)


def _slowest(pool: Pool, codec: str, nbytes: int, count: int, calls: int) -> float:
    return max(pool.call("measure_threads", codec=codec, nbytes=nbytes, count=count, calls=calls))


def default_counts(ranks: int) -> list[int]:
    """Return 1, 2, 4, ... up to the cores of each rank."""
    most = max(1, len(os.sched_getaffinity(0)) // ranks)
    counts = [1]
    while counts[-1] < most:
        counts.append(min(2 * counts[-1], most))
    return counts


def main(arguments: list[str] | None = None) -> int:
    """Measure and print."""
    parser = harness.parser(__doc__, rounds=9)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, nargs="+", help="numbers of threads; default: 1, 2, 4, ...")
    parser.add_argument("--sizes", type=report.parse_size, nargs="+", default=[64 << 20, 256 << 20])
    parser.add_argument("--codecs", nargs="+", default=["none", "bf16", "int8"])
    parser.add_argument("--seconds", type=float, default=120, help="rounds that no longer fit are skipped")
    options = harness.parse(parser, arguments)
    options.threads = options.threads or default_counts(options.ranks)
    if options.quick:
        options.sizes, options.threads = [CHECKED_BYTES], options.threads[:2]
    budget, results = Budget(options.seconds), harness.Results(options)
    results.facts = {"cut": budget.cuts}
    with (
        tempfile.TemporaryDirectory(prefix="dtcomm-bench-") as folder,
        Pool(ThreadsRank, options.ranks, store_file=f"{folder}/store", counts=options.threads) as pool,
    ):
        compare(pool, results, options, budget)
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
