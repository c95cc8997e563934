"""What one collective would take on a system: read off the algorithm's profile, or NCCL's model where NCCL runs it.

Our own engines: with L seconds of latency along the steps, W on each kind of link, C of arithmetic, all of the
busiest rank, and p pieces that follow each other through the steps, a message takes

    L + (W_inside + W_between + C) / p + (1 - 1 / p) * max(W_inside, W_between, C)

which is the sum of all for a message in one piece, and the busiest resource alone for one in many. Ranks that
share a host's memory have no link that works beside them: there everything is one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from dtcomm import algorithms
from dtcomm.codecs.base import Codec
from dtcomm.planner import nccl_model
from dtcomm.planner.cost_model import Table, measured_bytes
from dtcomm.planner.hardware import System
from dtcomm.planner.traffic_profile import Profile, profile
from dtcomm.schedule.ir import CUT_AT_GRANULES

UNMEASURED = Table()
PIECE = 256 * 1024  # bytes of a message before it is cut into pieces
MOST_PIECES = 64
MANY = 2048  # ranks, beyond which only some algorithms are worth reading
#: Microseconds of a step on our engines besides the link's: of grouped sends and receives, or of Gloo's.
STEP = {"nccl": (10.0, 25.0), "gloo": (20.0, 20.0), "memory": (0.7, 0.7)}
REACH = {"nccl": 0.85, "gloo": 1.0, "memory": 1.0}  # of a link's bandwidth, by messages of ours
CALL = {"nccl": 10.0, "gloo": 60.0, "memory": 5.0}  # of a call
BUS = {
    "all_reduce": 2.0,
    "broadcast": 0.0,
    "reduce": 0.0,
}  # 2 (n - 1) / n; the whole tensor; else (n - 1) / n


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """One collective of ``nbytes`` uncompressed bytes (of all shards where there are any).

    ``wire_bytes``: what the busiest rank sends; ``memory_bytes``: buffers it needs besides the tensor;
    ``encodings``: how often the most travelled contribution is encoded; ``detail``: the protocol, or what the time
    is made of.
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

    @property
    def algbw(self) -> float:
        """GB/s (1e9) of the tensor."""
        return self.nbytes / self.seconds / 1e9 if self.seconds > 0 else 0.0

    @property
    def busbw(self) -> float:
        """GB/s as nccl-tests counts them."""
        return self.algbw * bus_factor(self.collective, self.ranks)

    def as_dict(self) -> dict[str, Any]:
        """For JSON; time in microseconds."""
        return {
            "size": self.nbytes,
            "collective": self.collective,
            "algorithm": self.algorithm,
            "codec": self.codec,
            "engine": self.engine,
            "time_us": round(self.seconds * 1e6, 3),
            "algbw": round(self.algbw, 4),
            "busbw": round(self.busbw, 4),
            "wire_bytes": self.wire_bytes,
            "memory_bytes": self.memory_bytes,
            "encodings": self.encodings,
            "detail": self.detail,
        }


def bus_factor(collective: str, ranks: int) -> float:
    """nccl-tests' factor from algbw to busbw."""
    turns = BUS.get(collective, 1.0)
    return turns * (ranks - 1) / ranks if turns else 1.0


def candidates(collective: str, codec: Codec, system: System) -> tuple[str, ...]:
    """The algorithms that are considered for ``codec``: NCCL's where NCCL runs it, else ours."""
    if system.engine == "nccl" and codec.name == "none":
        return nccl_model.algorithms(collective, system)
    names = algorithms.available(collective)
    if system.ranks > MANY:
        # What is a matter of one step for all others, or of a step for each, is nothing for so many.
        names = tuple(name for name in names if name in ("hierarchical", "halving", "two_shot"))
    if system.hosts == 1:
        return tuple(name for name in names if name != "hierarchical")
    if "hierarchical" not in names or system.per_host == 1:
        return names
    levels = ("two_shot", "double_tree") if collective == "all_reduce" else ()
    return (*names, *(f"hierarchical:one_shot/{level}" for level in levels))


