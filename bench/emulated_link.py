"""Compare an emulated link with a real one of the same rate: the same steps over both, alternately, in one run.

python -m bench.emulated_link [--gbit 1 10] [--only CODECS] [--repetitions N] [--json FILE]

The real link connects two network namespaces (veth, `tc tbf`; needs root and iproute2) and is used by the engine's
sockets. A step is an all_reduce_coalesced of 101 MB of gradients in buckets of 25 MiB after a matrix product, like a
training step. The emulated link is measured twice: over sockets of this host ("sockets"), which cost most of the
CPU time that a network costs, and over shared memory ("memory"), with the real link's CPU cost per byte added.

That cost is measured first, on the same pair of namespaces without a relevant rate limit: the additional time of an
uncompressed step over shared memory, divided by the bytes that both ends handle.
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

from bench.common import machine, output
from bench.common.pool import Pool
from bench.common.stats import Timing
from dtcomm.measure import netns
from dtcomm.runtime.emulated_link import tcp_ns_per_byte

CODECS = ("none", "fp16", "int8", "int4")
NUMELS = [2896 * 2896, 2896] * 3
TARGET = 0.1
LATENCY_US = 20  # of the emulated link, as measured between the namespaces
UNLIMITED_GBIT = 400


class Stepper:
    """A rank: over the real link if it has namespaces, otherwise over the emulated ``link``."""

    def __init__(
        self, rank: int, ranks: int, store_file: str, namespaces: list[str], link: str, way: str
    ) -> None:
        os.environ["DTCOMM_LINK"] = link
        os.environ["DTCOMM_TRANSPORT"] = "memory" if way == "memory" else "sockets"
        if namespaces:
            netns.init_process_group(rank, ranks, store_file, namespaces)
        else:
            torch.set_num_threads(1)
            dist.init_process_group("gloo", init_method=f"file://{store_file}", rank=rank, world_size=ranks)
        self.tensors = [torch.randn(numel) for numel in NUMELS]
        self.weight = torch.randn(1024, 1024)

    def step(self, codec: str) -> float:
        """Return the seconds of a step."""
        import dtcomm

        dist.barrier()
        started = time.perf_counter()
        torch.mm(self.weight, self.weight)
        dtcomm.all_reduce_coalesced(self.tensors, "avg", codec=codec, algorithm="two_shot")
        return time.perf_counter() - started

    def close(self) -> None:
        """Destroy the process group."""
        dist.destroy_process_group()


def cost_of(repetitions: int) -> float:
    """Return the nanoseconds of CPU time per byte that the real network costs at either end."""
    bare = f"{UNLIMITED_GBIT}gbit,{LATENCY_US}us,rdma"
    rows = measure(UNLIMITED_GBIT, ["none"], repetitions, {"memory": bare})
    seconds: float = (rows[0]["real_ms"] - rows[0]["emulated_ms"]) / 1e3
    return max(0.0, seconds * 1e9 / (2 * sum(NUMELS) * 4))


def measure(gbit: float, codecs: list[str], repetitions: int, links: dict[str, str]) -> list[dict[str, Any]]:
    """Return a row for each codec and way of emulation (``links``: links by way), with the slower rank's times."""
    times: dict[tuple[str, str], list[float]] = {}
    with netns.two_hosts(gbit) as namespaces, TemporaryDirectory() as folder:

        def pool(name: str, link: str = "", namespaces: list[str] | None = None) -> Pool:
            store_file = str(Path(folder) / name)
            return Pool(
                Stepper,
                2,
                timeout=120,
                store_file=store_file,
                namespaces=namespaces or [],
                link=link,
                way=name,
            )

        with ExitStack() as stack:
            pools = {"real": stack.enter_context(pool("real", namespaces=namespaces))}
            pools |= {way: stack.enter_context(pool(way, link)) for way, link in links.items()}
            for repetition in range(repetitions + 1):
                for codec in codecs:
                    for name, ranks in pools.items():
                        seconds = max(ranks.call("step", codec=codec))
                        if repetition:  # the first one connects and plans
                            times.setdefault((codec, name), []).append(seconds)
    rows = []
    for codec in codecs:
        real_time = Timing.of(times[codec, "real"])
        for way, link in links.items():
            timing = Timing.of(times[codec, way])
            ratio = timing.median / real_time.median
            rows.append(
                {
                    "gbit": gbit,
                    "setting": link,
                    "codec": codec,
                    "way": way,
                    "real_ms": round(real_time.median * 1e3, 1),
                    "emulated_ms": round(timing.median * 1e3, 1),
                    "ratio": round(ratio, 3),
                    "verdict": "PASS" if abs(ratio - 1) <= TARGET else "MISS",
                    "real": real_time.as_dict(),
                    "emulated": timing.as_dict(),
                }
            )
    return rows


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure, print, write the result file; return what was written."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gbit", type=float, nargs="+", default=[1, 10])
    parser.add_argument("--only", nargs="+", choices=CODECS, default=list(CODECS))
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--json", help="where to write instead of bench/results/emulated_link.json")
    options = parser.parse_args(arguments)
    if reason := netns.why_unavailable():
        sys.exit(f"bench.emulated_link: {reason}")
    cost = cost_of(options.repetitions)
    print(
        f"TCP through the real link takes {cost:.2f} ns a byte of either end, {tcp_ns_per_byte():.2f} on loopback"
    )
    rows: list[dict[str, Any]] = []
    for gbit in options.gbit:
        link = f"{gbit:g}gbit,{LATENCY_US}us"
        links = {"sockets": link, "memory": f"{link},{cost:.2f}ns/byte"}
        # Fast steps vary most and take little time.
        rows += measure(gbit, options.only, options.repetitions * (3 if gbit >= 5 else 1), links)
        rows_of_rate = [row for row in rows if row["gbit"] == gbit]
        output.table(
            f"a step of {sum(NUMELS) * 4 / 1e6:.0f} MB of gradients, 2 ranks, {link}, real and emulated",
            ["codec", "over", "real ms", "emulated ms", "ratio", "target", "verdict"],
            [
                [
                    row["codec"],
                    row["way"],
                    f"{row['real_ms']:,.0f}",
                    f"{row['emulated_ms']:,.0f}",
                    f"{row['ratio']:.3f}",
                    f"1 ± {TARGET:g}",
                    row["verdict"],
                ]
                for row in rows_of_rate
            ],
        )
    result = {
        "machine": machine.describe(),
        "load": os.getloadavg(),
        "cpu_ns_per_byte": {"real": round(cost, 3), "loopback": round(tcp_ns_per_byte(), 3)},
        "rows": rows,
    }
    print(output.write("emulated_link", result, options.json))
    return result


if __name__ == "__main__":
    main()
