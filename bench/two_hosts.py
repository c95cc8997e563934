"""Compare all_reduce between two hosts with dtcomm's codecs and with Gloo, over a link of a given rate, in one run.

python -m bench.two_hosts [--gbit 1 10] [--sizes 1K 64M] [--codecs none int8 int4] [--quick] [--add] [--json FILE]

Two ranks run in two network namespaces connected by a rate-limited link (needs root and iproute2). The operation is an
fp32 sum in place. Figures are medians of the slower rank; ratios are those of the rounds, with quartiles. The exit
status is 1 if a result is wrong; a missed target is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from bench.common import machine, output, pages
from bench.common.pool import Pool
from bench.common.stats import Timing, iterations
from bench.common.targets import KB, MB
from dtcomm.measure import netns

SIZES = [KB, 16 * KB, 128 * KB, MB, 8 * MB, 64 * MB]
CODECS = ("none", "int8", "int4")
GLOO = "gloo"
# Times faster than Gloo on uncompressed bytes, by Gbit/s, at 64 MB.
FASTER: dict[float, dict[str, float]] = {1: {"int8": 3.5, "int4": 6.0}, 10: {"int8": 2.5, "int4": 3.5}}


class HostRank:
    """A rank in its own namespace."""

    def __init__(self, rank: int, ranks: int, store_file: str, namespaces: list[str]) -> None:
        netns.init_process_group(rank, ranks, store_file, namespaces)
        self.rank, self.ranks = rank, ranks
        self._tensor = torch.empty(0)

    def info(self) -> dict[str, Any]:
        """Return ``dtcomm.info()``, once the ranks are connected."""
        import dtcomm

        return dtcomm.info()

    def measure(self, codec: str, numel: int, warm: int, iters: int) -> float:
        """Return the seconds of a call on this rank, from ``iters`` calls; ``codec`` may be "gloo"."""
        tensor = self._held(numel)
        tensor.normal_(generator=torch.Generator().manual_seed(self.rank))
        for _ in range(max(1, warm)):
            self._call(codec, tensor)
        start = time.perf_counter()
        for _ in range(iters):
            self._call(codec, tensor)
        return (time.perf_counter() - start) / iters

    def wrong(self, codec: str, numel: int) -> float:
        """Return the largest error of a sum, relative to its largest element."""
        tensor = self._held(numel)
        parts = [torch.randn(numel, generator=torch.Generator().manual_seed(r)) for r in range(self.ranks)]
        tensor.copy_(parts[self.rank])
        self._call(codec, tensor)
        exact = torch.stack(parts).sum(0)
        return float((tensor - exact).abs().max() / exact.abs().max())

    def close(self) -> None:
        """Destroy the process group."""
        dist.destroy_process_group()

    def _call(self, codec: str, tensor: torch.Tensor) -> None:
        if codec == GLOO:
            dist.all_reduce(tensor)
        else:
            import dtcomm

            dtcomm.all_reduce(tensor, codec=codec)

    def _held(self, numel: int) -> torch.Tensor:
        if self._tensor.numel() != numel:
            self._tensor = torch.empty(numel)
        return self._tensor


def target(gbit: float, size: int, codec: str) -> float | None:
    """Return how many times faster than Gloo a codec must be; None: there is no target."""
    if codec == "none":
        return 1.0
    return FASTER.get(gbit, {}).get(codec) if size == 64 * MB else None


def measure(gbit: float, sizes: list[int], codecs: list[str], quick: bool) -> list[dict[str, Any]]:
    """Return one row for each size."""
    rows = []
    with netns.two_hosts(gbit) as namespaces, TemporaryDirectory() as folder:
        store_file = str(Path(folder) / "meet")
        with Pool(HostRank, 2, timeout=300, store_file=store_file, namespaces=namespaces) as pool:
            for size in sizes:
                numel = size // 4
                names = [GLOO, *codecs]
                iters = {
                    name: iterations(max(pool.call("measure", codec=name, numel=numel, warm=2, iters=1)), 0.1)
                    for name in names
                }
                times: dict[str, list[float]] = {name: [] for name in names}
                for _ in range(3 if quick else 7):
                    for name in names:
                        seconds = pool.call("measure", codec=name, numel=numel, warm=1, iters=iters[name])
                        times[name].append(max(seconds))
                timings = {name: Timing.of(series) for name, series in times.items()}
                errors = {name: max(pool.call("wrong", codec=name, numel=numel)) for name in codecs}
                figures = []
                for name in codecs:
                    rounds = Timing.of([g / own for g, own in zip(times[GLOO], times[name], strict=True)])
                    ratio, least = timings[GLOO].median / timings[name].median, target(gbit, size, name)
                    verdict = None if least is None else "PASS" if ratio >= least else "MISS"
                    figures.append(
                        {
                            "codec": name,
                            "ratio": round(ratio, 3),
                            "quartiles": [round(rounds.low, 3), round(rounds.high, 3)],
                            "target": least,
                            "verdict": verdict,
                        }
                    )
                rows.append(
                    {
                        "gbit": gbit,
                        "bytes": size,
                        "transport": pool.call("info")[0]["transport"],
                        "load": machine.load(),
                        "contestants": {name: timing.as_dict() for name, timing in timings.items()},
                        "errors": errors,
                        "figures": figures,
                    }
                )
    return rows


def show(gbit: float, rows: list[dict[str, Any]], codecs: list[str]) -> None:
    """Print the table of one rate."""
    lines = []
    for row in rows:
        cells = [output.size_name(row["bytes"])]
        cells += [
            output.microseconds(row["contestants"][name]["median_us"] / 1e6) for name in (GLOO, *codecs)
        ]
        for figure in row["figures"]:
            low, high = figure["quartiles"]
            missed = " !" if figure["verdict"] == "MISS" else ""
            cells.append(f"{figure['ratio']:.2f}x ({low:.2f}–{high:.2f}){missed}")
        lines.append(cells)
    columns = ["size", *(f"{name} µs" for name in (GLOO, *codecs)), *(f"{name} vs gloo" for name in codecs)]
    output.table(f"all_reduce, fp32, 2 hosts, {gbit:g} Gbit/s (! misses its target)", columns, lines)


def page(result: dict[str, Any]) -> str:
    """Return the table of docs/results/two-hosts.md: microseconds and the speed-up over Gloo."""
    lines = []
    for row in result["rows"]:
        times = row["contestants"]
        cells = [f"{row['gbit']:g} Gbit/s, {output.size_name(row['bytes'])}"]
        cells.append(output.microseconds(times[GLOO]["median_us"] / 1e6))
        for figure in row["figures"]:
            microseconds = output.microseconds(times[figure["codec"]]["median_us"] / 1e6)
            cells.append(f"{microseconds} ({figure['ratio']:.2f}×)")
        lines.append(cells)
    codecs = [figure["codec"] for figure in result["rows"][0]["figures"]]
    return pages.markdown(["µs", "Gloo", *(f"`{codec}`" for codec in codecs)], lines, aligned=True)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure, print, write the result file; return what was written."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gbit", type=float, nargs="+", default=[1, 10])
    parser.add_argument("--sizes", type=output.parse_size, nargs="+", default=SIZES)
    parser.add_argument("--codecs", nargs="+", default=list(CODECS))
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--add", action="store_true", help="keep the file's rows of other rates and sizes")
    parser.add_argument("--json", help="where to write instead of bench/results/two_hosts.json")
    options = parser.parse_args(arguments)
    if reason := netns.why_unavailable():
        sys.exit(f"bench.two_hosts: {reason}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rows: list[dict[str, Any]] = []
    for gbit in options.gbit:
        rows_of_rate = measure(gbit, options.sizes, options.codecs, options.quick)
        show(gbit, rows_of_rate, options.codecs)
        rows += rows_of_rate
    path = Path(options.json or output.RESULTS / "two_hosts.json")
    if options.add and path.exists():
        kept = {(row["gbit"], row["bytes"]): row for row in json.loads(path.read_text())["rows"]}
        kept |= {(row["gbit"], row["bytes"]): row for row in rows}
        rows = [kept[key] for key in sorted(kept)]
    result = {"machine": machine.describe(), "quick": options.quick, "rows": rows}
    print(output.write("two_hosts", result, options.json))
    return result


if __name__ == "__main__":
    bad = [
        row
        for row in main()["rows"]
        if any(not error < (1e-5 if name == "none" else 0.5) for name, error in row["errors"].items())
    ]
    sys.exit(f"wrong results: {[(row['bytes'], row['errors']) for row in bad]}" if bad else 0)
