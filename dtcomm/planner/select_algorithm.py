"""Chooses the algorithm that ``algorithm="auto"`` and ``"direct"`` mean, and predicts whether a codec pays.

The choice is a pure function of what all ranks know alike, so all ranks choose alike without communicating.

- Inside one host the direct algorithms win: memory is shared, and a step costs the round trip of a cache line. A
  lossless all-reduce takes one shot while that is small and two shots above. Both give the same bits (one fp32 sum in
  rank order, rounded once), so the size decides only the time, and the native engine tries both.
- A lossy all-reduce takes two shots at every size. One shot encodes each contribution and no sum, two shots encode the
  sum as well. If the size chose between them, the result of a parameter would depend on what else is in its bucket.
- The other collectives have one direct algorithm worth using inside a host: one shot.
- Between hosts, lossless collectives and those that only copy take the algorithm with the least predicted cost, which
  may sum in another order. Lossy sums choose between two shots and a hierarchy, which crosses hosts once for all ranks
  of a host; every further hop would encode again. The prediction is made for sizes rounded up to a power of two, so
  that it is rarely made.
- If `dtcomm tune` has measured a group of as many ranks and hosts with this codec, its times decide ``auto``: the
  choice above stays as long as it is within 3 % of the fastest, and a lossy sum is encoded at most twice. Algorithms
  that a user registered are chosen in this way only, and only if a rank encodes each chunk once.

`compression_pays` predicts whether a codec makes an all_reduce of a given size faster, for paths where latency decides.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from dtcomm import algorithms
from dtcomm.codecs.base import Codec
from dtcomm.codecs.spec import codec
from dtcomm.planner.cost_model import Table, Topology, measured_bytes, parse, predict
from dtcomm.schedule.ir import REDUCING
from dtcomm.schedule.verify import verify
from dtcomm.streams import HOST_CALL_US, HOST_KERNEL_US

CHOOSERS = ("auto", "direct")
NEAR_FASTEST = 1.03  # times the fastest: the default choice stays within this
MAX_ENCODINGS = 2  # of a lossy sum whose algorithm is chosen by time alone
MIN_HIERARCHY_GAIN = 1.25  # the predicted speedup for which a lossy sum is encoded once more
DEFAULT = Table()
NONE = codec("none")


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The choice of an algorithm; ``seconds`` has the predicted or measured times of what was compared."""

    algorithm: str
    reason: str
    seconds: tuple[tuple[str, float], ...] = ()

    def __str__(self) -> str:
        return f"{self.algorithm}: {self.reason}"


def select(
    collective: str,
    numel: int,
    dtype: torch.dtype,
    codec: Codec,
    ranks: int,
    hosts: int = 1,
    table: Table = DEFAULT,
    algorithm: str = "auto",
) -> str:
    """Return the name of the algorithm to build; ValueError if ``algorithm`` is not valid.

    Args:
        numel: Elements of the whole tensor, as in `Schedule.bytes_on_wire`: the input of reduce_scatter, the output of
            all_gather.
        table: The constants and measurements to decide by.
        algorithm: ``"auto"`` or ``"direct"``; any other name is returned as it is if it is valid.

    Example:
        >>> import torch
        >>> from dtcomm import codec, planner
        >>> planner.select("all_reduce", 1 << 20, torch.float32, codec("int8"), ranks=4)
        'two_shot'
    """
    return explain(collective, numel, dtype, codec, ranks, hosts, table, algorithm).algorithm


