"""Sizes and numbers at the limits: tensors of more than 2^31 elements, many ranks, many groups, unaligned tensors.

python -m tests.stress.limits [--cases elements ...] [--ranks 32] [--groups 1000] [--json FILE]

The elements need about 20 GB of memory. The exit status is 1 if a result was wrong.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import dtcomm
from bench.common import report
from dtcomm.launch.ranks import run_ranks

MANY_ELEMENTS = 2**31 + 1027
PRECISE = ("none", "fp16", "int8", "fp8_e4m3", "exact")  # their sums are near the exact ones
CODECS = ("none", "fp16", "int8", "int4", "fp8_e4m3", "mxfp4", "sign", "topk", "exact")


def reduce_elements(rank: int, ranks: int, elements: int, codec: str) -> list[str]:
    """Sum ones; the last elements differ by rank, and lie beyond those that 32 bits can number."""
    x = torch.ones(elements, dtype=torch.float16)
    x[-500:] = 3 + rank
    dtcomm.all_reduce(x, codec=codec)
    first, last = float(ranks), float(sum(3 + r for r in range(ranks)))
    expected = (
        (0, first),
        (elements // 2, first),
        (elements - 501, first),
        (elements - 500, last),
        (elements - 1, last),
    )
    return [
        f"all_reduce, {codec}: element {at} is {float(x[at])}, not {value}"
        for at, value in expected
        if abs(float(x[at]) - value) > 0.02 * value
    ]


def move_elements(rank: int, ranks: int, shard: int) -> list[str]:
    """Gather, exchange and broadcast tensors of ``ranks * shard`` bytes."""
    wrong = []
    gathered = torch.empty(ranks * shard, dtype=torch.uint8)
    dtcomm.all_gather(gathered, torch.full((shard,), rank + 1, dtype=torch.uint8))
    for source, part in enumerate(gathered.split(shard)):
        if not bool((part == source + 1).all()):
            wrong.append(f"all_gather: the shard of rank {source} is wrong")
    received = torch.empty_like(gathered)
    for destination, part in enumerate(gathered.split(shard)):
        part.fill_(10 * rank + destination)
    dtcomm.all_to_all(received, gathered)
    for source, part in enumerate(received.split(shard)):
        if not bool((part == 10 * source + rank).all()):
            wrong.append(f"all_to_all: what rank {source} sent is wrong")
    dtcomm.broadcast(received, ranks - 1)
    for source, part in enumerate(received.split(shard)):
        if not bool((part == 10 * source + ranks - 1).all()):
            wrong.append("broadcast: the tensor is not that of the source")
    return wrong


def use_many_ranks(rank: int, ranks: int) -> list[str]:
    """Every kind of data movement with a different value on every rank."""
    wrong = []
    total = ranks * (ranks - 1) / 2
    for codec in CODECS:
        x = torch.full((20_011,), float(rank))
        dtcomm.all_reduce(x, codec=codec)
        if codec in PRECISE and not bool(((x - total).abs() <= 0.07 * total).all()):
            wrong.append(f"all_reduce, {codec}: {float(x[0])} instead of {total}")
        gathered = torch.empty(ranks * len(x))
        dtcomm.all_gather(gathered, x)
        if not bool((gathered.view(ranks, -1) == x).all()):
            wrong.append(f"all_reduce, {codec}: ranks ended with different bits")
    sent = torch.arange(ranks * 5).float() + rank
    received = torch.empty_like(sent)
    dtcomm.all_to_all(received, sent)
    own = torch.arange(5).float() + 5 * rank
    if not torch.equal(received.view(ranks, 5), own + torch.arange(ranks).float()[:, None]):
        wrong.append("all_to_all: wrong rows")
    return wrong


def use_many_groups(rank: int, ranks: int, groups: int) -> list[str]:
    """Use groups that exist at the same time, destroy them, and count descriptors."""

    def descriptors() -> int:
        gc.collect()
        dtcomm.all_reduce(torch.ones(1))  # closes the communicators of destroyed groups
        return len(os.listdir("/proc/self/fd"))

    wrong, before = [], descriptors()
    made = []
    for number in range(groups):
        made.append(dist.new_group(list(range(ranks))))
        x = torch.full((10,), float(rank + number))
        dtcomm.all_reduce(x, group=made[-1])
        if x[0] != ranks * number + ranks * (ranks - 1) / 2:
            wrong.append(f"group {number}: wrong sum")
    during = descriptors()
    while made:
        dist.destroy_process_group(made.pop())
    after = descriptors()
    if after > before:
        wrong.append(f"{before} descriptors before, {during} with {groups} groups, {after} after them")
    return wrong


def use_unaligned_tensors(rank: int, ranks: int, elements: int) -> list[str]:
    """Sum tensors that begin at every offset within a cache line."""
    wrong = []
    for codec in CODECS:
        aligned = torch.randn(elements, generator=torch.Generator().manual_seed(rank))
        sums = aligned.clone()
        dtcomm.all_reduce(sums, codec=codec, seed=1)
        for offset in range(1, 64, 7):
            memory = torch.zeros(4 * elements + 64, dtype=torch.uint8).numpy()
            unaligned = torch.frombuffer(
                memoryview(memory)[offset : offset + 4 * elements], dtype=torch.float32
            )
            unaligned.copy_(aligned)
            dtcomm.all_reduce(unaligned, codec=codec, seed=1)
            if not torch.equal(unaligned, sums):
                wrong.append(f"{codec}: another sum at offset {offset}")
    return wrong


def cases(
    ranks: int, groups: int
) -> dict[str, list[tuple[str, Callable[..., list[str]], int, tuple[Any, ...]]]]:
    """Return for each case its runs: a title, the function of a rank, the number of ranks, and its arguments."""
    return {
        "elements": [
            *(
                (
                    f"all_reduce of {MANY_ELEMENTS:,} elements, {codec}",
                    reduce_elements,
                    2,
                    (MANY_ELEMENTS, codec),
                )
                for codec in ("none", "int8")
            ),
            (
                f"{MANY_ELEMENTS:,} bytes gathered, exchanged, sent",
                move_elements,
                2,
                (MANY_ELEMENTS // 2 + 1,),
            ),
        ],
        "ranks": [(f"{ranks} ranks", use_many_ranks, ranks, ())],
        "groups": [(f"{groups} groups at once", use_many_groups, 2, (groups,))],
        "alignment": [("tensors at odd addresses", use_unaligned_tensors, 2, (50_001,))],
    }


def main(arguments: list[str] | None = None) -> int:
    """Run the cases, print a table, and return how many results were wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = list(cases(2, 1))
    parser.add_argument("--cases", nargs="+", choices=names, default=names)
    parser.add_argument("--ranks", type=int, default=32, help="ranks on this machine")
    parser.add_argument("--groups", type=int, default=1000, help="groups at the same time")
    parser.add_argument("--json", help="a file for the results")
    options = parser.parse_args(arguments)
    rows = []
    for name in options.cases:
        for title, function, ranks, values in cases(options.ranks, options.groups)[name]:
            start = time.monotonic()
            wrong = sorted(
                {text for result in run_ranks(function, ranks, *values, timeout=1200) for text in result}
            )
            rows.append({"case": title, "wrong": wrong, "seconds": round(time.monotonic() - start, 1)})
            print(f"{title}: {'; '.join(wrong) or 'right'} ({rows[-1]['seconds']} s)", flush=True)
    if options.json:
        report.write(options.json, {"rows": rows})
    return sum(len(row["wrong"]) for row in rows)  # type: ignore[misc, arg-type]


if __name__ == "__main__":
    sys.exit(main() > 0)
