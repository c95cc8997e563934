"""Measure all_reduce between two sites that are far apart: dtcomm over one and several TCP connections, and Gloo.

python -m bench.wide_area [--gbit 1 5] [--loss 0] [--round-trip 75] [--sizes 64M] [--codecs none int8 int4]
                          [--connections 1 2 4 8 auto] [--gloo-groups 1 4] [--buffers BYTES] [--json FILE]

Two ranks run in two network namespaces, whose link has a rate by tbf and a delay by a relay process (needs root,
iproute2 and /dev/net/tun). Every rate is measured with every share of lost packets. The operation is an fp32 sum in
place. Uncompressed sums run with every number of connections, and "auto", the number that the ranks choose; codecs with
auto alone. Several Gloo groups reduce a part of the tensor each, side by side. Contestants take turns; figures are
medians of three rounds of the slower rank. The goodput of a row is the payload that a rank sends over the time, as a
share of the link's rate.

A sum of N bytes over a link cannot take less time than its bytes and half of a round trip: at 1 Gbit/s and 75 ms,
64 MB reach at most 93 % of the rate. "cores" are those that the two ranks and the process that emulates the link keep
busy, each with its part of the kernel: where they add up to the machine's, it and not the link is the limit.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import socket
import statistics
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
from bench.common.targets import MB
from bench.two_hosts import GLOO, HostRank
from dtcomm.measure import delayed_link, netns

GOAL = 0.9  # share of the link's rate, from 64 MB on


AUTO = "auto"


class SiteRank(HostRank):
    """A rank in its own namespace, which also measures the round trip."""

    def __init__(
        self, rank: int, ranks: int, connections: str, gloo_groups: int, relay: int, **options: Any
    ) -> None:
        if connections != AUTO:
            os.environ["DTCOMM_CONNECTIONS"] = connections
        super().__init__(rank, ranks, transport="sockets", **options)
        self._relay = relay
        self._cores: dict[str, float] = {}
        self._groups = [dist.new_group(list(range(ranks)), backend=GLOO) for _ in range(gloo_groups)]

    def _call(self, codec: str, tensor: torch.Tensor) -> None:
        if codec != GLOO:
            super()._call(codec, tensor)
            return
        parts = tensor.chunk(len(self._groups))
        works = [
            dist.all_reduce(part, group=group, async_op=True)
            for part, group in zip(parts, self._groups, strict=True)
        ]
        for work in works:
            work.wait()

    def measure(self, codec: str, numel: int, warm: int, iters: int) -> float:
        """As that of `HostRank`; ``cores`` then says what the calls took."""
        tensor = self._held(numel)
        tensor.normal_(generator=torch.Generator().manual_seed(self.rank))
        for _ in range(max(1, warm)):
            self._call(codec, tensor)
        relay, own, start = _cpu_seconds(self._relay), time.process_time(), time.perf_counter()
        for _ in range(iters):
            self._call(codec, tensor)
        elapsed = time.perf_counter() - start
        self._cores = {
            "rank": (time.process_time() - own) / elapsed,
            "relay": (_cpu_seconds(self._relay) - relay) / elapsed,
        }
        return elapsed / iters

    def cores(self) -> dict[str, float]:
        """Return how many cores this rank and the relay kept busy in the last measurement."""
        return self._cores

    def round_trip_ms(self, port: int) -> float:
        """Return the shortest of ten round trips of a byte over TCP, between the two ranks."""
        if self.rank == 0:
            with socket.create_server(("10.77.0.1", port)) as server:
                connection, _ = server.accept()
                with connection:
                    for _ in range(10):
                        connection.sendall(connection.recv(1))
            return 0.0
        times = []
        with _connect(("10.77.0.1", port)) as connection:
            for _ in range(10):
                start = time.perf_counter()
                connection.sendall(b"x")
                connection.recv(1)
                times.append(time.perf_counter() - start)
        return min(times) * 1e3


def _cpu_seconds(pid: int) -> float:
    """Return the processor time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _connect(address: tuple[str, int]) -> socket.socket:
    for _ in range(100):
        try:
            return socket.create_connection(address)
        except ConnectionRefusedError:
            time.sleep(0.05)
    raise TimeoutError(f"nothing listens at {address}")


