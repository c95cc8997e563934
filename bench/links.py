"""Compare all_reduce over limited links with Gloo, Open MPI and UCX; a long link; and emulated links with real ones.

python -m bench.links [--parts short long emulated] [--gbit 1 10] [--sizes 1K 64M] [--codecs none bf16 int8 int4]
                      [--round-trip 75] [--loss 0] [--connections 1 4 auto] [--repeat 5] [--quick] [--json FILE]

Two ranks run in two network namespaces (needs root and iproute2), whose link has a rate in each direction. Parts:

  short      dtcomm over TCP, over UCX where dtcomm was built with it, Gloo, and Open MPI where it is installed; UCX
             and Open MPI use the link through the kernel, as there is no RDMA device
  long       a link with a delay (needs /dev/net/tun): several numbers of connections, "auto" being what the ranks
             choose, and several Gloo groups side by side, each of which reduces a part of the tensor
  emulated   a step with 101 MB of gradients over the real link, and over DTCOMM_EMULATE_LINK on this host, over sockets
             and over shared memory with the real link's CPU cost per byte, which is measured first

Tensors are fp32. Peers add in place, dtcomm takes the average in place, so that repeated values stay finite. "rate"
is the payload that a rank sends, as a share of what the link carries in the time. Results are checked; the exit
status is 1 if one is wrong.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.common import delayed_link, harness, mpi, netns, report
from bench.common.harness import Measure
from bench.common.pool import Pool
from bench.common.ranks import contestant, rank_pool
from dtcomm.runtime.bootstrap import between_hosts

KB, MB = 1 << 10, 1 << 20
PARTS = ("short", "long", "emulated")
GLOO, AUTO = "gloo", "auto"
LARGEST_ERROR = {"none": 1e-5, "bf16": 0.02, GLOO: 1e-5}  # relative to the largest element; 0.5 for others
LARGEST_SETTLED = MB  # the trials of larger messages would take too long over a slow link
OVER_LINK = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "dt0"}  # not through the memory that namespaces share
# The layers of Open MPI under which it is measured.
MPI = {
    "mpi tcp": ("--mca", "pml", "ob1", "--mca", "btl", "tcp,self"),
    "mpi ucx": ("--mca", "pml", "ucx", "--mca", "pml_ucx_tls", "any", "--mca", "pml_ucx_devices", "any"),
}
WIDTH, QUICK_WIDTH = 2896, 512  # of the three layers whose gradients a step averages
LATENCY_US = 20  # of the emulated link, as measured between the namespaces
UNLIMITED_GBIT = 400


def make_all_reduce(
    rank: int, ranks: int, name: str, *, codec: str, numel: int, groups: int = 1
) -> Callable[[], object]:
    """Return an all_reduce in place, after a check of its result.

    Args:
        rank: The rank.
        ranks: Number of ranks.
        name: The contestant's, for errors.
        codec: A codec of dtcomm, or "gloo".
        numel: Number of elements.
        groups: How many groups of Gloo reduce a part of the tensor each.
    """
    import dtcomm

    parts = [torch.randn(numel, generator=torch.Generator().manual_seed(r)) for r in range(ranks)]
    tensor, exact = parts[rank].clone(), torch.stack(parts).sum(0)
    if codec == GLOO:
        members = [None] if groups == 1 else [dist.new_group(backend=GLOO) for _ in range(groups)]
        shares = list(zip(tensor.chunk(groups), members, strict=True))

        def call() -> None:
            for work in [dist.all_reduce(share, group=group, async_op=True) for share, group in shares]:
                work.wait()
    else:
        exact /= ranks

        def call() -> None:
            dtcomm.all_reduce(tensor, "avg", codec=codec)

    call()
    error = float((tensor - exact).abs().max() / exact.abs().max())
    if not error <= LARGEST_ERROR.get(codec, 0.5):
        raise AssertionError(f"{name}: a result of {numel} elements has an error of {error:g} on rank {rank}")
    if codec == GLOO:
        tensor.zero_()
    return call


def make_step(rank: int, ranks: int, name: str, *, codec: str, width: int) -> Callable[[], object]:
    """Return a matrix product and an average of gradients in buckets, like a training step."""
    import dtcomm

    tensors, weight = [torch.randn(numel) for numel in [width * width, width] * 3], torch.randn(1024, 1024)

    def step() -> None:
        torch.mm(weight, weight)
        dtcomm.all_reduce_coalesced(tensors, "avg", codec=codec, algorithm="two_shot")

    step()
    return step


def describe_call(rank: int, ranks: int, *, codec: str, numel: int) -> tuple[int, int]:
    """Return the payload that this rank sends in a call, and its TCP connections to the other rank."""
    import dtcomm

    tensor = torch.ones(numel)
    dtcomm.all_reduce(tensor, "avg", codec=codec)
    before = dtcomm.info()["wire_bytes"]
    dtcomm.all_reduce(tensor, "avg", codec=codec)
    info = dtcomm.info()
    return info["wire_bytes"] - before, info.get("connections", 0)


def why_no_ucx() -> str:
    """Return why dtcomm cannot use UCX here, or an empty string."""
    try:
        between_hosts.open_ucx()
    except RuntimeError as error:
        return f"UCX is not measured: {error}"
    return ""


def _of_mpi(ranks: mpi.MpiRanks, numel: int, calls: int) -> float:
    return max(ranks.measure(numel=numel, warm=1, iters=calls))


class Link:
    """All that is measured over one link, by name: the ranks and the codec, or Open MPI's ranks.

    Args:
        options: Of the program.
        gbit: The link's rate.
    """

    def __init__(self, options: argparse.Namespace, gbit: float) -> None:
        self.options, self.gbit = options, gbit
        self.contestants: dict[str, tuple[Pool, dict[str, Any]]] = {}
        self.mpi: dict[str, mpi.MpiRanks] = {}

    def measure(self, results: harness.Results, part: str, case: dict[str, Any], title: str) -> None:
        """Measure all sizes, and add their rows."""
        for size in self.options.sizes:
            numel = size // 4
            for pool, _ in self.contestants.values():
                pool.call("forget")
            measures: dict[str, Measure] = {}
            extra: dict[str, dict[str, object]] = {}
            for name, (pool, what) in self.contestants.items():
                sent, connections = size, 0
                if what["codec"] != GLOO:
                    arguments = {"codec": what["codec"], "numel": numel}
                    sent, connections = pool.call("run", function=describe_call, arguments=arguments)[0]
                settle = what["codec"] != GLOO and size <= LARGEST_SETTLED and part == "short"
                measures[name] = contestant(pool, name, make_all_reduce, settle=settle, numel=numel, **what)
                extra[name] = {"sent": sent, "connections": connections or ""}
            for name, ranks in self.mpi.items():
                measures[name] = functools.partial(_of_mpi, ranks, numel)
                extra[name] = {"sent": size, "connections": ""}
            times = harness.take_turns(measures, self.options.repeat, self.options.seconds)
            for name, series in times.items():
                share = extra[name]["sent"] * 8e-9 / statistics.median(series) / self.gbit  # type: ignore[operator]
                extra[name]["rate"] = f"{share:.0%}"
            where = {"part": part, "gbit": self.gbit, **case, "bytes": size}
            results.add(f"all_reduce of {report.size_name(size)}, {title}", where, times, extra)


def measure_short(options: argparse.Namespace, results: harness.Results, gbit: float) -> None:
    """Compare codecs and peers over a link without a delay."""
    with ExitStack() as stack:
        namespaces = stack.enter_context(netns.two_hosts(gbit))
        link = Link(options, gbit)
        transports = {"": {"DTCOMM_TRANSPORT": "sockets"}}
        if reason := why_no_ucx():
            print(reason)
        else:
            transports[" ucx"] = {"DTCOMM_TRANSPORT": "ucx", **OVER_LINK}
        for suffix, env in transports.items():
            pool = stack.enter_context(rank_pool(namespaces=namespaces, env=env))
            if not suffix:
                link.contestants[GLOO] = (pool, {"codec": GLOO})
            link.contestants |= {f"{codec}{suffix}": (pool, {"codec": codec}) for codec in options.codecs}
        if reason := mpi.why_unavailable() or "":
            print(reason)
        else:
            mpirun = stack.enter_context(netns.mpirun(namespaces))
            exports = [word for name, value in OVER_LINK.items() for word in ("-x", f"{name}={value}")]
            for name, layers in MPI.items():
                command = [*mpirun, *exports, *layers]
                link.mpi[name] = stack.enter_context(closing(mpi.MpiRanks("default", 2, mpirun=command)))
        link.measure(results, "short", {}, f"2 hosts, {gbit:g} Gbit/s")


def measure_long(options: argparse.Namespace, results: harness.Results, gbit: float) -> None:
    """Compare numbers of connections over a link with a delay; codecs take the number that the ranks choose."""
    with ExitStack() as stack:
        control = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text(encoding="ascii")
        chosen = options.congestion_control if options.congestion_control in control.split() else "cubic"
        sites = delayed_link.two_sites(gbit, options.round_trip, loss=options.loss, congestion_control=chosen)
        namespaces = stack.enter_context(sites)
        link = Link(options, gbit)
        for connections in options.connections:
            env = {"DTCOMM_TRANSPORT": "sockets"}
            if connections != AUTO:
                env["DTCOMM_CONNECTIONS"] = connections
            pool = stack.enter_context(rank_pool(namespaces=namespaces, env=env))
            if not link.contestants:
                link.contestants[GLOO] = (pool, {"codec": GLOO})
                link.contestants[f"{GLOO}, 4 groups"] = (pool, {"codec": GLOO, "groups": 4})
            for codec in options.codecs if connections == AUTO else ["none"]:
                link.contestants[f"{codec}, {connections}"] = (pool, {"codec": codec})
        case = {"round_trip_ms": options.round_trip, "loss": options.loss, "congestion_control": chosen}
        title = f"{gbit:g} Gbit/s, {options.round_trip:g} ms round trip, loss {options.loss:g}, {chosen}"
        link.measure(results, "long", case, title)


def steps_over(
    options: argparse.Namespace, gbit: float, codecs: list[str], links: dict[str, str]
) -> Iterator[tuple[str, dict[str, list[float]]]]:
    """Yield a codec and the times of its step over the real link and over emulated ones, given by their transport."""
    with ExitStack() as stack:
        namespaces = stack.enter_context(netns.two_hosts(gbit))
        sockets = {"DTCOMM_TRANSPORT": "sockets"}
        pools = {"real": stack.enter_context(rank_pool(namespaces=namespaces, env=sockets))}
        for transport, link in links.items():
            env = {"DTCOMM_TRANSPORT": transport, "DTCOMM_EMULATE_LINK": link}
            pools[f"emulated, {transport}"] = stack.enter_context(rank_pool(pinned=False, env=env))
        for codec in codecs:
            for pool in pools.values():
                pool.call("forget")
            steps = {
                name: contestant(pool, name, make_step, codec=codec, width=options.width)
                for name, pool in pools.items()
            }
            yield codec, harness.take_turns(steps, options.repeat, options.seconds)


def gradient_bytes(options: argparse.Namespace) -> int:
    """Return the bytes of a step's gradients."""
    return 3 * (options.width + 1) * int(options.width) * 4