def estimate(
    collective: str,
    algorithm: str,
    codec: Codec,
    system: System,
    nbytes: int,
    dtype: torch.dtype = torch.float32,
    table: Table = UNMEASURED,
    placement: str = "",
) -> Estimate | None:
    """None where the algorithm's schedule cannot be read for so many ranks. ``nbytes`` counts uncompressed bytes.

    Where ``table`` has times of a group like this, on CPUs, they are taken, those of CPUs in this ``placement`` first.
    """
    numel = elements(collective, nbytes, dtype, system.ranks)
    size = numel * dtype.itemsize
    if (
        system.engine == "nccl"
        and codec.name == "none"
        and algorithm in nccl_model.algorithms(collective, system)
    ):
        choice = nccl_model.choose(collective, system, size, algorithm)
        sent = int(size * bus_factor(collective, system.ranks))
        return Estimate(
            collective=collective,
            algorithm=algorithm,
            codec=str(codec),
            engine="nccl",
            nbytes=size,
            ranks=system.ranks,
            seconds=choice.seconds,
            wire_bytes=sent,
            memory_bytes=0,
            encodings=0,
            detail=choice.protocol,
        )
    found = profile(algorithm, collective, system.ranks, system.per_host)
    if found is None:
        return None
    made = _ours(found, algorithm, codec, system, numel, dtype)
    if system.device.generation:
        return made
    measured = table.measurements(collective, codec, system.ranks, system.hosts, placement).get(algorithm)
    if measured is None:
        return made
    seconds = measured.seconds(measured_bytes(numel, dtype, codec))
    where = f", {measured.placement} CPUs" if measured.placement else ""
    return replace(made, seconds=seconds, detail=f"measured{where}")


def elements(collective: str, nbytes: int, dtype: torch.dtype, ranks: int) -> int:
    """Of a tensor of about ``nbytes`` bytes; whole shards where the collective has any."""
    numel = max(1, nbytes // dtype.itemsize)
    return numel if collective in CUT_AT_GRANULES else max(1, numel // ranks) * ranks


def _ours(
    found: Profile, algorithm: str, codec: Codec, system: System, numel: int, dtype: torch.dtype
) -> Estimate:
    chunk = chunk_elements(found, numel, codec.granularity)
    payload = codec.wire_bytes(chunk, dtype)
    encode, decode = (seconds * system.ranks_per_core for seconds in system.device.work(codec))
    engine = system.engine
    step_inside, step_between = (us * 1e-6 for us in STEP[engine])
    kernel, reach = system.device.kernel_us * 1e-6, REACH[engine]
    latency = inside = between = work = 0.0
    for load, count in found.loads:
        waits = [0.0]
        if load.inside:
            waits.append(step_inside + system.inside.latency_us * 1e-6)
        if load.between:
            waits.append(step_between + system.between.latency_us * 1e-6)
        kernels = kernel * ((load.encode > 0) + (load.decode > 0))
        latency += count * (max(waits) + kernels)
        each = payload / (system.inside.bandwidth * reach)
        inside += count * load.inside * (each + system.inside.message_us * 1e-6)
        busiest = max(load.between / system.rank_bandwidth, load.host / system.host_bandwidth)
        across = busiest * payload / reach
        between += count * (across + load.between * system.between.message_us * 1e-6)
        work += count * chunk * (load.encode * encode + load.decode * decode)
    pieces = min(MOST_PIECES, max(1, payload // PIECE)) if engine != "memory" else 1
    once = inside + between + work
    seconds = latency + once / pieces + (1 - 1 / pieces) * max(inside, between, work)
    total = found.total()
    sent = (total.inside + total.between) * payload
    parts = " ".join(
        f"{name} {share / (once + latency):.0%}"
        for name, share in (("steps", latency), ("inside", inside), ("between", between), ("codec", work))
        if share > 0.005 * (once + latency)
    )
    return Estimate(
        collective=found.collective,
        algorithm=algorithm,
        codec=str(codec),
        engine=engine if engine != "nccl" else "dtcomm over nccl",
        nbytes=numel * dtype.itemsize,
        ranks=system.ranks,
        seconds=(seconds + CALL[engine] * 1e-6 + (system.device.launch_us * 1e-6)) if found.loads else 0.0,
        wire_bytes=sent,
        memory_bytes=_memory(found, payload),
        encodings=found.encodings if codec.name != "none" else 0,
        detail=parts,
    )


def chunk_elements(found: Profile, numel: int, granularity: int) -> int:
    """Elements of the largest chunk."""
    if found.collective not in CUT_AT_GRANULES:
        return numel // found.ranks
    granules = -(-numel // granularity)
    return min(numel, -(-granules // found.chunks) * granularity)


def _memory(found: Profile, payload: int) -> int:
    # A box for what is sent and one for what arrives, of the step that needs most; the runtimes reuse them.
    most = max((load.inside + load.between for load, _ in found.loads), default=0)
    return 2 * most * payload
