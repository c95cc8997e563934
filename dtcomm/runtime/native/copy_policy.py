"""Which copies the native engine makes, and how large the pieces are that it copies.

Normally a sender copies into a slot of shared memory and the receiver out of it, piece by piece. With *zero copy* peers
work on the callers' tensors themselves, if all of them were made by :func:`empty_shared`. With *single copy* receivers
copy out of the sender's own memory by ``process_vm_readv``. This module decides what a plan may use; for a call whose
tensors are not shared the engine falls back to slots. ``native.runtime`` and ``bootstrap.cpu`` call it.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from dtcomm import _C, env
from dtcomm.runtime.emulated_link import Link
from dtcomm.runtime.types import OpSpec
from dtcomm.schedule.ir import CUT_AT_GRANULES, REDUCING

SLOT_BYTES = 512 * 1024
MAX_SLOT_BYTES = 8 * 2**20
# Sockets need more bytes under way: a peer whose core is busy otherwise answers milliseconds later.
SOCKET_SLOT_BYTES = 2 * 2**20
MIN_ZERO_COPY_BYTES = 128 * 1024  # of a tensor that is only copied: the sender has to wait for the receivers
# The kernel copies huge pages at up to 28 GB/s, those of 4 KiB at 13. Below this size the system call takes longer
# than to stage the tensor and copy it again.
MIN_SINGLE_COPY_BYTES = 4 * 2**20
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def can_use_zero_copy(spec: OpSpec, min_bytes: int = 0) -> bool:
    """Whether peers may work on the callers' tensors; tensors that are only copied need ``min_bytes`` bytes."""
    if len(spec.parts) != 1 or spec.checksum or spec.parts[0].codec.name != "none":
        return False
    if spec.collective == "all_reduce":
        return spec.algorithm == "two_shot"
    if spec.collective in ("reduce_scatter", "all_gather"):
        return spec.algorithm == "one_shot"
    return spec.algorithm in ("one_shot", "send") and spec.nbytes >= min_bytes


def can_use_single_copy(spec: OpSpec) -> bool:
    """Whether receivers may copy out of the sender's memory: the operation passes tensors on unchanged."""
    return spec.collective not in REDUCING and can_use_zero_copy(spec)


def pays_single_copy(spec: OpSpec) -> bool:
    """Whether an operation that can use single copy should, or DTCOMM_SINGLE_COPY=on asks for it."""
    least = 0 if env.get("DTCOMM_SINGLE_COPY") == "on" else MIN_SINGLE_COPY_BYTES
    return can_use_single_copy(spec) and spec.nbytes >= least


def why_no_single_copy(
    native: _C.NativeCommunicator, transport: str, emulates_link: bool, shares_cores: bool
) -> str:
    """Why single copy is not possible or does not pay between this rank and its peers; empty if it is used.

    Args:
        native: The engine, attached to its peers.
        transport: How the ranks reach each other: "memory", "sockets" or both.
        emulates_link: Whether DTCOMM_LINK emulates a link inside the host, which single copy would not go over.
        shares_cores: Whether ranks share cores.
    """
    variable = env.get("DTCOMM_SINGLE_COPY")
    if variable == "off":
        return "DTCOMM_SINGLE_COPY=off"
    if emulates_link:
        return "a link is emulated"
    if transport != "memory":
        return "not all ranks share memory"
    error = native.single_copy_error()
    if error or variable != "auto":
        return error
    if not shares_cores:
        return "every rank has a core, and two copies on two cores take less time than one by the kernel"
    if not _has_huge_pages():
        return (
            "tensors lie in small pages, which take longer to read than to stage; see THP_MEM_ALLOC_ENABLE=1"
        )
    return ""


def empty_shared(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """A tensor in memory that peers can map; the memory is released with the tensor's storage."""
    numel = shape.numel()
    if numel == 0:
        return torch.empty(shape, dtype=dtype)
    memory = _C.SharedTensorMemory(numel * dtype.itemsize)
    return torch.frombuffer(memory, dtype=dtype, count=numel).view(shape)


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


def _has_huge_pages() -> bool:
    """Whether the kernel gives huge pages to torch's large tensors."""
    try:
        setting = HUGE_PAGES.read_text()
    except OSError:
        return False
    return "[always]" in setting or (
        "[madvise]" in setting and os.environ.get("THP_MEM_ALLOC_ENABLE", "0") == "1"
    )
