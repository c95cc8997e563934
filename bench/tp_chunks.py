"""Measure a row-parallel layer that multiplies and sums in chunks of tokens, so that the two overlap.

python -m bench.tp_chunks [--gbit 0 1 10] [--tokens 512] [--features 512 1024] [--codec none int8]
    [--repetitions N] [--json FILE]

Two ranks of one thread each run in two network namespaces, connected by a link of the rate `--gbit` (needs root and
iproute2), or, with 0, over shared memory. The layer has four times as many inputs as outputs, in fp32, as the second
layer of an MLP. With c chunks the sum of one chunk travels while the next is multiplied (Wang et al. 2023, "Overlap
communication with dependent computation via decomposition"). "product" and "sum" are the two parts alone; with perfect
overlap a layer would take the longer one. The numbers of chunks take turns.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.common import machine, output
from bench.common.pool import Pool
from bench.common.stats import Timing, iterations
from bench.common.turns import in_turn
from dtcomm.measure import netns

CHUNKS = ("1", "2", "4", "8", "auto")
PRODUCT, SUM = "product", "sum"
PAYS = 1.05  # times faster than one chunk


class Rank:
    """One rank; with namespaces, in a namespace of its own."""

    def __init__(self, rank: int, ranks: int, rendezvous: str, namespaces: list[str]) -> None:
        netns.init_process_group(rank, ranks, rendezvous, namespaces)

    def measure(self, name: str, tokens: int, features: int, codec: str, iters: int) -> float:
        """Return this rank's mean seconds of ``iters`` calls that follow each other without a pause."""
        call = self._call(name, codec, tokens, features)
        with torch.no_grad():
            dist.barrier()
            call()
            start = time.perf_counter()
            for _ in range(iters):
                call()
            return (time.perf_counter() - start) / iters

    def error(self, name: str, tokens: int, features: int, codec: str) -> float:
        """Return the relative error of a result beside one chunk, uncompressed."""
        with torch.no_grad():
            actual, expected = (
                self._call(*which, tokens=tokens, features=features)()
                for which in ((name, codec), ("1", "none"))
            )
        return float((actual - expected).norm() / expected.norm())

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()

    def _call(self, name: str, codec: str, tokens: int, features: int) -> Callable[[], torch.Tensor]:
        from dtcomm import tp
        from dtcomm.tp import functional

        torch.manual_seed(0)
        chunks: int | str = int(name) if name.isdigit() else "auto"
        layer = tp.RowParallelLinear(4 * features, features, codec=codec, chunks=chunks, latency=False)
        x = torch.randn(tokens, 4 * features // dist.get_world_size())
        y = torch.randn(tokens, features)
        if name == PRODUCT:
            return lambda: torch.nn.functional.linear(x, layer.weight)
        if name == SUM:
            return lambda: functional.all_reduce(y, layer.comm)
        return lambda: layer(x)


def measure(
    gbits: list[float], tokens: int, features: list[int], codecs: list[str], repetitions: int
) -> list[dict[str, Any]]:
    """Measure and print a row for each medium, size and codec."""
    rows = []
    for gbit in gbits:
        hosts: Any = netns.two_hosts(gbit) if gbit else nullcontext([])
        with hosts as namespaces, tempfile.TemporaryDirectory() as folder:
            rendezvous = str(Path(folder) / "rendezvous")
            with Pool(Rank, 2, timeout=120, rendezvous=rendezvous, namespaces=namespaces) as pool:
                rows += [
                    _row(pool, gbit, {"tokens": tokens, "features": width, "codec": codec}, repetitions)
                    for width in features
                    for codec in codecs
                ]
    lines = []
    for row in rows:
        medium = f"{row['gbit']:g} Gbit/s" if row["gbit"] else "shared memory"
        cells = [f"{medium}, {row['features']} features, {row['codec']}"]
        cells += [f"{row['contestants'][name]['median_us'] / 1e3:.3g}" for name in (PRODUCT, SUM)]
        for name in CHUNKS:
            milliseconds = f"{row['contestants'][name]['median_us'] / 1e3:.3g}"
            cells.append(milliseconds if name == "1" else f"{milliseconds}: {row['ratios'][name]:.2f}x")
        lines.append([*cells, row["verdict"]])
    columns = ["", PRODUCT, SUM, *(f"{name} chunks" for name in CHUNKS), ""]
    output.table("ms of a layer, and times faster than one chunk", columns, lines)
    return rows


def _row(pool: Any, gbit: float, case: dict[str, Any], repetitions: int) -> dict[str, Any]:
    names = [PRODUCT, SUM, *CHUNKS]
    errors = {name: max(pool.call("error", name=name, **case)) for name in CHUNKS}
    iters = {name: iterations(max(pool.call("measure", name=name, iters=1, **case)), 0.2) for name in names}
    times: dict[str, list[float]] = {name: [] for name in names}
    for repetition in range(repetitions):
        for name in in_turn(names, repetition):
            times[name].append(max(pool.call("measure", name=name, iters=iters[name], **case)))
    timings = {name: Timing.of(series) for name, series in times.items()}
    ratios = {name: round(timings["1"].median / timings[name].median, 3) for name in CHUNKS}
    best = max(CHUNKS, key=lambda name: ratios[name])
    pays = ratios[best] >= PAYS
    return {
        "gbit": gbit,
        **case,
        "load": machine.load(),
        "contestants": {name: timing.as_dict() for name, timing in timings.items()},
        "ratios": ratios,
        "errors": {name: float(f"{error:.3g}") for name, error in errors.items()},
        "verdict": f"{best} chunks pay: {ratios[best]:.2f}x" if pays else "overlap does not pay",
    }


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure, print the table and write the file; return the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gbit", type=float, nargs="+", default=[0, 1, 10])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--features", type=int, nargs="+", default=[512, 1024])
    parser.add_argument("--codec", nargs="+", default=["none", "int8"])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--json", help="where to write instead of bench/results/tp_chunks.json")
    options = parser.parse_args(arguments)
    if any(options.gbit) and (reason := netns.why_unavailable()):
        sys.exit(f"bench.tp_chunks: {reason}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rows = measure(options.gbit, options.tokens, options.features, options.codec, options.repetitions)
    result: dict[str, Any] = {"machine": machine.describe(), "rows": rows}
    print(output.write("tp_chunks", result, options.json))
    return result


if __name__ == "__main__":
    wrong = [
        (row["gbit"], row["features"], row["codec"], name, error)
        for row in main()["rows"]
        for name, error in row["errors"].items()
        if not error <= (1e-5 if row["codec"] == "none" else 0.05)
    ]
    sys.exit(f"wrong results: {wrong}" if wrong else 0)
