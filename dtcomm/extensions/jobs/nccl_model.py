"""Predicts the time of an uncompressed collective over NCCL: its algorithms, its protocols, and which it chooses.

The choice is NCCL's own: the time that NCCL's model gives each algorithm and protocol (src/graph/tuning.cc of NCCL 2.28
and its constants). That model serves to choose: it leaves out the launch of a collective and the filling and draining
of a pipeline, and it describes the traffic of NVLS by a factor. The time that we predict for the chosen algorithm is

    launch + latency + bytes / bandwidth + 2 sqrt(fill * bytes / bandwidth)

The last term is the cost of a pipeline with the best number of pieces: with d stages and o seconds per piece, k pieces
cost (d + k) (o + B / k), whose minimum is 2 sqrt(d o B) above B. ``FILL`` is d o of a protocol; LL needs no pieces,
since its flags are sent with each word. These figures and ``Device.launch_us`` are ours; docs/results/planner.md shows
what they do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dtcomm.extensions.jobs.hardware import System

PROTOCOLS = ("LL", "LL128", "Simple")

# Microseconds of a kernel and of a hop, by protocol.
BASE = {"tree": (6.8, 14.0, 8.4), "ring": (6.6, 14.0, 8.4), "nvls": (0, 0, 0), "nvls_tree": (0, 0, 0)}
HOP: dict[str, dict[str, tuple[float, float, float]]] = {
    "nvlink": {"tree": (0.6, 1.25, 4), "ring": (0.6, 1.9, 3.4), "nvls": (0, 0, 25), "nvls_tree": (0, 0, 25)},
    "pcie": {"tree": (1.0, 1.9, 4.0), "ring": (1.0, 2.5, 5.7)},
    "net": {"tree": (5.0, 8.5, 14), "ring": (2.7, 4.0, 14), "nvls": (0, 0, 18), "nvls_tree": (0, 0, 20.9)},
}
NET_OVERHEAD = 2.0  # microseconds that a CPU needs to post a message, three times with Simple
# GB/s, by generation and on one, two and more hosts; LL on several hosts depends on the CPU, which is assumed to be
# AMD's.
LL_MAX = {
    "volta": (39.0, 39.0, 20.4), "ampere": (87.7, 22.5, 19.0),
    "hopper": (141.0, 45.0, 35.0), "blackwell": (282.0, 90.0, 70.0),
}  # fmt: skip
# GB/s a channel.
RING_LL128 = {"volta": (20.0,) * 3, "ampere": (20.0,) * 3, "hopper": (36.7,) * 3, "blackwell": (40.0,) * 3}
TREE_LL128 = {
    "volta": (20.0,) * 3, "ampere": (20.0,) * 3,
    "hopper": (36.7, 36.7, 29.0), "blackwell": (55.6, 31.67, 20.0),
}  # fmt: skip
TREE = {
    "volta": (26.5, 18.5, 10.0), "ampere": (24.0, 23.6, 17.8),
    "hopper": (38.7, 41.4, 36.0), "blackwell": (70.0, 42.8, 24.0),
}  # fmt: skip
NVLS_TREE = {"hopper": (0.0, 57.7, 45.5), "blackwell": (0.0, 96.0, 80.0)}
NVLS_EFFICIENCY = {"hopper": 0.85, "blackwell": 0.74}
CHANNELS = {"volta": 12, "ampere": 24, "hopper": 16, "blackwell": 32}
# The share of its bandwidth that a tree reaches at 64 B, 128 B, …
TREE_REACH = (
    (1, 1, 1, 1, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1, 1, 1),
    (1, 1, 1, 1, 1, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9, 1, 1),
    (0.9,) * 7 + (0.8, 0.7, 0.6, 0.6, 0.5, 0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9, 0.9),
)

# The following are dtcomm's own.
FILL = {"ring": (0.0, 2.0, 5.0), "tree": (0.0, 5.0, 5.0), "nvls": (0, 0, 5.0), "nvls_tree": (0, 0, 5.0)}
# GB/s of LL around a ring inside a host, where that is below LL_MAX; the share of NVLink 5's rate that copies reach.
LL_REACHED = {"volta": 30.0, "ampere": 35.0}
LANES_REACH = {"blackwell": 0.93}
P2P = {"inside": 11.0, "between": 37.0}  # microseconds of grouped sends and receives

ROUND_TRIPS = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}


@dataclass(frozen=True, kw_only=True)
class NcclChoice:
    """The algorithm and protocol that NCCL would run, and the predicted seconds."""

    algorithm: str
    protocol: str
    seconds: float


def algorithms(collective: str, system: System) -> tuple[str, ...]:
    """Return the names that `choose` accepts: those that NCCL has for this collective on this system."""
    if collective != "all_reduce":
        return ("ring",) if collective in (*ROUND_TRIPS, "broadcast", "reduce") else ("one_shot",)
    nvls = system.device.generation in NVLS_EFFICIENCY and system.inside.kind == "nvlink"
    if not nvls or system.per_host < 3:
        return ("ring", "tree")
    return ("ring", "tree", "nvls" if system.hosts == 1 else "nvls_tree")


def choose(collective: str, system: System, nbytes: int, algorithm: str | None = None) -> NcclChoice:
    """Return what NCCL runs for ``nbytes`` bytes (of all shards, if any), or ``algorithm`` with its best protocol."""
    names = algorithms(collective, system)
    if algorithm is not None and algorithm not in names:
        raise ValueError(f"algorithm: {algorithm!r} is not one of {', '.join(names)}, which NCCL has")
    if system.ranks == 1:
        return NcclChoice(algorithm=algorithm or names[0], protocol="", seconds=0.0)
    if names == ("one_shot",):
        return NcclChoice(
            algorithm="one_shot", protocol="Simple", seconds=_point_to_point(collective, system, nbytes)
        )
    variants = [
        _Variant(collective, system, name, protocol) for name in names if algorithm in (None, name)
        for protocol in range(3) if protocol == 2 or not name.startswith("nvls")
    ]  # fmt: skip
    best = min(variants, key=lambda variant: variant.planned(nbytes))
    return NcclChoice(algorithm=best.name, protocol=PROTOCOLS[best.protocol], seconds=best.expected(nbytes))


class _Variant:
    """One algorithm with one protocol on one system; times are in microseconds, bandwidths in bytes a microsecond."""

    def __init__(self, collective: str, system: System, name: str, protocol: int) -> None:
        self.collective, self.system, self.name, self.protocol = collective, system, name, protocol
        self.generation = system.device.generation
        self.width = min(system.hosts, 3) - 1
        self.channels = CHANNELS[self.generation]
        self.latency = self._latency()

    def planned(self, nbytes: int) -> float:
        """Return the time by NCCL's model, in microseconds."""
        latency = self.latency
        several = self.system.hosts > 1 and self.collective == "all_reduce"
        if self.name == "ring" and self.protocol == 2 and several:
            latency *= 1.4
        return latency + nbytes / (self._bandwidth(planned=True) * self._reach(nbytes) * 1e3)

    def expected(self, nbytes: int) -> float:
        """Return the predicted time, in seconds."""
        wire = nbytes / (self._bandwidth(planned=False) * self._reach(nbytes) * 1e3)
        fill = 2 * math.sqrt(FILL[self.name][self.protocol] * wire)
        return (self.system.device.launch_us + self.latency + wire + fill) * 1e-6

    def _reach(self, nbytes: int) -> float:
        if self.name != "tree":
            return 1.0
        at = max(nbytes // 64, 1).bit_length() - 1
        reach = TREE_REACH[self.protocol]
        return reach[at] if at < len(reach) else 1.0

    def _latency(self) -> float:
        system, at = self.system, self.protocol
        kind = "nvlink" if system.inside.kind == "nvlink" else "pcie"
        base = BASE[self.name][at]
        inside, between = HOP[kind].get(self.name, (0, 0, 0))[at], HOP["net"][self.name][at]
        # Simple flushes the writes of the network card, which takes another round trip.
        between += system.between.latency_us * (2 if at == 2 else 1)
        tree_steps = 2 * int(math.log2(system.hosts))
        if self.name == "tree":
            return base + 2 * (system.per_host - 1) * inside + tree_steps * between
        if self.name == "nvls":
            return base + inside
        if self.name == "nvls_tree":
            return base + inside + tree_steps * between
        if self.collective in ("broadcast", "reduce"):
            slow = HOP["net" if system.hosts > 1 else kind]["tree" if at == 2 else "ring"][at]
            return base + system.ranks * slow
        if system.hosts > 1:
            inside = max(inside, NET_OVERHEAD * (3 if at == 2 else 1))
        trips = ROUND_TRIPS[self.collective]
        hops = hops_of_ring(trips, system.ranks, system.hosts)
        return base + hops[0] * inside + hops[1] * between

    def _bandwidth(self, planned: bool) -> float:
        # GB/s of the tensor, which nccl-tests calls algbw.
        system, at, channels = self.system, self.protocol, self.channels
        network = system.host_bandwidth / 1e9 if system.hosts > 1 else math.inf
        lanes = system.inside.gbytes
        if self.name.startswith("nvls"):
            return self._nvls_bandwidth(lanes, network, planned)
        if not planned:
            lanes *= LANES_REACH.get(self.generation, 1.0)
        if self.name == "tree":
            # On two hosts each host is the root of one of the two trees, so the network carries the tensor once.
            bus = min(lanes, 2 * network) if system.hosts <= 2 else min(lanes, network)
            bus = min(bus * 0.92, channels * TREE[self.generation][self.width])
            if at == 0:
                bus = min(bus / 3.8, self._ll_max())
            elif at == 1:
                share = 7 / 9 if system.hosts == 1 else 120 / 128
                bus = min(bus * share, channels * TREE_LL128[self.generation][self.width])
            return bus / 2
        bus = min(lanes, network)
        if at == 0:
            bus = min(bus * 0.5, self._ll_max())
            if not planned and system.hosts == 1:
                bus = min(bus, LL_REACHED.get(self.generation, bus))
        elif at == 1:
            bus = min(bus * 0.92, channels * RING_LL128[self.generation][self.width])
        return bus / traffic_of_ring(self.collective, system.ranks)

    def _nvls_bandwidth(self, lanes: float, network: float, planned: bool) -> float:
        system, channels = self.system, self.channels
        efficiency, ranks = NVLS_EFFICIENCY[self.generation], system.ranks
        cap = NVLS_TREE[self.generation][self.width] * channels if self.name == "nvls_tree" else math.inf
        if planned:
            bus = min(
                lanes * efficiency * (channels - 1) / channels * 2, network * (2 if system.hosts <= 2 else 1)
            )
            return min(bus, cap) * ranks / (2 * (ranks - 1))
        # The switch sums: a GPU sends its whole tensor up for the sums of the others and its own share of the sums, and
        # receives as much. Through the network every share goes up and down a tree over the hosts: once on two hosts,
        # where each is a root, twice on more.
        inside = lanes * efficiency / (1 + 1 / system.per_host)
        if self.name == "nvls":
            return inside
        return min(inside * (channels - 1) / channels, network / (1 if system.hosts <= 2 else 2))

    def _ll_max(self) -> float:
        several = self.system.hosts > 1
        return LL_MAX["ampere" if several else self.generation][self.width]


def hops_of_ring(trips: int, ranks: int, hosts: int) -> tuple[int, int]:
    """Return the hops of a chunk inside hosts and between hosts in ``trips`` trips around a ring."""
    between = trips * (hosts - 1) if hosts > 1 else 0
    return trips * (ranks - 1) - between, between


def traffic_of_ring(collective: str, ranks: int) -> float:
    """Return what each rank sends around a ring, in tensors."""
    return ROUND_TRIPS.get(collective, 0) * (ranks - 1) / ranks or 1.0


def _point_to_point(collective: str, system: System, nbytes: int) -> float:
    # Grouped sends and receives: the busiest rank's bytes inside its host and to other hosts, at the same time.
    ranks, size = system.ranks, system.per_host
    lanes = system.inside.bandwidth * LANES_REACH.get(system.device.generation, 1.0)
    within = nbytes * (size - 1) / ranks / lanes
    senders = size if collective == "all_to_all" else 1
    across = nbytes * (ranks - size) / ranks / min(system.rank_bandwidth, system.host_bandwidth / senders)
    wire = max(within, across) * 1e6
    start = P2P["between" if system.hosts > 1 else "inside"]
    return (start + wire + 2 * math.sqrt(FILL["ring"][2] * wire)) * 1e-6
