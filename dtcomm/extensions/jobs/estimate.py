"""Predicts the time of one collective on a system, from the algorithm's profile, or from NCCL's model if NCCL runs it.

For the engines of dtcomm, let L be the seconds of latency along the steps, W those on each kind of link, and C those of
arithmetic, all of the busiest rank, and let p pieces follow each other through the steps. A message takes

    L + (W_inside + W_between + C) / p + (1 - 1 / p) * max(W_inside, W_between, C)

which is the sum of all times for one piece, and the time of the busiest resource for many. Ranks that share a host's
memory have no link that works in parallel with them, so their times always add up.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from dtcomm import algorithms
from dtcomm.codecs.base import Codec
from dtcomm.extensions.jobs import nccl_model
from dtcomm.extensions.jobs.hardware import System
from dtcomm.extensions.jobs.traffic_profile import Profile, profile
from dtcomm.planner.cost_model import Table, measured_bytes
from dtcomm.runtime.torchdist.rounds import device_pieces
from dtcomm.schedule.ir import CUT_AT_GRANULES
from dtcomm.streams import HOST_CALL_US, HOST_KERNEL_US

UNMEASURED = Table()
PIECE_BYTES = 256 * 1024  # messages above this are cut into pieces
MAX_PIECES = 64
MANY_RANKS = 2048  # beyond this only some algorithms are considered
#: Microseconds of a step in addition to the link's, inside a host and between hosts: of grouped sends and receives, or
#: of Gloo's.
STEP_US = {"nccl": (10.0, 25.0), "gloo": (20.0, 20.0), "memory": (0.7, 0.7)}
#: The share of a link's bandwidth that our messages reach.
LINK_REACH = {"nccl": 0.85, "gloo": 1.0, "memory": 1.0}
CALL_US = {"nccl": 10.0, "gloo": 60.0, "memory": 5.0}  # of each call
#: 2 (n - 1) / n; the whole tensor; else (n - 1) / n.
BUS_TRAVERSALS = {"all_reduce": 2.0, "broadcast": 0.0, "reduce": 0.0}


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The prediction for one collective of ``nbytes`` uncompressed bytes (of all shards, if there are shards).

    ``wire_bytes`` is what the busiest rank sends, ``leaving_bytes`` what leaves the busiest host, ``memory_bytes`` the
    buffers it needs besides the tensor, ``encodings`` how often the most encoded contribution is encoded,
    ``host_seconds`` what launching kernels and calls takes of a host, and ``detail`` the protocol or the parts of the
    time.
    """

    collective: str
    algorithm: str
    codec: str
    engine: str
    nbytes: int
    ranks: int
    seconds: float
    wire_bytes: int
    memory_bytes: int
    encodings: int
    detail: str = ""
    host_seconds: float = 0.0
    leaving_bytes: int = 0

    @property
    def algbw(self) -> float:
        """GB/s (1e9) of the tensor: size by time."""
        return self.nbytes / self.seconds / 1e9 if self.seconds > 0 else 0.0

    @property
    def busbw(self) -> float:
        """The bus bandwidth of nccl-tests in GB/s."""
        return self.algbw * bus_factor(self.collective, self.ranks)

    def as_dict(self) -> dict[str, Any]:
        """Return the estimate for JSON, the time in microseconds."""
        names = "collective algorithm codec engine wire_bytes leaving_bytes memory_bytes encodings detail"
        return {
            **{name: getattr(self, name) for name in names.split()}, "size": self.nbytes,
            "time_us": round(self.seconds * 1e6, 3), "host_us": round(self.host_seconds * 1e6, 3),
            "algbw": round(self.algbw, 4), "busbw": round(self.busbw, 4),
        }  # fmt: skip


def bus_factor(collective: str, ranks: int) -> float:
    """Return nccl-tests' factor from algbw to busbw."""
    traversals = BUS_TRAVERSALS.get(collective, 1.0)
    return traversals * (ranks - 1) / ranks if traversals else 1.0


def candidates(collective: str, codec: Codec, system: System) -> tuple[str, ...]:
    """Return the algorithms to consider for a codec: NCCL's if NCCL runs it, otherwise dtcomm's own."""
    if system.engine == "nccl" and codec.name == "none":
        return nccl_model.algorithms(collective, system)
    names = tuple(name for name in algorithms.available(collective) if not algorithms.is_registered(name))
    if system.ranks > MANY_RANKS:
        # Algorithms whose steps or messages grow with the number of ranks cannot win.
        names = tuple(name for name in names if name in ("hierarchical", "halving", "two_shot"))
    if system.hosts == 1:
        return tuple(name for name in names if name != "hierarchical")
    if "hierarchical" not in names or system.per_host == 1:
        return names
    levels = ("two_shot", "double_tree") if collective == "all_reduce" else ()
    return (*names, *(f"hierarchical:one_shot/{level}" for level in levels))


