"""Average the outer gradients of a large model between four sites, beside the figure that PRIME published.

python -m bench.outer_gradients [--parameters 1e9] [--fragment 25e6] [--mbit 500] [--codecs int8 int4] [--json FILE]

Four ranks run in four network namespaces behind one switch; each of their interfaces is limited to a rate in each
direction by tbf (needs root and iproute2). PRIME all-reduces 1 B parameters in int8 between 4 processes at 500 Mbit/s
in 102 s (https://github.com/PrimeIntellect-ai/prime-diloco/pull/23). Its author thinks that the processes shared the
limit: a ring then sends 48 Gbit through it, which take 96 s. So ours is compared with a quarter of that time.

A rank holds one fragment of the gradients in fp32 and averages it as often as the parameters have fragments, so that
every byte of the full size is encoded, sent and summed without the memory of four copies of the model. ``--parameters``
below 1e9 is scaled: the program then prints the seconds that it measured, and those for 1e9 in proportion.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from bench.common import machine, output
from bench.common.pool import Pool
from bench.two_hosts import HostRank
from dtcomm.measure import netns

RANKS = 4
PUBLISHED = {"parameters": 1e9, "mbit": 500.0, "ranks": 4, "codec": "int8", "seconds": 102.0}
LINKS_SHARED = 4  # by as many of PRIME's processes


class SiteRank(HostRank):
    """A rank in its own namespace."""

    def average(self, codec: str, numel: int, fragments: int) -> float:
        """Return the seconds in which this rank has averaged all fragments."""
        import dtcomm

        tensor = self._held(numel)
        tensor.normal_(generator=torch.Generator().manual_seed(self.rank))
        dtcomm.barrier()
        start = time.perf_counter()
        for _ in range(fragments):
            dtcomm.all_reduce(tensor, "avg", codec=codec)
        return time.perf_counter() - start


def comparable_seconds() -> float:
    """Return PRIME's seconds for a process whose link is its own, as ours are."""
    return float(PUBLISHED["seconds"]) / LINKS_SHARED  # type: ignore[arg-type]


def measure(options: argparse.Namespace, stack: ExitStack) -> list[dict[str, Any]]:
    """Return a row for each codec."""
    namespaces = stack.enter_context(netns.many_hosts(RANKS, options.mbit / 1e3))
    folder = stack.enter_context(TemporaryDirectory())
    fragment = int(min(options.fragment, options.parameters))
    fragments = max(1, round(options.parameters / fragment))
    pool = stack.enter_context(
        Pool(
            SiteRank,
            RANKS,
            timeout=1800,
            store_file=str(Path(folder) / "meet"),
            namespaces=namespaces,
            transport="sockets",
        )
    )
    rows = []
    for codec in options.codecs:
        error = max(pool.call("wrong", codec=codec, numel=min(fragment, 1_000_000)))
        sent = max(pool.call("wire_bytes", codec=codec, numel=fragment)) * fragments
        times = []
        for _ in range(options.rounds):
            times.append(max(pool.call("average", codec=codec, numel=fragment, fragments=fragments)))
            print(f"{codec}: {times[-1]:.1f} s", flush=True)
        seconds = statistics.median(times)
        full = seconds * PUBLISHED["parameters"] / (fragment * fragments)
        rows.append(
            {
                "codec": codec,
                "parameters": fragment * fragments,
                "seconds": round(seconds, 2),
                "all_seconds": [round(value, 2) for value in times],
                "seconds_for_1e9": round(full, 2),
                "sent_bytes": sent,
                "share_of_rate": round(sent * 8 / seconds / (options.mbit * 1e6), 3),
                "largest_error": round(error, 4),
                "load": machine.load(),
            }
        )
    return rows


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure, print, write the result file; return what was written."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parameters", type=float, default=1e9)
    parser.add_argument("--fragment", type=float, default=25e6, help="parameters of a message")
    parser.add_argument("--mbit", type=float, default=500.0, help="rate of a rank's link in each direction")
    parser.add_argument("--codecs", nargs="+", default=["int8", "int4"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="where to write instead of bench/results/outer_gradients.json")
    options = parser.parse_args(arguments)
    if options.fragment < 1 or options.parameters < 1:
        parser.error("--parameters and --fragment: expected at least 1")
    if reason := netns.why_unavailable():
        sys.exit(f"bench.outer_gradients: {reason}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with ExitStack() as stack:
        rows = measure(options, stack)
    scaled = options.parameters < PUBLISHED["parameters"]
    output.table(
        f"average of {options.parameters:.3g} fp32 parameters, {RANKS} ranks, {options.mbit:g} Mbit/s each",
        ["what", "seconds", "for 1 B", "of the rate", "sent by a rank"],
        [
            *(
                [
                    row["codec"],
                    f"{row['seconds']:.1f}",
                    f"{row['seconds_for_1e9']:.1f}" + (" (scaled)" if scaled else ""),
                    f"{100 * row['share_of_rate']:.0f} %",
                    f"{row['sent_bytes'] / 1e9:.2f} GB",
                ]
                for row in rows
            ),
            [f"PRIME, int8, published, by {LINKS_SHARED}", "", f"{comparable_seconds():.1f}", "", ""],
        ],
    )
    result = {
        "machine": machine.describe(),
        "mbit": options.mbit,
        "ranks": RANKS,
        "scaled": scaled,
        "published": PUBLISHED,
        "rows": rows,
        "not_beaten": [row["codec"] for row in rows if row["seconds_for_1e9"] >= comparable_seconds()],
    }
    print(output.write("outer_gradients", result, options.json))
    return result


if __name__ == "__main__":
    main()
