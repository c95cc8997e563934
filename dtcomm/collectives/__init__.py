"""Collectives with a codec: the calls of torch.distributed, in fewer bytes.

Every function checks its arguments before anything starts, so that a call that raises ValueError or TypeError
leaves the communicator as it was. All ranks end with bit-identical results, for every codec and algorithm.

Common arguments: ``codec`` is a spec string or a Codec (``"none/int4"``, with a hierarchical algorithm: none inside
the hosts, int4 between them); ``algorithm`` a name, "direct" or "auto"; ``group`` a
process group or None for the default one; ``seed`` keys stochastic rounding (None: the call's number);
``residual`` an fp32 tensor like the input, which holds what earlier encodings lost: it is added to this
rank's contribution and rewritten with what this call loses (error feedback). ``checksum`` True sends every
payload with its CRC32C, which the receiver computes anew (None: as DTCOMM_CHECKSUM says); it is the same on all
ranks. With ``async_op=True`` a ``Work`` is returned and the tensors must not be touched until it is done;
otherwise the call returns None when the result is there.

Raised by all: TypeError and ValueError naming the argument; CollectiveMismatch, CollectiveTimeout, PeerLost,
PayloadCorrupt.
"""

from __future__ import annotations

from dtcomm.collectives.alltoall import all_to_all
from dtcomm.collectives.coalesced import all_gather_coalesced, all_reduce_coalesced, reduce_scatter_coalesced
from dtcomm.collectives.custom_schedule import run
from dtcomm.collectives.gather_ops import all_gather, broadcast, gather, scatter
from dtcomm.collectives.group_ops import barrier, empty, flight_record, info
from dtcomm.collectives.p2p import recv, send
from dtcomm.collectives.reduce_ops import all_reduce, reduce, reduce_scatter
from dtcomm.runtime.communicator_cache import release
from dtcomm.runtime.phase_timer import Span
from dtcomm.runtime.work import Work

__all__ = [
    "Span",
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
]