def explain(
    collective: str,
    numel: int,
    dtype: torch.dtype,
    codec: Codec,
    ranks: int,
    hosts: int = 1,
    table: Table = DEFAULT,
    algorithm: str = "auto",
) -> Decision:
    """Return what `select` chooses and why; the arguments are those of `select`.

    Example:
        >>> import torch
        >>> from dtcomm import codec, planner
        >>> print(planner.explain("all_reduce", 1024, torch.float32, codec("none"), ranks=2))
        one_shot: sends 4096 bytes a rank, up to 131072 go in one shot
    """
    algorithms.require(algorithm, collective, besides=CHOOSERS)
    if algorithm not in CHOOSERS:
        return Decision(algorithm=algorithm, reason="asked for by name")
    lossless = codec.lossless(dtype)
    any_order = lossless or collective not in REDUCING
    default = _direct(collective, numel, dtype, codec, ranks, table, lossless)
    if algorithm == "direct" or ranks == 1:
        return default
    if measured := table.measurements(collective, codec, ranks, hosts):
        nbytes = measured_bytes(numel, dtype, codec)
        times = {
            name: row.seconds(nbytes)
            for name, row in measured.items()
            if _may_be_chosen(name, collective, ranks)
            and (any_order or _encodings(name, collective, ranks, hosts) <= MAX_ENCODINGS * hosts)
        }
        return _fastest(default, times, table)
    if hosts == 1:
        return default
    shard = 1 << max(-(-numel // ranks) - 1, 0).bit_length()
    costs = _costs(collective, shard * ranks, dtype, codec, ranks, hosts, table)
    if any_order:
        name = min(costs, key=lambda candidate: costs[candidate])
        return _decision(name, f"least predicted time on {hosts} hosts ({table.source})", costs)
    if "hierarchical" in costs and costs["hierarchical"] * MIN_HIERARCHY_GAIN < costs[default.algorithm]:
        reason = f"crosses hosts once for all ranks of a host, predicted over {MIN_HIERARCHY_GAIN}x faster"
        return _decision("hierarchical", reason, costs)
    return default


def _direct(
    collective: str, numel: int, dtype: torch.dtype, codec: Codec, ranks: int, table: Table, lossless: bool
) -> Decision:
    if collective != "all_reduce":
        return Decision(algorithm="one_shot", reason="the one direct algorithm worth using")
    if not lossless:
        reason = "a lossy sum takes two shots at every size, so that results do not depend on it"
        return Decision(algorithm="two_shot", reason=reason)
    sent, limit = codec.wire_bytes(numel, dtype) * (ranks - 1), table.one_shot_bytes
    if sent <= limit:
        return Decision(
            algorithm="one_shot", reason=f"sends {sent} bytes a rank, up to {limit} go in one shot"
        )
    return Decision(algorithm="two_shot", reason=f"one shot would send {sent} bytes a rank, over {limit}")


def _fastest(default: Decision, times: dict[str, float], table: Table) -> Decision:
    """Choose by measured times, in seconds by algorithm."""
    if not times:
        return default
    best = min(times, key=lambda candidate: times[candidate])
    stays = times.get(default.algorithm, math.inf) <= NEAR_FASTEST * times[best]
    name = default.algorithm if stays else best
    near = "" if name == best else f", within {NEAR_FASTEST - 1:.0%} of {best}"
    return _decision(name, f"measured {times[name] * 1e6:.3g} us{near} ({table.source})", times)


def _decision(name: str, reason: str, costs: dict[str, float]) -> Decision:
    return Decision(
        algorithm=name, reason=reason, seconds=tuple(sorted(costs.items(), key=lambda item: item[1]))
    )


@functools.lru_cache(maxsize=1024)
def _encodings(name: str, collective: str, ranks: int, hosts: int) -> int:
    groups = Topology.even(ranks, hosts).groups
    return algorithms.build(name, collective, ranks, hosts=groups).requantizations()


def _may_be_chosen(name: str, collective: str, ranks: int) -> bool:
    """Return whether a measured algorithm exists here; one of the user's must also allow error feedback."""
    if name not in algorithms.available(collective):  # measured where it was registered
        return False
    return (
        not algorithms.is_registered(name) or verify(algorithms.build(name, collective, ranks)).encodes_once
    )


@functools.lru_cache(maxsize=1024)
def _costs(
    collective: str, numel: int, dtype: torch.dtype, codec: Codec, ranks: int, hosts: int, table: Table
) -> dict[str, float]:
    topology = Topology.even(ranks, hosts)

    def cost(name: str) -> float:
        schedule = algorithms.build(name, collective, ranks, hosts=topology.groups)
        return predict(schedule, numel, dtype, codec, topology, table)

    # An algorithm of the user's is only chosen where it was measured.
    names = [name for name in algorithms.available(collective) if not algorithms.is_registered(name)]
    return {name: cost(name) for name in names}


#: Seconds that a codec adds to a call whatever its size, inside a host and between hosts: more kernel calls, more
#: buffers. A smaller predicted gain does not count.
FIXED_OVERHEAD = (2e-6, 5e-6)
#: What a lossy sum launches more than NCCL's one call: three kernels and a call, as two shots take them.
DEVICE_OVERHEAD = (3 * HOST_KERNEL_US + HOST_CALL_US) * 1e-6
#: A link inside a host with at least so many bytes per second is taken for the memory that its ranks share. The same
#: cores encode and move the bytes there, so a shorter payload saves no wait as on a link. Measured by `bench.threads`
#: on an AMD EPYC (family 25, model 17), all_reduce of 64 and 256 MB, 2 ranks: bf16 is 1.11 to 1.15 times as fast as
#: none where the ranks' cores share an L3 cache and 0.83 to 0.99 times where they do not, int8 0.98 and 0.84 to 0.93
#: times. `dtcomm tune` measures the machine at hand.
SHARED_MEMORY_BANDWIDTH = 5e9


class PayoffVerdict(NamedTuple):
    """Whether compression ``pays``, and the reason in words."""

    pays: bool
    reason: str


@functools.lru_cache(maxsize=4096)
def compression_pays(
    lossy: Codec,
    numel: int,
    dtype: torch.dtype,
    ranks: int,
    hosts: int,
    tuning_table: str,
    on_device: bool = False,
) -> PayoffVerdict:
    """Return whether an all_reduce is expected to be faster with the codec ``lossy`` than with none.

    If `dtcomm tune` has measured both, its times decide; otherwise the cost model predicts them. It does not predict a
    gain where ranks share memory, because there the machine decides. ``tuning_table`` is the text of the group's table,
    as rank 0 read it; empty for the defaults. ``on_device`` counts what the host takes to launch a codec's kernels too.

    Example:
        >>> import torch
        >>> from dtcomm import codec, planner
        >>> planner.compression_pays(codec("int8"), 1 << 20, torch.float32, ranks=2, hosts=2, tuning_table="").pays
        True
    """
    if ranks == 1 or lossy.lossless(dtype):
        return PayoffVerdict(False, f"{ranks} ranks" if ranks == 1 else f"{lossy} loses nothing")
    table = parse(tuning_table)
    (uncompressed, measured_uncompressed), (compressed, measured_compressed) = (
        collective_seconds("all_reduce", numel, dtype, candidate, ranks, hosts, table)
        for candidate in (NONE, lossy)
    )
    measured = measured_uncompressed and measured_compressed
    if on_device and not measured:
        compressed += DEVICE_OVERHEAD
    reason = (
        f"{lossy} {compressed * 1e6:.3g} us, none {uncompressed * 1e6:.3g} us for {numel} elements "
        f"({'measured' if measured else 'predicted'}, {table.source})"
    )
    return PayoffVerdict(compressed < uncompressed, reason)


def collective_seconds(
    collective: str, numel: int, dtype: torch.dtype, codec: Codec, ranks: int, hosts: int, table: Table
) -> tuple[float, bool]:
    """Return the expected seconds of a call, and whether `dtcomm tune` has measured them for this codec.

    ``numel`` counts elements of the whole tensor, all shards together.

    Example:
        >>> import torch
        >>> from dtcomm import codec, planner
        >>> planner.collective_seconds("all_reduce", 1 << 20, torch.float32, codec("int8"), 2, 1, planner.Table())[1]
        False
    """
    if measurements := table.measurements(collective, codec, ranks, hosts):
        nbytes = measured_bytes(numel, dtype, codec)
        return min(algorithm.seconds(nbytes) for algorithm in measurements.values()), True
    topology = Topology.even(ranks, hosts)
    name = select(collective, numel, dtype, codec, ranks, hosts, table)
    schedule = algorithms.build(name, collective, ranks, hosts=topology.groups)
    seconds = predict(schedule, numel, dtype, codec, topology, table)
    if codec.lossless(dtype):
        return seconds, False
    if hosts == 1 and table.inside.bandwidth >= SHARED_MEMORY_BANDWIDTH:
        uncompressed, _ = collective_seconds(collective, numel, dtype, NONE, ranks, hosts, table)
        seconds = max(seconds, uncompressed)
    return seconds + FIXED_OVERHEAD[hosts > 1], False
