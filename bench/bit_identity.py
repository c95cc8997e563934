"""Random operations end with the same bits on every rank, and feedback loses no mass.

python -m bench.bit_identity [--operations 10000] [--ranks 2 3 4 5 8] [--seed 0] [--quick] [--add] [--json FILE]

Collective, size, dtype, codec, algorithm, operator, subgroup, memory, feedback and overlap are drawn from the seed.
Inputs are small integers, so that without a codec the result must also equal Gloo's. Of each rank count one
operation in ten runs with the ranks on two hosts (as DTCOMM_HOST_ID says): messages over Gloo, hierarchies, a codec
for each level. Writes bench/results/bit_identity.json; exit status 1 where anything differs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import dtcomm
from bench.common import machine, output
from bench.random_ops import CODECS, Operation, Runner, draw, memberships
from dtcomm.algorithms import available, collectives
from dtcomm.testing.ranks import run_ranks

STEPS = 5
LOSSY = tuple(dict.fromkeys(spec for spec in CODECS if spec != "none"))
BETWEEN_HOSTS = 0.1


def algorithms() -> dict[str, list[str]]:
    """The algorithms there are for each collective."""
    return {name: list(available(name)) for name in collectives()}


def sequence(seed: int, ranks: int, count: int, hosts: int = 1) -> list[Operation]:
    """The operations of one run; the same on every rank."""
    chance, names, groups = random.Random(seed * 100 + ranks + hosts - 1), algorithms(), memberships(ranks)
    where = [rank * hosts // ranks for rank in range(ranks)]
    return [draw(chance, index, groups, names, where) for index in range(count)]


def identical(
    rank: int, ranks: int, seed: int, count: int, hosts: int = 1
) -> tuple[dict[int, int], list[str]]:
    """Runs the sequence on one rank: each result's digest, and the operations that differ from Gloo's."""
    if hosts > 1:
        os.environ["DTCOMM_HOST_ID"] = f"host {rank * hosts // ranks}"
    runner = Runner(rank, ranks)
    for operation in sequence(seed, ranks, count, hosts):
        runner.start(operation)
    runner.drain()
    return runner.digests, runner.differs


def conserve(rank: int, ranks: int, codec: str, algorithm: str) -> float:
    """Largest |result + new residuals - inputs - old residuals| over a few calls, relative to the inputs."""
    numel, worst = 10_007, 0.0
    residual = torch.zeros(numel)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        tensor = torch.randn(numel, generator=generator)
        before = tensor.double() + residual
        dtcomm.all_reduce(tensor, codec=codec, algorithm=algorithm, residual=residual)
        # One sum carries both sides: what went in, and what errors stayed with the ranks.
        sums = torch.stack([before, residual.double()])
        dist.all_reduce(sums)
        worst = max(worst, float((tensor.double() + sums[1] - sums[0]).abs().max() / sums[0].abs().max()))
    return worst


def compare(found: list[tuple[dict[int, int], list[str]]]) -> tuple[int, list[int]]:
    """How many results two or more ranks hold, and the indices of those that are not the same on all."""
    seen: dict[int, set[int]] = defaultdict(set)
    for digests, _ in found:
        for index, digest in digests.items():
            seen[index].add(digest)
    return len(seen), sorted(index for index, digests in seen.items() if len(digests) > 1)


def campaign(ranks: int, seed: int, count: int, hosts: int) -> dict[str, Any]:
    """The random operations of one rank count, compared; prints what it found."""
    operations = sequence(seed, ranks, count, hosts)
    started = time.monotonic()
    found = run_ranks(identical, ranks, seed, count, hosts, timeout=7200, fresh=True)
    compared, unequal = compare(found)
    unlike = sorted({text for _, differs in found for text in differs})
    for text in [*(str(operations[index]) for index in unequal[:5]), *unlike[:5]]:
        print(f"    {text}")
    exact = sum(operation.exact for operation in operations)
    print(
        f"{ranks} ranks on {hosts} host{'s' if hosts > 1 else ''}: {count} operations; {compared} compared among "
        f"ranks, {len(unequal)} unequal; {exact} with Gloo or the exact result, {len(unlike)} unlike",
        flush=True,
    )
    return {
        "ranks": ranks,
        "hosts": hosts,
        "operations": count,
        "compared": compared,
        "exact": exact,
        "seconds": round(time.monotonic() - started, 1),
        "not_identical": [str(operations[index]) for index in unequal],
        "unlike_exact": unlike,
    }


def feedback(ranks: int) -> dict[str, float]:
    """By codec and algorithm, the largest part of the mass that was lost; prints the worst."""
    mass = {
        f"{codec}, {algorithm}": max(run_ranks(conserve, ranks, codec, algorithm))
        for codec in LOSSY
        for algorithm in algorithms()["all_reduce"]
    }
    lost = {name: error for name, error in mass.items() if not error < 1e-5}
    print(
        f"{ranks} ranks: mass conserved to {max(mass.values()):.1e} of the largest sum; lost: {lost or None}"
    )
    return mass


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Runs both parts, prints, writes the file; returns what it wrote."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operations", type=int, default=10_000, help="in all, shared among rank counts")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4, 5, 8])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="600 operations")
    parser.add_argument("--add", action="store_true", help="keep the file's rows of other rank counts")
    parser.add_argument("--json", help="where to write instead of bench/results/bit_identity.json")
    options = parser.parse_args(arguments)
    total = 600 if options.quick else options.operations
    path = Path(options.json or output.RESULTS / "bit_identity.json")
    rows: list[dict[str, Any]] = []
    if options.add and path.exists():
        rows = [row for row in json.loads(path.read_text())["rows"] if row["ranks"] not in options.ranks]
    for ranks in options.ranks:
        count = -(-total // len(options.ranks))
        between = int(count * BETWEEN_HOSTS)
        rows.append(campaign(ranks, options.seed, count - between, 1))
        rows.append(campaign(ranks, options.seed, between, 2))
        if ranks <= 4:
            rows[-2]["mass"] = feedback(ranks)
    bad = sum(
        len(row["not_identical"])
        + len(row["unlike_exact"])
        + sum(not error < 1e-5 for error in row.get("mass", {}).values())
        for row in rows
    )
    result = {
        "machine": machine.describe(),
        "seed": options.seed,
        "rows": rows,
        "verdict": "PASS" if bad == 0 else "MISS",
    }
    print(output.write("bit_identity", result, options.json), result["verdict"])
    return result


if __name__ == "__main__":
    sys.exit(main()["verdict"] != "PASS")
