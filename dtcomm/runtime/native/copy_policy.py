"""Which copies the native engine makes, how large the pieces are, and with how many threads a rank works.

Normally a sender copies into a slot of shared memory and the receiver out of it, piece by piece. With *zero copy* peers
work on the callers' tensors themselves, if all of them were made by :func:`empty_shared`. With *single copy* receivers
copy out of the sender's own memory by ``process_vm_readv``. This module decides what a plan may use; for a call whose
tensors are not shared the engine falls back to slots. ``native`` and ``bootstrap.cpu`` call it.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from pathlib import Path

import torch

from dtcomm import _C, env
from dtcomm._C import Variants
from dtcomm.runtime.emulated_link import Link
from dtcomm.runtime.types import GEOMETRY, OpSpec
from dtcomm.schedule.ir import CUT_AT_GRANULES, REDUCING
from dtcomm.system import allowed_cores

CPU_QUOTA = Path("/sys/fs/cgroup/cpu.max")
SLOT_BYTES = 512 * 1024  # of a rank with one thread
MAX_SLOT_SCALE = 4  # slots of ranks with several threads are so many times as large at most
SLOTS = 8  # of the engine: so many pieces of a message are sent before its receiver has come
PAGE = 4096
MAX_SLOT_BYTES = 8 * 2**20
# Sockets need more bytes under way: a peer whose core is busy otherwise answers milliseconds later.
SOCKET_SLOT_BYTES = 2 * 2**20
MIN_ZERO_COPY_BYTES = 128 * 1024  # of a tensor that is only copied: the sender has to wait for the receivers
MIN_OFFERED_BYTES = 32 * 1024  # smaller messages are sent before a receiver could have answered an offer
MIN_TRIED_BYTES = 4096  # smaller operations take as long as it takes to signal
MIN_PIECE_BYTES = 16 * 1024
MAX_ONE_SHOT_BYTES = 2**20  # above, sending everything to every rank does not pay
PIECE_SIZES = 4  # that are tried
# Large results that all ranks write at once do not stay in the last-level cache. Only where trials begin.
STREAMED_OUTPUT_BYTES = 16 * 2**20
MIN_STREAMED_OUTPUT_BYTES = 2**20  # from here on it is tried
WHOLE, SCATTER, GATHER, EXCHANGE = range(4)  # the values of GEOMETRY
# Sharing out work takes about a microsecond, and waking a thread that sleeps takes several.
PARALLEL_BYTES = 2**20  # from here on trials begin with several threads
MIN_PARALLEL_BYTES = 128 * 1024  # from here on they are tried
MIN_PIECES = 16  # of a large message, so that most of the copies of different pieces overlap


def slot_bytes(threads: int) -> int:
    """Bytes of a slot of ranks with ``threads`` threads: each thread works on a part of a piece."""
    scale = 1
    while 2 * scale <= min(threads, MAX_SLOT_SCALE):
        scale *= 2
    return SLOT_BYTES * scale


def variants(spec: OpSpec, ranks: int, single_copy: bool, trials: bool, threads: int = 1) -> Variants:
    """The ways in which ranks that share memory may carry out an operation.

    ``single_copy``: all ranks may copy out of each other's memory. ``trials``: the engine may try variants. ``threads``
    are those that each rank may use; equal on all ranks.
    """
    input_bytes, output_bytes = _bytes_of_tensors(spec, ranks)
    # Where the result takes the input's place, its memory has just been read.
    touched = output_bytes if GEOMETRY[spec.collective] == WHOLE else input_bytes + output_bytes
    staging, copies = env.get("DTCOMM_STAGING"), env.get("DTCOMM_SINGLE_COPY")
    single_copy = single_copy and can_use_single_copy(spec)
    piece = piece_bytes(spec, ranks, threads)
    may_parallel = threads > 1 and touched >= MIN_PARALLEL_BYTES
    chooses_threads = env.get("DTCOMM_THREADS") == "0"
    result = Variants(
        piece_bytes=piece,
        single_copy=single_copy and copies == "on",
        stream_payload=staging == "streaming",
        stream_output=touched >= STREAMED_OUTPUT_BYTES,
        threads=threads,
        parallel=may_parallel and (touched >= PARALLEL_BYTES or not chooses_threads),
        offers=spec.algorithm == "send",
    )
    if not trials or spec.nbytes < MIN_TRIED_BYTES:
        return result
    codecs = {str(part.codec) for part in spec.parts}
    dtypes = {str(part.dtype).removeprefix("torch.") for part in spec.parts}
    result.tries_alternative = spec.alternative is not None and spec.nbytes <= MAX_ONE_SHOT_BYTES
    result.size_class = " ".join(
        (
            spec.collective if spec.algorithm != "send" else "send",
            "direct" if result.tries_alternative else spec.algorithm,
            "+".join(sorted(codecs)),
            "+".join(sorted(dtypes)),
            f"2^{spec.nbytes.bit_length() - 1} bytes",
        )
    )
    result.piece_sizes = _piece_sizes(spec, ranks, piece, slot_bytes(threads))
    small_message = result.offers and spec.nbytes < MIN_OFFERED_BYTES
    result.tries_single_copy = single_copy and copies == "auto" and not small_message
    result.tries_stream_payload = staging == "auto"
    result.tries_stream_output = touched >= MIN_STREAMED_OUTPUT_BYTES
    result.tries_parallel = may_parallel and chooses_threads
    return result


def _bytes_of_tensors(spec: OpSpec, ranks: int) -> tuple[int, int]:
    geometry = GEOMETRY[spec.collective]
    sharded_input, sharded_output = geometry in (SCATTER, EXCHANGE), geometry in (GATHER, EXCHANGE)
    return spec.nbytes * (ranks if sharded_input else 1), spec.nbytes * (ranks if sharded_output else 1)


def _bytes_of_all_chunks(spec: OpSpec, ranks: int) -> int:
    return spec.nbytes * (1 if spec.collective in CUT_AT_GRANULES else ranks)


def _piece_sizes(spec: OpSpec, ranks: int, piece: int, largest: int) -> list[int]:
    if env.get("DTCOMM_PIECE_KIB") != "0":
        return [piece]
    total = _bytes_of_all_chunks(spec, ranks)
    sizes = {piece}
    size = largest
    while size >= MIN_PIECE_BYTES and len(sizes) < PIECE_SIZES:
        # A piece may not be so small that the message no longer fits into the slots: its sender would have to wait.
        fits = spec.algorithm != "send" or size * SLOTS >= total or piece * SLOTS < total
        if size <= 1 << (total.bit_length() - 1) and fits:
            sizes.add(size)
        size //= 2
    return sorted(sizes)


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


def why_no_single_copy(native: _C.NativeCommunicator, transport: str, emulates_link: bool) -> str:
    """Why single copy is not possible between this rank and its attached peers; empty if it is.

    ``emulates_link``: DTCOMM_EMULATE_LINK emulates a link inside the host, which single copy would not go over.
    """
    if env.get("DTCOMM_SINGLE_COPY") == "off":
        return "DTCOMM_SINGLE_COPY=off"
    if emulates_link:
        return "a link is emulated"
    if transport != "memory":
        return "not all ranks share memory"
    return native.single_copy_error()


def why_no_trials(transport: str, emulates_link: bool) -> str:
    """Why the engine does not try variants of operations; empty if it does."""
    if env.get("DTCOMM_TRIALS") == "never":
        return "DTCOMM_TRIALS=never"
    if emulates_link:
        return "a link is emulated"
    return "" if transport == "memory" else "not all ranks share memory"


def empty_shared(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """A tensor in memory that peers can map; the memory is released with the tensor's storage."""
    numel = shape.numel()
    if numel == 0:
        return torch.empty(shape, dtype=dtype)
    memory = _C.SharedTensorMemory(numel * dtype.itemsize)
    return torch.frombuffer(memory, dtype=dtype, count=numel).view(shape)