def estimate(
    collective: str, algorithm: str, codec: Codec, system: System, nbytes: int, dtype: torch.dtype = torch.float32,
    table: Table = UNMEASURED,
) -> Estimate | None:  # fmt: skip
    """Predict one collective of ``nbytes`` uncompressed bytes by one of `candidates`.

    Measured times of ``table`` are used on CPUs if there are any of a group of this size. None if the algorithm's
    profile is not known for so many ranks.
    """
    numel = elements(collective, nbytes, dtype, system.ranks)
    size = numel * dtype.itemsize
    by_nccl = system.engine == "nccl" and codec.name == "none"
    if by_nccl and algorithm in nccl_model.algorithms(collective, system):
        choice = nccl_model.choose(collective, system, size, algorithm)
        sent = int(size * bus_factor(collective, system.ranks))
        return Estimate(
            collective=collective, algorithm=algorithm, codec=str(codec), engine="nccl", nbytes=size,
            ranks=system.ranks, seconds=choice.seconds, wire_bytes=sent, memory_bytes=0, encodings=0,
            host_seconds=HOST_CALL_US * 1e-6, detail=choice.protocol,
            leaving_bytes=_leaving(collective, sent, system),
        )  # fmt: skip
    loads = profile(algorithm, collective, system.ranks, system.per_host)
    if loads is None:
        return None
    predicted = _predict(loads, algorithm, codec, system, numel, dtype)
    if system.device.generation:
        return predicted
    measured = table.measurements(collective, codec, system.ranks, system.hosts).get(algorithm)
    if measured is None:
        return predicted
    seconds = measured.seconds(measured_bytes(numel, dtype, codec))
    return replace(predicted, seconds=seconds, detail="measured")


def elements(collective: str, nbytes: int, dtype: torch.dtype, ranks: int) -> int:
    """Return the elements of a tensor of about ``nbytes`` bytes; whole shards if the collective has shards."""
    numel = max(1, nbytes // dtype.itemsize)
    return numel if collective in CUT_AT_GRANULES else max(1, numel // ranks) * ranks


def _predict(
    loads: Profile, algorithm: str, codec: Codec, system: System, numel: int, dtype: torch.dtype
) -> Estimate:
    chunk = chunk_elements(loads, numel, codec.granularity)
    payload = codec.wire_bytes(chunk, dtype)
    encode, decode = (seconds * system.ranks_per_core for seconds in system.device.work(codec))
    engine = system.engine
    step_inside, step_between = (us * 1e-6 for us in STEP_US[engine])
    kernel, reach = system.device.kernel_us * 1e-6, LINK_REACH[engine]
    latency = inside = between = work = host = 0.0
    steps, levels = sum(count for _, count in loads.loads), algorithm.startswith("hierarchical")
    parts_of_message = device_pieces(
        chunk * dtype.itemsize * loads.chunks, payload * loads.chunks, steps, levels
    )
    for load, count in loads.loads:
        waits = [0.0]
        if load.inside:
            waits.append(step_inside + system.inside.latency_us * 1e-6)
        if load.between:
            waits.append(step_between + system.between.latency_us * 1e-6)
        kernels = kernel * ((load.encode > 0) + (load.decode > 0))
        latency += count * (max(waits) + kernels)
        if system.device.generation:
            launched = HOST_KERNEL_US * ((load.encode > 0) + (load.decode > 0))
            host += count * parts_of_message * (launched + HOST_CALL_US * (len(waits) > 1)) * 1e-6
        seconds_per_payload = payload / (system.inside.bandwidth * reach)
        inside += count * load.inside * (seconds_per_payload + system.inside.message_us * 1e-6)
        busiest = max(load.between / system.rank_bandwidth, load.host / system.host_bandwidth)
        across = busiest * payload / reach
        between += count * (across + load.between * system.between.message_us * 1e-6)
        work += count * chunk * (load.encode * encode + load.decode * decode)
    pieces = min(MAX_PIECES, max(1, payload // PIECE_BYTES)) if engine != "memory" else 1
    once = inside + between + work
    seconds = latency + once / pieces + (1 - 1 / pieces) * max(inside, between, work)
    seconds += CALL_US[engine] * 1e-6 + system.device.launch_us * 1e-6 if loads.loads else 0.0
    total = loads.total()
    sent = (total.inside + total.between) * payload
    # A buffer for each payload that is sent and received in the largest step; the runtimes reuse them.
    most = max((load.inside + load.between for load, _ in loads.loads), default=0)
    parts = " ".join(
        f"{name} {share / (once + latency):.0%}"
        for name, share in (("steps", latency), ("inside", inside), ("between", between), ("codec", work))
        if share > 0.005 * (once + latency)
    )
    return Estimate(
        collective=loads.collective, algorithm=algorithm, codec=str(codec),
        engine=engine if engine != "nccl" else "dtcomm over nccl", nbytes=numel * dtype.itemsize, ranks=system.ranks,
        seconds=max(seconds, host), host_seconds=host, wire_bytes=sent, leaving_bytes=total.host * payload,
        memory_bytes=2 * most * payload,
        encodings=loads.encodings if codec.name != "none" else 0,
        detail=f"launches on the host, {host * 1e6:.0f} us" if host > seconds else parts,
    )  # fmt: skip


def _leaving(collective: str, sent: int, system: System) -> int:
    """Return what leaves a host by NCCL, of whose ring one rank sends to another host, if every rank sends ``sent``."""
    if system.hosts == 1:
        return 0
    if collective != "all_to_all":
        return sent
    return sent * system.per_host * (system.ranks - system.per_host) // (system.ranks - 1)


def chunk_elements(loads: Profile, numel: int, granularity: int) -> int:
    """Return the elements of the largest chunk."""
    if loads.collective not in CUT_AT_GRANULES:
        return numel // loads.ranks
    granules = -(-numel // granularity)
    return min(numel, -(-granules // loads.chunks) * granularity)
