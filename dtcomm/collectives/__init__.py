"""Collectives with a codec: the calls of torch.distributed, in fewer bytes.

Users call these functions as ``dtcomm.all_reduce`` and so on. Every function checks its arguments before anything
starts, so a call that raises ValueError or TypeError leaves the communicator unchanged. All ranks end with
bit-identical results, with every codec and algorithm.

The public functions are in `reduce_ops`, `gather_ops`, `alltoall`, `p2p`, `coalesced`, `persistent`, `custom_schedule`
and `group_ops`. `_arguments` checks arguments, `_dispatch` makes and starts plans, and `_multi_stage` implements codecs
whose ranks agree on a representation before they add.
"""

from __future__ import annotations

from dtcomm.collectives._arguments import Algorithm
from dtcomm.collectives.alltoall import all_to_all
from dtcomm.collectives.coalesced import all_gather_coalesced, all_reduce_coalesced, reduce_scatter_coalesced
from dtcomm.collectives.custom_schedule import run
from dtcomm.collectives.gather_ops import all_gather, broadcast, gather, scatter
from dtcomm.collectives.group_ops import barrier, empty, flight_record, info
from dtcomm.collectives.p2p import recv, send, sendrecv
from dtcomm.collectives.persistent import (
    PersistentOperation,
    all_gather_init,
    all_reduce_init,
    all_to_all_init,
    broadcast_init,
    reduce_scatter_init,
)
from dtcomm.collectives.reduce_ops import all_reduce, reduce, reduce_scatter
from dtcomm.runtime.communicator_cache import release
from dtcomm.work import Work

__all__ = [
    "Algorithm",
    "PersistentOperation",
    "Work",
    "all_gather",
    "all_gather_coalesced",
    "all_gather_init",
    "all_reduce",
    "all_reduce_coalesced",
    "all_reduce_init",
    "all_to_all",
    "all_to_all_init",
    "barrier",
    "broadcast",
    "broadcast_init",
    "empty",
    "flight_record",
    "gather",
    "info",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_coalesced",
    "reduce_scatter_init",
    "release",
    "run",
    "scatter",
    "send",
    "sendrecv",
]