def piece_bytes(spec: OpSpec, ranks: int, threads: int = 1) -> int:
    """Bytes of input in one piece over shared memory: all of a small message, cache-sized parts of a large one."""
    chosen = int(env.get("DTCOMM_PIECE_KIB"))
    if chosen:
        return chosen * 1024
    if spec.algorithm == "send":
        # In one direction the copy in and the copy out overlap but for the first and the last piece. Whole pages, so
        # that the engine does not round a piece down to the granule of a codec and needs a slot more.
        eighth = -(-spec.nbytes // (SLOTS * PAGE)) * PAGE
        return min(max(eighth, 64 * 1024), 256 * 1024)
    total = _bytes_of_all_chunks(spec, ranks)
    if total <= 4 * 2**20:
        return SLOT_BYTES
    largest = slot_bytes(threads) // 2
    while largest > SLOT_BYTES // 2 and largest * MIN_PIECES > total:
        largest //= 2
    return largest


def socket_piece_bytes(spec: OpSpec, ranks: int) -> int:
    """Bytes of input in one piece over sockets, unless DTCOMM_PIECE_KIB is set.

    There are enough pieces to overlap, and few enough that a peer whose core is busy does not hold up the link.
    """
    return min(max(_bytes_of_all_chunks(spec, ranks) // 64, SLOT_BYTES), SOCKET_SLOT_BYTES)


def wide_area_piece_bytes(spec: OpSpec, ranks: int, slot_bytes: int) -> int:
    """Bytes of input in one piece over long links, unless DTCOMM_PIECE_KIB is set.

    Over a long link what counts is that the pieces in all slots are under way at once.
    """
    return min(max(_bytes_of_all_chunks(spec, ranks) // SLOTS, SLOT_BYTES), slot_bytes)


def link_slot_bytes(link: Link) -> int:
    """Bytes of a slot over an emulated link: the pieces under way at once fill the link for a round trip."""
    slot = SLOT_BYTES
    while slot < MAX_SLOT_BYTES and slot * link.ns_per_byte < 2 * link.latency_ns:
        slot *= 2
    return slot


def usable_cores() -> int:
    """Return the cores this process may use, from its affinity and the container's CPU quota."""
    cores = len(allowed_cores())
    try:
        quota, period = CPU_QUOTA.read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, round(int(quota) / int(period))))


def local_ranks(ranks: int, world_size: int) -> int:
    """Return how many ranks this host has at least, as far as a rank of a job of ``world_size`` knows it by itself."""
    value = os.environ.get("LOCAL_WORLD_SIZE", "")
    if value.isdecimal():
        return int(value)
    return world_size if ranks < world_size else 1


def cores_per_rank(affinities: Sequence[Collection[int]], ranks: int, machine: int) -> float:
    """Return how many cores a rank of a host has for itself; less than 1 where ranks take turns.

    The ranks of a communicator do not know where the others of the host may run. Where their own cores overlap, the
    others are assumed to run on the same ones, and where they do not, to have cores of their own.

    Args:
        affinities: The cores that each rank of the communicator on this host may run on.
        ranks: All ranks of the host, also those of other communicators.
        machine: All cores of the host.
    """
    cores = len(set[int]().union(*affinities))
    overlap = sum(map(len, affinities)) > cores
    return min(cores / (max(ranks, len(affinities)) if overlap else len(affinities)), machine / ranks)


def threads_per_rank(affinities: Sequence[Collection[int]], usable: int, ranks: int) -> int:
    """Return with how many threads a rank of a host works.

    Args:
        affinities, ranks: As in `cores_per_rank`.
        usable: The cores that they may use together, as far as a CPU quota limits them.
    """
    chosen = int(env.get("DTCOMM_THREADS"))
    if chosen:
        return chosen
    cores = min(usable, len(set[int]().union(*affinities)))
    return max(1, min(cores // ranks, *map(len, affinities)))
