"""Random operations end with the same bits on every rank, and feedback loses no mass.

python -m tests.stress.bit_identity [--operations 100000] [--ranks 2 3 4 5 8] [--minutes M] [--seed 0] [--json FILE]

Collective, size, dtype, codec, algorithm, operator, subgroup, memory, feedback, checksums and overlap are drawn from
the seed. Inputs are small integers, so that without a codec the result must also be the sum itself, and Gloo's. The
operations of a rank count come in pieces of 1000, each in one of the ways of WAYS: mostly ranks of one host; also two
and three hosts (as DTCOMM_HOST_ID says: sockets or messages of Gloo, hierarchies, a codec for each level),
torch.distributed's own calls on the backend "dtcomm", emulated links. The run ends when each
rank count has had --operations, or after --minutes. build/stress/bit_identity.json is written after every piece. Exit
status 1 where anything differs.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import dtcomm
from bench.common import report
from dtcomm import algorithms
from dtcomm.launch.ranks import run_ranks
from tests.stress import DETAILS
from tests.stress.random_ops import CODECS, host_of, sequence
from tests.stress.random_run import Runner

STEPS = 5
LOSSY = tuple(dict.fromkeys(spec for spec in CODECS if spec != "none"))
PIECE = 1000
PIECE_SECONDS = 1200.0  # after which a piece counts as hanging
MOST_LOSS = 1e-5  # of mass, relative to the largest sum
RANKS = (2, 3, 4, 5, 8)


class Way(NamedTuple):
    """How the ranks of a piece are connected."""

    name: str
    hosts: int = 1
    backend: str = "gloo"
    env: tuple[tuple[str, str], ...] = ()


ONE_HOST = Way("one host")
TWO_HOSTS = Way("two hosts", hosts=2)
THREE_HOSTS = Way("three hosts", hosts=3)
WAYS = (
    ONE_HOST,
    TWO_HOSTS,
    THREE_HOSTS,
    ONE_HOST,
    Way("backend dtcomm", backend="dtcomm"),
    ONE_HOST,
    TWO_HOSTS,
    THREE_HOSTS._replace(name="messages of Gloo", env=(("DTCOMM_RUNTIME", "process_group"),)),
    Way("emulated link", env=(("DTCOMM_EMULATE_LINK", "100gbit,2us"),)),
    Way("sockets on one host", env=(("DTCOMM_TRANSPORT", "sockets"),)),
)
RankResult = tuple[dict[int, int], list[str]]


def identical(rank: int, ranks: int, seed: str, count: int, hosts: int = 1) -> RankResult:
    """Run a sequence on one rank; return each result's digest, and the operations whose results are wrong."""
    if hosts > 1:
        os.environ["DTCOMM_HOST_ID"] = f"host {host_of(rank, ranks, hosts)}"
    runner = Runner(rank, ranks)
    for operation in sequence(seed, ranks, count, hosts):
        runner.start(operation)
    runner.drain()
    return runner.digests, runner.differs


def conserve(rank: int, ranks: int) -> dict[str, float]:
    """Return by codec and algorithm the largest loss of mass, relative to the inputs.

    The loss is |result + new residuals - inputs - old residuals|.
    """
    losses = {}
    for codec in LOSSY:
        for algorithm in algorithms.available("all_reduce"):
            losses[f"{codec}, {algorithm}"] = _conserve(rank, codec, algorithm)
    return losses


def _conserve(rank: int, codec: str, algorithm: str) -> float:
    numel, worst = 10_007, 0.0
    residual = torch.zeros(numel)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        tensor = torch.randn(numel, generator=generator)
        before = tensor.double() + residual
        dtcomm.all_reduce(tensor, codec=codec, algorithm=algorithm, residual=residual)
        # One all_reduce sums both sides: the inputs, and the errors that stay on the ranks.
        sums = torch.stack([before, residual.double()])
        dist.all_reduce(sums)
        worst = max(worst, float((tensor.double() + sums[1] - sums[0]).abs().max() / sums[0].abs().max()))
    return worst


def compare(results: list[RankResult]) -> tuple[int, list[int]]:
    """Return how many results two or more ranks have, and the indices of those that are not the same on all."""
    digests_by_index: dict[int, list[int]] = defaultdict(list)
    for digests, _ in results:
        for index, digest in digests.items():
            digests_by_index[index].append(digest)
    several = {index: digests for index, digests in digests_by_index.items() if len(digests) > 1}
    return len(several), sorted(index for index, digests in several.items() if len(set(digests)) > 1)


