"""Whether a codec makes an all-reduce of a given size faster: what latency paths ask before they compress."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from dtcomm import algorithms, planner
from dtcomm.codecs import Codec, codec
from dtcomm.collectives._arguments import Group
from dtcomm.planner.cost_model import measured_bytes, predict
from dtcomm.planner.topology import Topology
from dtcomm.runtime.communicator_cache import get_communicator

#: Seconds that a codec costs a call whatever its size, inside a host and between hosts: more calls of kernels, more
#: buffers. A gain below this is none.
FIXED = (2e-6, 5e-6)


class Verdict(NamedTuple):
    """``pays``, and the reason in words."""

    pays: bool
    why: str


def compression_pays(spec: str | Codec, numel: int, dtype: torch.dtype, group: Group = None) -> Verdict:
    """Is an all-reduce of so many elements expected to be faster with the codec than with none?

    A pure function of what all ranks know alike (the planner's table, which rank 0 brought, and where the ranks are),
    so that ranks answer alike. Where `dtcomm tune` has measured both, its times decide.
    """
    communicator = get_communicator(group)
    return _compression_pays(
        codec(spec), numel, dtype, communicator.size, communicator.hosts, communicator.tuning_table
    )


@functools.lru_cache(maxsize=4096)
def _compression_pays(
    which: Codec, numel: int, dtype: torch.dtype, ranks: int, hosts: int, text: str
) -> Verdict:
    if ranks == 1 or which.lossless(dtype):
        return Verdict(False, f"{ranks} ranks" if ranks == 1 else f"{which} loses nothing")
    table = planner.parse(text)
    seconds = []
    measured = True
    for each in (codec("none"), which):
        found = table.measurements("all_reduce", each, ranks, hosts)
        if found:
            nbytes = measured_bytes(numel, dtype, each)
            seconds.append(min(one.seconds(nbytes) for one in found.values()))
            continue
        measured = False
        topology = Topology.even(ranks, hosts)
        name = planner.select("all_reduce", numel, dtype, each, ranks, hosts, table)
        schedule = algorithms.build(name, "all_reduce", ranks, hosts=topology.groups)
        seconds.append(predict(schedule, numel, dtype, each, topology, table))
    plain, coded = seconds
    if not measured:
        coded += FIXED[hosts > 1]
    why = (
        f"{which} {coded * 1e6:.3g} us, none {plain * 1e6:.3g} us for {numel} elements "
        f"({'measured' if measured else 'predicted'}, {table.source})"
    )
    return Verdict(coded < plain, why)