def measure_emulated(options: argparse.Namespace, results: harness.Results, cost: float, gbit: float) -> None:
    """Compare emulated links with the real one; as fast as "real" should be 1."""
    link = f"{gbit:g}gbit,{LATENCY_US}us"
    links = {"sockets": link, "memory": f"{link},{cost:.2f}ns/byte"}
    for codec, times in steps_over(options, gbit, options.codecs, links):
        case = {"part": "emulated", "gbit": gbit, "codec": codec, "bytes": gradient_bytes(options)}
        results.add(
            f"step of {gradient_bytes(options) / 1e6:.0f} MB of gradients, {codec}, {link}", case, times
        )


def cost_of_tcp(options: argparse.Namespace) -> float:
    """Return the nanoseconds of CPU time per byte that the network costs at either end."""
    bare = {"memory": f"{UNLIMITED_GBIT}gbit,{LATENCY_US}us,rdma"}
    _, times = next(steps_over(options, UNLIMITED_GBIT, ["none"], bare))
    real, memory = (statistics.median(series) for series in times.values())
    cost = max(0.0, (real - memory) * 1e9 / (2 * gradient_bytes(options)))
    print(f"TCP between the namespaces takes {cost:.2f} ns a byte of either end")
    return cost


def main(arguments: list[str] | None = None) -> int:
    """Measure and print."""
    parser = harness.parser(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--gbit", type=float, nargs="+", default=[1, 10])
    parser.add_argument("--sizes", type=report.parse_size, nargs="+", default=[KB, 128 * KB, MB, 64 * MB])
    parser.add_argument("--codecs", nargs="+", default=["none", "bf16", "int8", "int4"])
    parser.add_argument("--round-trip", type=float, default=75, help="milliseconds of the long link")
    parser.add_argument("--loss", type=float, default=0.0, help="share of packets that the long link loses")
    parser.add_argument("--connections", nargs="+", default=["1", "4", AUTO], help="over the long link")
    parser.add_argument("--congestion-control", default="bbr", help="of TCP, over the long link")
    parser.add_argument("--seconds", type=float, default=0.1, help="of one measurement")
    options = harness.parse(parser, arguments)
    if min(options.gbit) <= 0:
        parser.error("--gbit: must be positive")
    if reason := delayed_link.why_unavailable() if "long" in options.parts else netns.why_unavailable():
        sys.exit(f"bench.links: {reason}")
    options.width = QUICK_WIDTH if options.quick else WIDTH
    if options.quick:
        options.gbit, options.sizes, options.round_trip = options.gbit[:1], [MB], 10
        options.codecs = options.codecs[:2]
    results = harness.Results(options)
    cost = cost_of_tcp(options) if "emulated" in options.parts else 0.0
    for gbit in options.gbit:
        if "short" in options.parts:
            measure_short(options, results, gbit)
        if "long" in options.parts:
            measure_long(options, results, gbit)
        if "emulated" in options.parts:
            measure_emulated(options, results, cost, gbit)
    return results.finish()


if __name__ == "__main__":
    sys.exit(main())