def piece(ranks: int, seed: str, count: int, way: Way, seconds: float = PIECE_SECONDS) -> dict[str, Any]:
    """Run ``count`` operations in one way; return how many were compared, and descriptions of wrong ones.

    Ranks that run for longer than ``seconds`` are killed, and what each was doing is in the description.
    """
    operations = sequence(seed, ranks, count, way.hosts)
    try:
        results = run_ranks(
            identical,
            ranks,
            seed,
            count,
            way.hosts,
            timeout=seconds,
            backend=way.backend,
            env=dict(way.env),
        )
    except Exception as error:  # the campaign continues with the next piece
        wrong = [
            f"seed {seed}, {ranks} ranks, {way.name}: {type(error).__name__}: {error}; {error.__cause__}"
        ]
        return {"compared": 0, "exact": 0, "wrong": [text[:4000] for text in wrong]}
    compared, unequal = compare(results)
    unlike = sorted({text for _, differs in results for text in differs})
    wrong = [f"not the same on all ranks: {operations[index]}" for index in unequal]
    wrong += [f"not the sum: {text}" for text in unlike]
    exact = sum(operation.exact for operation in operations)
    return {"compared": compared, "exact": exact, "wrong": [f"seed {seed}: {text}" for text in wrong]}


def blank(ranks: int) -> dict[str, Any]:
    """Return the row of a number of ranks that has not begun."""
    sums = {"pieces": 0, "operations": 0, "compared": 0, "exact": 0, "seconds": 0.0}
    return {"ranks": ranks, **sums, "ways": {}, "wrong": [], "mass": {}}


def advance(row: dict[str, Any], seed: int, count: int) -> None:
    """Run the row's next piece, of ``count`` operations, and print a line."""
    ranks, number = row["ranks"], row["pieces"]
    way = WAYS[number % len(WAYS)]
    started = time.monotonic()
    if not row["mass"] and ranks <= 4:
        losses_by_rank = run_ranks(conserve, ranks, timeout=PIECE_SECONDS)
        row["mass"] = {name: max(losses[name] for losses in losses_by_rank) for name in losses_by_rank[0]}
        lost = {name: error for name, error in row["mass"].items() if not error < MOST_LOSS}
        row["wrong"] += [f"mass: {name}: {error:.1e} of the largest sum" for name, error in lost.items()]
        worst = max(row["mass"].values())
        print(f"{ranks} ranks: mass conserved to {worst:.1e} of the largest sum; lost: {lost or None}")
    result = piece(ranks, f"{seed}/{number}", count, way)
    row["pieces"] += 1
    row["operations"] += count
    row["compared"] += result["compared"]
    row["exact"] += result["exact"]
    row["wrong"] += result["wrong"]
    row["seconds"] = round(row["seconds"] + time.monotonic() - started, 1)
    row["ways"] = dict(Counter(row["ways"]) + Counter({way.name: count}))
    for text in result["wrong"][:5]:
        print(f"    {text}")
    print(
        f"{ranks} ranks, {way.name}: {row['operations']} operations; {row['compared']} compared among ranks, "
        f"{row['exact']} with the sum itself; {len(row['wrong'])} wrong; {row['seconds']:.0f} s",
        flush=True,
    )


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Run, print, write the file after each piece; return what was written."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--operations", type=int, default=10_000, help="of each rank count")
    parser.add_argument("--ranks", type=int, nargs="+", default=list(RANKS))
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no piece after so long")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", help="where to write instead of build/stress/bit_identity.json")
    options = parser.parse_args(arguments)
    path = Path(options.json or DETAILS / "bit_identity.json")
    rows = {ranks: blank(ranks) for ranks in options.ranks}
    deadline = time.monotonic() + options.minutes * 60
    while time.monotonic() < deadline:
        # In turn, so that every number of ranks has run some when the time is over.
        behind = [rows[ranks] for ranks in options.ranks if rows[ranks]["operations"] < options.operations]
        if not behind:
            break
        row = min(behind, key=lambda candidate: candidate["operations"])
        advance(row, options.seed, min(PIECE, options.operations - row["operations"]))
        result = summary(rows, options.seed)
        report.write(str(path), result)
    result = summary(rows, options.seed)
    print(report.write(str(path), result), result["verdict"])
    return result


def summary(rows: dict[int, dict[str, Any]], seed: int) -> dict[str, Any]:
    """Return the contents of the result file."""
    ordered = [rows[ranks] for ranks in sorted(rows)]
    return {
        "seed": seed,
        "operations": sum(row["operations"] for row in ordered),
        "rows": ordered,
        "verdict": "MISS" if any(row["wrong"] for row in ordered) else "PASS",
    }


if __name__ == "__main__":
    sys.exit(main()["verdict"] != "PASS")
