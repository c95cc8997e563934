"""How much of a tensor is moved at a time, and what need not be moved twice."""

from __future__ import annotations

from dtcomm import env
from dtcomm.runtime.types import OpSpec
from dtcomm.schedule.ir import CUT_AT_GRANULES, REDUCING

SLOT_BYTES = 512 * 1024
# Through sockets more has to be under way: a peer whose core is busy otherwise answers milliseconds later.
MESSAGE_SLOT_BYTES = 2 * 2**20


def piece_bytes(spec: OpSpec, ranks: int) -> int:
    """Bytes of input that one piece takes: all of a small message, cache-sized parts of a large one."""
    chosen = int(env.get("DTCOMM_PIECE_KIB"))
    if chosen:
        return chosen * 1024
    total = tensor_bytes(spec)
    if (
        spec.algorithm == "send"
    ):  # one way: the copy in and the copy out overlap but for the first and last piece
        return min(max(total // 8, 64 * 1024), 256 * 1024)
    if spec.collective not in CUT_AT_GRANULES:
        total *= ranks
    return 512 * 1024 if total <= 4 * 2**20 else 256 * 1024


def message_piece(spec: OpSpec, ranks: int) -> int:
    """Bytes of input that a piece takes where its messages go through sockets: enough of them to overlap, few enough
    that a peer whose core is busy otherwise does not hold up the link.
    """
    whole = tensor_bytes(spec)
    if spec.collective not in CUT_AT_GRANULES:
        whole *= ranks
    return min(max(whole // 64, SLOT_BYTES), MESSAGE_SLOT_BYTES)


def tensor_bytes(spec: OpSpec) -> int:
    """Bytes of all parts of the input."""
    return sum(part.numel * part.dtype.itemsize for part in spec.parts)


def may_be_pulled(spec: OpSpec) -> bool:
    """Whether receivers could copy from the senders' own memory: what is handed on as it is, by those who have it."""
    return spec.collective not in REDUCING and is_direct(spec)


def is_direct(spec: OpSpec, least: int = 0) -> bool:
    """Whether peers may work on the caller's tensor itself, if all of them lie in shared memory.

    Tensors that are only copied are worked on from ``least`` bytes: who gives one has to wait for those who take it,
    which pays where the copy that it saves is a large one.
    """
    if len(spec.parts) != 1 or spec.checksum or spec.parts[0].codec.name != "none":
        return False
    if spec.collective == "all_reduce":
        return spec.algorithm == "two_shot"
    if spec.collective in ("reduce_scatter", "all_gather"):
        return spec.algorithm == "one_shot"
    return spec.algorithm in ("one_shot", "send") and tensor_bytes(spec) >= least
