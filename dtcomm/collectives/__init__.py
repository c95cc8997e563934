"""Collectives with a codec: the calls of torch.distributed, in fewer bytes.

Users call these functions as ``dtcomm.all_reduce`` and so on. Every function checks its arguments before anything
starts, so a call that raises ValueError or TypeError leaves the communicator unchanged. All ranks end with
bit-identical results, with every codec and algorithm.

The public functions are in `reduce_ops`, `gather_ops`, `p2p`, `coalesced`, `custom_schedule` and `groups`;
`_options` has what they share. Every call takes the path of `_call`; `planning` makes the plans of operations, and
`_multi_stage` those of codecs whose ranks agree on a representation before they add. Above that path are sparse
tensors (`sparse`) and codecs whose payloads vary in length (`_encoded`). ``__init__.pyi`` has the overloads.
"""

from __future__ import annotations

from dtcomm.collectives._options import Algorithm
from dtcomm.collectives.coalesced import all_gather_coalesced, all_reduce_coalesced, reduce_scatter_coalesced
from dtcomm.collectives.custom_schedule import run
from dtcomm.collectives.gather_ops import all_gather, all_to_all, broadcast, gather, scatter
from dtcomm.collectives.groups import barrier, empty, flight_record, info
from dtcomm.collectives.p2p import recv, send, sendrecv
from dtcomm.collectives.reduce_ops import all_reduce, reduce, reduce_scatter
from dtcomm.runtime.communicator import release
from dtcomm.work import Work

__all__ = [
    "Algorithm",
    "Work",
    "all_gather",
    "all_gather_coalesced",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "barrier",
    "broadcast",
    "empty",
    "flight_record",
    "gather",
    "info",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_coalesced",
    "release",
    "run",
    "scatter",
    "send",
    "sendrecv",
]
