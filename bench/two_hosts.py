"""Compare all_reduce between two hosts: dtcomm's codecs over TCP and over UCX, Gloo and Open MPI, in one run.

python -m bench.two_hosts [--gbit 1 10] [--sizes 1K 64M] [--codecs none int8 int4] [--quick] [--json FILE]

Two ranks run in two network namespaces connected by a rate-limited link (needs root and iproute2). The operation is an
fp32 sum in place. Figures are medians of the slower rank; ratios are those of the rounds, with quartiles. UCX (where
dtcomm was built with it) and Open MPI (where it is installed; the faster of its own TCP and UCX) use the link through
the kernel, as there is no RDMA device. A second table compares each codec with the time that its bytes alone take on
the link. The exit status is 1 if a result is wrong; a missed target is printed.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

from bench.common import machine, output, pages
from bench.common.pool import Pool
from bench.common.stats import Timing, iterations
from bench.common.targets import KB, MB
from bench.common.turns import in_turn
from dtcomm.cli.perf.backends.mpi import MpiRanks
from dtcomm.cli.perf.backends.mpi import why_unavailable as why_no_mpi
from dtcomm.measure import netns
from dtcomm.runtime.bootstrap import ucx

SIZES = [KB, 16 * KB, 128 * KB, MB, 8 * MB, 64 * MB]
CODECS = ("none", "int8", "int4")
GLOO = "gloo"
UCX = " ucx"  # behind the name of a codec: over UCX, else over TCP
# The layers of Open MPI under which it is measured, by the names of the columns.
MPI = {
    "mpi tcp": ("--mca", "pml", "ob1", "--mca", "btl", "tcp,self"),
    "mpi ucx": ("--mca", "pml", "ucx", "--mca", "pml_ucx_tls", "any", "--mca", "pml_ucx_devices", "any"),
}
UCX_OVER_LINK = {
    "UCX_TLS": "tcp,self",
    "UCX_NET_DEVICES": "dt0",
}  # not through the memory that namespaces share
# Times faster than Gloo on uncompressed bytes, by Gbit/s, at 64 MB.
FASTER: dict[float, dict[str, float]] = {1: {"int8": 3.5, "int4": 6.0}, 10: {"int8": 2.5, "int4": 3.5}}


class HostRank:
    """A rank in its own namespace."""

    def __init__(self, rank: int, ranks: int, store_file: str, namespaces: list[str], transport: str) -> None:
        os.environ["DTCOMM_TRANSPORT"] = transport
        if transport == "ucx":
            os.environ.update(UCX_OVER_LINK)
            netns.enter_namespace(namespaces[rank])
            netns.mount_own_sysfs()
        netns.init_process_group(rank, ranks, store_file, namespaces)
        self.rank, self.ranks = rank, ranks
        self._tensor = torch.empty(0)

    def info(self) -> dict[str, Any]:
        """Return ``dtcomm.info()``, once the ranks are connected."""
        import dtcomm

        return dtcomm.info()

    def wire_bytes(self, codec: str, numel: int) -> int:
        """Return the bytes that this rank sends in a call."""
        before = self.info()["wire_bytes"]
        self._call(codec, self._held(numel))
        return int(self.info()["wire_bytes"] - before)

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


class Contestants:
    """Everything that is measured between two namespaces, by the names of the columns."""

    def __init__(self, namespaces: list[str], folder: str, codecs: list[str], stack: ExitStack) -> None:
        self.no_ucx, self.no_mpi = why_no_ucx(), why_no_mpi()
        transports = ["sockets"] if self.no_ucx else ["sockets", "ucx"]
        self._pools = {
            transport: stack.enter_context(
                Pool(
                    HostRank,
                    2,
                    timeout=300,
                    store_file=str(Path(folder) / f"meet-{transport}"),
                    namespaces=namespaces,
                    transport=transport,
                )
            )
            for transport in transports
        }
        self.codecs = [codec + ("" if t == "sockets" else UCX) for t in transports for codec in codecs]
        self._mpi: dict[str, MpiRanks] = {}
        if self.no_mpi is None:
            mpirun = stack.enter_context(netns.mpirun(namespaces))
            for name, arguments in MPI.items():
                environment = ["-x", *" -x ".join(f"{k}={v}" for k, v in UCX_OVER_LINK.items()).split()]
                ranks = MpiRanks("default", 2, timeout=120, mpirun=[*mpirun, *environment, *arguments])
                stack.callback(ranks.close)
                self._mpi[name] = ranks
        self.names = [GLOO, *self._mpi, *self.codecs]

    def measure(self, name: str, numel: int, warm: int, iters: int) -> float:
        """Return the seconds of a call on the slower rank."""
        if name in self._mpi:
            return max(self._mpi[name].call("measure", numel=numel, warm=warm, iters=iters))
        return max(self._of(name).call("measure", codec=_codec(name), numel=numel, warm=warm, iters=iters))

    def error(self, name: str, numel: int) -> float:
        """Return the largest error of a codec, as `HostRank.wrong` does."""
        return max(self._of(name).call("wrong", codec=_codec(name), numel=numel))

    def wire_bytes(self, name: str, numel: int) -> int:
        """Return the bytes that a rank sends in a call with a codec."""
        return max(self._of(name).call("wire_bytes", codec=_codec(name), numel=numel))

    def transports(self) -> list[str]:
        """Return what dtcomm says that it uses."""
        return [pool.call("info")[0]["transport"] for pool in self._pools.values()]

    def _of(self, name: str) -> Pool:
        return self._pools["ucx" if name.endswith(UCX) else "sockets"]


def _codec(name: str) -> str:
    return name.removesuffix(UCX)


def why_no_ucx() -> str:
    """Return why dtcomm cannot use UCX here, or an empty string."""
    try:
        ucx.open_library()
    except RuntimeError as error:
        return f"UCX is not measured: {error}"
    return ""


def measure(gbit: float, sizes: list[int], codecs: list[str], quick: bool) -> list[dict[str, Any]]:
    """Return one row for each size."""
    rows = []
    with ExitStack() as stack:
        namespaces = stack.enter_context(netns.two_hosts(gbit))
        folder = stack.enter_context(TemporaryDirectory())
        contestants = Contestants(namespaces, folder, codecs, stack)
        for reason in filter(None, (contestants.no_ucx, contestants.no_mpi)):
            print(reason)
        for size in sizes:
            rows.append(measure_size(contestants, gbit, size, quick))
    return rows


def measure_size(contestants: Contestants, gbit: float, size: int, quick: bool) -> dict[str, Any]:
    """Return the row of one size."""
    numel, names = size // 4, contestants.names
    iters = {name: iterations(contestants.measure(name, numel, 2, 1), 0.1) for name in names}
    times: dict[str, list[float]] = {name: [] for name in names}
    for repetition in range(3 if quick else 7):
        for name in in_turn(names, repetition):
            times[name].append(contestants.measure(name, numel, 1, iters[name]))
    timings = {name: Timing.of(series) for name, series in times.items()}
    figures = []
    for name in contestants.codecs:
        rounds = Timing.of([g / own for g, own in zip(times[GLOO], times[name], strict=True)])
        ratio = timings[GLOO].median / timings[name].median
        least = None if name.endswith(UCX) else target(gbit, size, name)
        wire_bytes = contestants.wire_bytes(name, numel)
        figures.append(
            {
                "codec": name,
                "ratio": round(ratio, 3),
                "quartiles": [round(rounds.low, 3), round(rounds.high, 3)],
                "target": least,
                "verdict": None if least is None else "PASS" if ratio >= least else "MISS",
                "wire_bytes": wire_bytes,
                "bytes_alone_us": round(wire_bytes * 8e-3 / gbit, 2) if gbit else None,
            }
        )
    return {
        "gbit": gbit,
        "bytes": size,
        "transport": " and ".join(contestants.transports()),
        "load": machine.load(),
        "contestants": {name: timing.as_dict() for name, timing in timings.items()},
        "errors": {name: contestants.error(name, numel) for name in contestants.codecs},
        "figures": figures,
    }


def show(gbit: float, rows: list[dict[str, Any]]) -> None:
    """Print the tables of one rate."""
    names = list(rows[0]["contestants"])
    lines, shares = [], []
    for row in rows:
        medians = {name: times["median_us"] for name, times in row["contestants"].items()}
        cells = [output.size_name(row["bytes"])]
        cells += [output.microseconds(medians[name] / 1e6) for name in names]
        uncompressed = [name for name in names if name in (GLOO, *MPI) or _codec(name) == "none"]
        cells.append(min(uncompressed, key=medians.__getitem__))
        cells.append(min(names, key=medians.__getitem__))
        lines.append(cells)
        against = [output.size_name(row["bytes"])]
        for figure in row["figures"]:
            low, high = figure["quartiles"]
            missed = " !" if figure["verdict"] == "MISS" else ""
            bytes_alone = figure["bytes_alone_us"]
            share = f", {medians[figure['codec']] / bytes_alone:.2f}" if bytes_alone else ""
            against.append(f"{figure['ratio']:.2f}x ({low:.2f}–{high:.2f}){missed}{share}")
        shares.append(against)
    link = f"{gbit:g} Gbit/s" if gbit else "no limit"
    columns = ["size", *(f"{name} µs" for name in names), "fastest uncompressed", "fastest"]
    output.table(f"all_reduce, fp32, 2 hosts, {link}", columns, lines)
    columns = ["size", *(figure["codec"] for figure in rows[0]["figures"])]
    title = "times as fast as Gloo (! misses its target)"
    output.table(f"{title}{', time over that of the bytes alone' if gbit else ''}", columns, shares)


def page(result: dict[str, Any]) -> str:
    """Return the table of docs/results/two-hosts.md: microseconds and the speed-up over Gloo."""
    lines = []
    layers = [name for name in MPI if name in result["rows"][0]["contestants"]]
    for row in result["rows"]:
        times = row["contestants"]
        rate = f"{row['gbit']:g} Gbit/s" if row["gbit"] else "no limit"
        cells = [f"{rate}, {output.size_name(row['bytes'])}"]
        cells.append(output.microseconds(times[GLOO]["median_us"] / 1e6))
        if layers:
            cells.append(output.microseconds(min(times[name]["median_us"] for name in layers) / 1e6))
        for figure in row["figures"]:
            microseconds = output.microseconds(times[figure["codec"]]["median_us"] / 1e6)
            cells.append(
                f"{microseconds} ({figure['ratio']:.2f}×{pages.spread(figure, 'ratio', '{:.2f}'.format)})"
            )
        lines.append(cells)
    codecs = [figure["codec"] for figure in result["rows"][0]["figures"]]
    peers = ["Gloo", *(["Open MPI"] if layers else [])]
    return pages.markdown(["µs", *peers, *(f"`{codec}`" for codec in codecs)], lines, aligned=True)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure, print, write the result file; return what was written."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gbit", type=float, nargs="+", default=[1, 10], help="0: without a limit")
    parser.add_argument("--sizes", type=output.parse_size, nargs="+", default=SIZES)
    parser.add_argument("--codecs", nargs="+", default=list(CODECS))
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--json", help="where to write instead of bench/results/two_hosts.json")
    options = parser.parse_args(arguments)
    if reason := netns.why_unavailable():
        sys.exit(f"bench.two_hosts: {reason}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rows: list[dict[str, Any]] = []
    for gbit in options.gbit:
        rows_of_rate = measure(gbit, options.sizes, options.codecs, options.quick)
        show(gbit, rows_of_rate)
        rows += rows_of_rate
    result = {"machine": machine.describe(), "quick": options.quick, "rows": rows}
    print(output.write("two_hosts", result, options.json))
    return result


if __name__ == "__main__":
    bad = [
        row
        for row in main()["rows"]
        if any(not error < (1e-5 if _codec(name) == "none" else 0.5) for name, error in row["errors"].items())
    ]
    sys.exit(f"wrong results: {[(row['bytes'], row['errors']) for row in bad]}" if bad else 0)
