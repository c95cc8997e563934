"""Which algorithm ``algorithm="auto"`` and ``"direct"`` mean.

The choice is a pure function of what all ranks know alike, so that they choose alike without talking.

- Inside one host the direct algorithms win: memory is shared, and a step costs a cache line's round trip. A
  lossless all-reduce takes one shot while that is small and two shots above; both give the same bits (one
  fp32 sum in rank order, rounded once), so the size decides about time only.
- A lossy all-reduce takes two shots at every size. One shot encodes each contribution and no sum, two shots
  encode the sum as well: chosen by size, a parameter's result would depend on what else is in its bucket.
- The other collectives have one direct algorithm worth taking inside a host: one shot.
- Between hosts lossless collectives, and those that only copy, take the algorithm with the least predicted cost,
  which may add up in another order; lossy sums stay with the direct algorithms, for the reason above and because
  every further hop encodes again. The prediction is made for sizes rounded up to a power of two, so that it is
  seldom made.
"""

from __future__ import annotations

import functools

import torch

from dtcomm import algorithms
from dtcomm.codecs.base import Codec
from dtcomm.planner.cost import Table, predict
from dtcomm.planner.topology import Topology
from dtcomm.schedule.ir import REDUCING

CHOOSERS = ("auto", "direct")
DEFAULT = Table()


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
    algorithms.require(algorithm, collective, besides=CHOOSERS)
    if algorithm not in CHOOSERS:
        return algorithm
    lossless = codec.lossless(dtype)
    if algorithm == "auto" and hosts > 1 and (lossless or collective not in REDUCING):
        shard = 1 << max(-(-numel // ranks) - 1, 0).bit_length()
        return _cheapest(collective, shard * ranks, dtype, codec, ranks, hosts, table)
    if collective != "all_reduce":
        return "one_shot"
    sent = codec.wire_bytes(numel, dtype) * (ranks - 1)
    return "one_shot" if lossless and sent <= table.one_shot_bytes else "two_shot"


@functools.lru_cache(maxsize=1024)
def _cheapest(
    collective: str, numel: int, dtype: torch.dtype, codec: Codec, ranks: int, hosts: int, table: Table
) -> str:
    topology = Topology.even(ranks, hosts)

    def cost(name: str) -> float:
        schedule = algorithms.build(name, collective, ranks, hosts=topology.groups)
        return predict(schedule, numel, dtype, codec, topology, table)

    return min(algorithms.available(collective), key=cost)
