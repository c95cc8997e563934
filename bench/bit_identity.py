"""Random operations end with the same bits on every rank, and feedback loses no mass.

python -m bench.bit_identity [--operations 10000] [--ranks 2 3 4] [--seed 0] [--quick] [--json FILE]

Size, dtype, codec, algorithm, operator, subgroup and overlap are drawn from the seed. Inputs are small
integers, so that without a codec the result must also equal Gloo's. Writes bench/results/bit_identity.json;
exit status 1 where anything differs.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist

import dtcomm
from bench.common import machine, output
from bench.random_ops import Operation, Runner, draw, memberships
from dtcomm.algorithms import available, collectives
from dtcomm.testing.ranks import run_ranks

STEPS = 5
LOSSY = ("fp16", "bf16", "int8", "int8:block=32,round=stochastic")


def algorithms() -> dict[str, list[str]]:
    """The algorithms there are for each collective."""
    return {name: list(available(name)) for name in collectives()}


def sequence(seed: int, ranks: int, count: int) -> list[Operation]:
    """The operations of one run; the same on every rank."""
    chance, names = random.Random(seed * 100 + ranks), algorithms()
    return [draw(chance, index, len(memberships(ranks)), names) for index in range(count)]


def identical(rank: int, ranks: int, seed: int, count: int) -> tuple[dict[int, int], list[str]]:
    """Runs the sequence on one rank: each result's digest, and the operations that differ from Gloo's."""
    runner = Runner(rank, ranks)
    for operation in sequence(seed, ranks, count):
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


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Runs both parts, prints, writes the file; returns what it wrote."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operations", type=int, default=10_000, help="in all, shared among rank counts")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="600 operations")
    parser.add_argument("--json", help="where to write instead of bench/results/bit_identity.json")
    options = parser.parse_args(arguments)
    total = 600 if options.quick else options.operations
    rows, bad = [], 0
    for ranks in options.ranks:
        count = -(-total // len(options.ranks))
        found = run_ranks(identical, ranks, options.seed, count, timeout=1800)
        compared, unequal = compare(found)
        unlike = sorted({text for _, differs in found for text in differs})
        operations = sequence(options.seed, ranks, count)
        for text in [*(str(operations[index]) for index in unequal[:5]), *unlike[:5]]:
            print(f"    {text}")
        exact = sum(operation.exact for operation in operations)
        print(
            f"{ranks} ranks: {count} operations; {compared} compared among ranks, {len(unequal)} unequal;"
            f" {exact} with Gloo or the exact result, {len(unlike)} unlike"
        )
        mass = {
            f"{codec}, {algorithm}": max(run_ranks(conserve, ranks, codec, algorithm))
            for codec in LOSSY
            for algorithm in algorithms()["all_reduce"]
        }
        lost = {name: error for name, error in mass.items() if not error < 1e-5}
        worst = max(mass.values())
        print(f"{ranks} ranks: mass conserved to {worst:.1e} of the largest sum; lost: {lost or None}")
        bad += len(unequal) + len(unlike) + len(lost)
        rows.append(
            {
                "ranks": ranks,
                "operations": count,
                "compared": compared,
                "not_identical": [str(operations[index]) for index in unequal],
                "unlike_exact": unlike,
                "mass": mass,
            }
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
