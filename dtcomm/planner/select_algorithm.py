"""Which algorithm ``algorithm="auto"`` and ``"direct"`` mean.

The choice is a pure function of what all ranks know alike, so that they choose alike without talking.

- Inside one host the direct algorithms win: memory is shared, and a step costs a cache line's round trip. A
  lossless all-reduce takes one shot while that is small and two shots above; both give the same bits (one
  fp32 sum in rank order, rounded once), so the size decides about time only.
- A lossy all-reduce takes two shots at every size. One shot encodes each contribution and no sum, two shots
  encode the sum as well: chosen by size, a parameter's result would depend on what else is in its bucket.
- The other collectives have one direct algorithm worth taking inside a host: one shot.
- Between hosts lossless collectives, and those that only copy, take the algorithm with the least predicted cost,
  which may add up in another order. Lossy sums choose between the two shots and a hierarchy, which crosses hosts once
  for all ranks of a host: every further hop would encode again. The prediction is made for sizes rounded up to a
  power of two, so that it is seldom made.
- Where `dtcomm tune` has measured a group of as many ranks and hosts with this codec, its times decide ``auto``: the
  choice above stays as long as it is within 5 % of the fastest, and a lossy sum is encoded twice at most.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

from dtcomm import algorithms
from dtcomm.codecs.base import Codec
from dtcomm.planner.cost_model import Table, measured_bytes, predict
from dtcomm.planner.hardware import Topology
from dtcomm.schedule.ir import REDUCING

CHOOSERS = ("auto", "direct")
NEAR = 1.03  # as good as the fastest
MOST_ENCODINGS = 2  # of a lossy sum that times alone decide about
HIERARCHY_GAINS = 1.25  # for which a lossy sum is encoded once more
DEFAULT = Table()


@dataclass(frozen=True, kw_only=True)
class Decision:
    """An algorithm and why it was taken; ``seconds`` holds what each candidate would take, as far as that was asked."""

    algorithm: str
    why: str
    seconds: tuple[tuple[str, float], ...] = ()

    def __str__(self) -> str:
        return f"{self.algorithm}: {self.why}"


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
    """The name of the algorithm to build; any name but "auto" and "direct" is itself, once it is found valid.

    ``numel`` counts the whole tensor, as in ``Schedule.bytes_on_wire``: the input of reduce_scatter, the output of
    all_gather. Raises ValueError that lists the valid names.
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
    """``select`` with its reasons."""
    algorithms.require(algorithm, collective, besides=CHOOSERS)
    if algorithm not in CHOOSERS:
        return Decision(algorithm=algorithm, why="asked for by name")
    lossless = codec.lossless(dtype)
    free = lossless or collective not in REDUCING
    usual = _usual(collective, numel, dtype, codec, ranks, table, lossless)
    if algorithm == "direct" or ranks == 1:
        return usual
    placements = table.placements(collective, codec, ranks, hosts)
    if placements:
        nbytes = measured_bytes(numel, dtype, codec)
        taken = [
            {name: each.seconds(nbytes) for name, each in found.items()}
            for found in (table.measurements(collective, codec, ranks, hosts, one) for one in placements)
        ]
        names = [
            name
            for name in taken[0]
            if all(name in each for each in taken)
            and (free or _encodings(name, collective, ranks, hosts) <= MOST_ENCODINGS * hosts)
        ]
        return _fastest(usual, [{name: each[name] for name in names} for each in taken], table)
    if hosts == 1:
        return usual
    shard = 1 << max(-(-numel // ranks) - 1, 0).bit_length()
    costs = _costs(collective, shard * ranks, dtype, codec, ranks, hosts, table)
    if free:
        name = min(costs, key=lambda each: costs[each])
        return _decided(name, f"least predicted time on {hosts} hosts ({table.source})", costs)
    if "hierarchical" in costs and costs["hierarchical"] * HIERARCHY_GAINS < costs[usual.algorithm]:
        why = f"crosses hosts once for all ranks of a host, predicted over {HIERARCHY_GAINS}x faster"
        return _decided("hierarchical", why, costs)
    return usual


def _usual(
    collective: str, numel: int, dtype: torch.dtype, codec: Codec, ranks: int, table: Table, lossless: bool
) -> Decision:
    if collective != "all_reduce":
        return Decision(algorithm="one_shot", why="the one direct algorithm worth taking")
    if not lossless:
        why = "a lossy sum takes two shots at every size, so that results do not depend on it"
        return Decision(algorithm="two_shot", why=why)
    sent, most = codec.wire_bytes(numel, dtype) * (ranks - 1), table.one_shot_bytes
    if sent <= most:
        return Decision(algorithm="one_shot", why=f"sends {sent} bytes a rank, up to {most} go in one shot")
    return Decision(algorithm="two_shot", why=f"one shot would send {sent} bytes a rank, over {most}")


def _fastest(usual: Decision, taken: list[dict[str, float]], table: Table) -> Decision:
    """Of what was ``taken``, in seconds by algorithm for each placement that was seen: ranks move, and all must decide
    alike, so what is least far behind the fastest where it is furthest.
    """
    if not taken[0]:
        return usual
    behind = {name: max(each[name] / min(each.values()) for each in taken) for name in taken[0]}
    best = min(behind, key=lambda each: behind[each])
    name = usual.algorithm if behind.get(usual.algorithm, math.inf) <= NEAR * behind[best] else best
    near = "" if name == best else f", within {NEAR - 1:.0%} of {best}"
    costs = {one: math.prod(each[one] for each in taken) ** (1 / len(taken)) for one in taken[0]}
    return _decided(name, f"measured {costs[name] * 1e6:.3g} us{near} ({table.source})", costs)


def _decided(name: str, why: str, costs: dict[str, float]) -> Decision:
    return Decision(algorithm=name, why=why, seconds=tuple(sorted(costs.items(), key=lambda item: item[1])))


@functools.lru_cache(maxsize=1024)
def _encodings(name: str, collective: str, ranks: int, hosts: int) -> int:
    groups = Topology.even(ranks, hosts).groups
    return algorithms.build(name, collective, ranks, hosts=groups).requantizations()


@functools.lru_cache(maxsize=1024)
def _costs(
    collective: str, numel: int, dtype: torch.dtype, codec: Codec, ranks: int, hosts: int, table: Table
) -> dict[str, float]:
    topology = Topology.even(ranks, hosts)

    def cost(name: str) -> float:
        schedule = algorithms.build(name, collective, ranks, hosts=topology.groups)
        return predict(schedule, numel, dtype, codec, topology, table)

    return {name: cost(name) for name in algorithms.available(collective)}
