"""Sizes of pieces and slots: how much of a tensor the native engine moves at a time."""

from __future__ import annotations

from dtcomm import env
from dtcomm.runtime.emulated_link import Link
from dtcomm.runtime.types import OpSpec
from dtcomm.schedule.ir import CUT_AT_GRANULES

SLOT_BYTES = 512 * 1024
MAX_SLOT_BYTES = 8 * 2**20
# Sockets need more bytes under way: a peer whose core is busy otherwise answers milliseconds later.
SOCKET_SLOT_BYTES = 2 * 2**20


def piece_bytes(spec: OpSpec, ranks: int) -> int:
    """Bytes of input in one piece over shared memory: all of a small message, cache-sized parts of a large one."""
    chosen = int(env.get("DTCOMM_PIECE_KIB"))
    if chosen:
        return chosen * 1024
    total = spec.nbytes
    if spec.algorithm == "send":
        # In one direction the copy in and the copy out overlap but for the first and the last piece.
        return min(max(total // 8, 64 * 1024), 256 * 1024)
    if spec.collective not in CUT_AT_GRANULES:
        total *= ranks
    return 512 * 1024 if total <= 4 * 2**20 else 256 * 1024


def socket_piece_bytes(spec: OpSpec, ranks: int) -> int:
    """Bytes of input in one piece over sockets, unless DTCOMM_PIECE_KIB is set.

    There are enough pieces to overlap, and few enough that a peer whose core is busy does not hold up the link.
    """
    total = spec.nbytes
    if spec.collective not in CUT_AT_GRANULES:
        total *= ranks
    return min(max(total // 64, SLOT_BYTES), SOCKET_SLOT_BYTES)


def link_slot_bytes(link: Link) -> int:
    """Bytes of a slot over an emulated link: the pieces under way at once fill the link for a round trip."""
    slot = SLOT_BYTES
    while slot < MAX_SLOT_BYTES and slot * link.ns_per_byte < 2 * link.latency_ns:
        slot *= 2
    return slot
