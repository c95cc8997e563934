"""Predicts whether a codec makes an all_reduce of a given size faster, for paths where latency decides."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from dtcomm import algorithms
from dtcomm.codecs.base import Codec
from dtcomm.codecs.spec import codec
from dtcomm.planner.cost_model import measured_bytes, parse, predict
from dtcomm.planner.hardware import Topology
from dtcomm.planner.select_algorithm import select

#: Seconds that a codec adds to a call whatever its size, inside a host and between hosts: more kernel calls, more
#: buffers. A smaller predicted gain does not count.
FIXED_OVERHEAD = (2e-6, 5e-6)


class PayoffVerdict(NamedTuple):
    """Whether compression ``pays``, and the reason in words."""

    pays: bool
    why: str


@functools.lru_cache(maxsize=4096)
def compression_pays(
    lossy: Codec, numel: int, dtype: torch.dtype, ranks: int, hosts: int, tuning_table: str
) -> PayoffVerdict:
    """Return whether an all_reduce is expected to be faster with the codec ``lossy`` than with none.

    If `dtcomm tune` has measured both, its times decide; otherwise the cost model predicts them.

    Args:
        lossy: The codec.
        numel: The elements of the tensor.
        dtype: The dtype of the tensor.
        ranks: The number of ranks.
        hosts: The number of hosts.
        tuning_table: The text of the group's tuning table, as rank 0 read it; empty for the defaults.

    Example:
        >>> import torch
        >>> from dtcomm import codec, planner
        >>> planner.compression_pays(codec("int8"), 1 << 20, torch.float32, ranks=2, hosts=2, tuning_table="").pays
        True
    """
    if ranks == 1 or lossy.lossless(dtype):
        return PayoffVerdict(False, f"{ranks} ranks" if ranks == 1 else f"{lossy} loses nothing")
    table = parse(tuning_table)
    seconds = []
    measured = True
    for candidate in (codec("none"), lossy):
        measurements = table.measurements("all_reduce", candidate, ranks, hosts)
        if measurements:
            nbytes = measured_bytes(numel, dtype, candidate)
            seconds.append(min(algorithm.seconds(nbytes) for algorithm in measurements.values()))
            continue
        measured = False
        topology = Topology.even(ranks, hosts)
        name = select("all_reduce", numel, dtype, candidate, ranks, hosts, table)
        schedule = algorithms.build(name, "all_reduce", ranks, hosts=topology.groups)
        seconds.append(predict(schedule, numel, dtype, candidate, topology, table))
    uncompressed, compressed = seconds
    if not measured:
        compressed += FIXED_OVERHEAD[hosts > 1]
    why = (
        f"{lossy} {compressed * 1e6:.3g} us, none {uncompressed * 1e6:.3g} us for {numel} elements "
        f"({'measured' if measured else 'predicted'}, {table.source})"
    )
    return PayoffVerdict(compressed < uncompressed, why)