def measure(options: argparse.Namespace, gbit: float, loss: float, stack: ExitStack) -> list[dict[str, Any]]:
    """Return a row for each size and contestant, over a link that ``stack`` takes down."""
    namespaces = stack.enter_context(
        delayed_link.two_sites(
            gbit,
            options.round_trip,
            loss=loss,
            mtu=options.mtu,
            congestion_control=options.congestion_control,
        )
    )
    for namespace in namespaces if options.buffers else ():
        for name, usual in (("tcp_wmem", 65536), ("tcp_rmem", 131072)):
            limits = f"net.ipv4.{name}=4096 {usual} {options.buffers}"
            netns.run_command("ip", "netns", "exec", namespace, "sysctl", "-qw", limits)
    folder = stack.enter_context(TemporaryDirectory())
    relay = next(
        int(child.pid or 0) for child in multiprocessing.active_children() if child.name == delayed_link.RELAY
    )

    @functools.cache
    def pool_of(connections: str, gloo_groups: int) -> Pool:
        return stack.enter_context(
            Pool(
                SiteRank,
                2,
                timeout=300,
                store_file=str(Path(folder) / f"meet-{connections}-{gloo_groups}"),
                namespaces=namespaces,
                connections=connections,
                gloo_groups=gloo_groups,
                relay=relay,
            )
        )

    # By the names of the rows: the ranks, and the codec that they use.
    contestants: dict[str, tuple[Pool, str]] = {}
    for groups in options.gloo_groups:
        contestants[GLOO if groups == 1 else f"{GLOO}, {groups} groups"] = (pool_of(AUTO, groups), GLOO)
    for connections in options.connections:
        pool = pool_of(connections, 1)
        for codec in options.codecs:
            if codec == "none" or connections == AUTO:
                contestants[f"{codec}, {connections}"] = (pool, codec)
    pools = list({id(pool): pool for pool, _ in contestants.values()}.values())
    print(f"round trip {max(pools[0].call('round_trip_ms', port=29000)):.1f} ms")
    rows = []
    for size in options.sizes:
        numel = size // 4
        rounds: dict[str, list[float]] = {name: [] for name in contestants}
        cores: dict[str, list[tuple[float, float]]] = {name: [] for name in contestants}
        for _ in range(options.rounds):
            for name, (pool, codec) in contestants.items():
                rounds[name].append(max(pool.call("measure", codec=codec, numel=numel, warm=1, iters=1)))
                used = pool.call("cores")
                cores[name].append((sum(each["rank"] for each in used), used[0]["relay"]))
        for name, (pool, codec) in contestants.items():
            times = rounds[name]
            # A rank of two sends half of the sum and half of its input.
            sent = size if codec == GLOO else max(pool.call("wire_bytes", codec=codec, numel=numel))
            seconds = statistics.median(times)
            rows.append(
                {
                    "gbit": gbit,
                    "lost_share": loss,
                    "bytes": size,
                    "name": name,
                    "connections": 0 if codec == GLOO else pool.call("info")[0]["connections"],
                    "seconds": round(seconds, 4),
                    "all_seconds": [round(value, 4) for value in times],
                    "sent_bytes": sent,
                    "share_of_rate": round(sent * 8 / seconds / (gbit * 1e9), 3),
                    "cores_of_ranks": round(statistics.median(ranks for ranks, _ in cores[name]), 2),
                    "cores_of_relay": round(statistics.median(relay for _, relay in cores[name]), 2),
                    "load": machine.load(),
                }
            )
            print(rows[-1], flush=True)
    return rows


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure, print, write the result file; return what was written."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gbit", type=float, nargs="+", default=[1.0, 5.0])
    parser.add_argument("--round-trip", type=float, default=75, help="milliseconds")
    parser.add_argument(
        "--loss", type=float, nargs="+", default=[0.0], help="shares of packets that are lost"
    )
    parser.add_argument("--mtu", type=int, default=9000)
    parser.add_argument(
        "--congestion-control", default="bbr", help="of TCP, as the kernel calls it; default bbr"
    )
    parser.add_argument("--sizes", type=output.parse_size, nargs="+", default=[64 * MB])
    parser.add_argument("--codecs", nargs="+", default=["none", "int8", "int4"])
    parser.add_argument("--connections", nargs="+", default=["1", "2", "4", "8", AUTO])
    parser.add_argument(
        "--buffers", type=output.parse_size, help="largest socket buffers, instead of this machine's"
    )
    parser.add_argument("--gloo-groups", type=int, nargs="*", default=[1, 4], help="side by side")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="where to write instead of bench/results/wide_area.json")
    options = parser.parse_args(arguments)
    if reason := delayed_link.why_unavailable():
        sys.exit(f"bench.wide_area: {reason}")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    rows: list[dict[str, Any]] = []
    for gbit in options.gbit:
        for loss in options.loss:
            with ExitStack() as stack:
                rows += measure(options, gbit, loss, stack)
    cells = [
        [
            f"{row['gbit']:g}",
            f"{row['lost_share']:g}",
            output.size_name(row["bytes"]),
            row["name"],
            str(row["connections"] or ""),
            f"{row['seconds']:.3f}",
            f"{100 * row['share_of_rate']:.0f} %",
            f"{row['cores_of_ranks']:.2f}",
            f"{row['cores_of_relay']:.2f}",
        ]
        for row in rows
    ]
    output.table(
        f"all_reduce, fp32, 2 sites, {options.round_trip:g} ms round trip, {len(os.sched_getaffinity(0))} cores",
        [
            "Gbit/s",
            "loss",
            "size",
            "what",
            "connections",
            "seconds",
            "of the rate",
            "cores of ranks",
            "of the relay",
        ],
        cells,
    )
    missed = [
        row
        for row in rows
        if row["bytes"] >= 64 * MB and row["share_of_rate"] < GOAL and row["name"] == f"none, {AUTO}"
    ]
    result = {
        "machine": machine.describe(),
        "round_trip_ms": options.round_trip,
        "mtu": options.mtu,
        "congestion_control": options.congestion_control,
        "largest_buffers": options.buffers,
        "rows": rows,
        "below_goal": [
            f"{row['name']} at {output.size_name(row['bytes'])}, {row['gbit']:g} Gbit/s, loss {row['lost_share']:g}"
            for row in missed
        ],
    }
    print(output.write("wide_area", result, options.json))
    return result


if __name__ == "__main__":
    main()
