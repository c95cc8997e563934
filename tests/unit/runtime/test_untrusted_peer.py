"""The engine beside a peer that the test plays: what it sends, or writes into shared memory, is not trusted.

Also timeouts, which such a peer can await.
"""

from __future__ import annotations

import mmap
import os
import random
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch

from dtcomm import _C, algorithms
from dtcomm.codecs import codec
from dtcomm.errors import CollectiveMismatch, CollectiveTimeout, DtcommError, PayloadCorrupt, PeerLost
from dtcomm.runtime.native import native_plan
from dtcomm.runtime.types import OpSpec, TensorSpec

BOX, DONE, HEADER, WAITING, FAILURE, CLOSED = range(1, 7)  # csrc/engine/stream_bundle.h
FRAME = struct.Struct("<II5Q")
NONE = 2**64 - 1  # -1 as a word
SLOTS = 8
SLOT_BYTES = 64 * 1024
BOXES = 8
NUMEL = 1000
LONG = 20.0  # seconds: an error that is raised because of a timeout would come too late

# csrc/engine/shm_layout.h: offsets in RegionHeader
WAITING_FOR, FAILURE_RECORD = 128, 192


def frame(kind: int, *words: int, payload: bytes = b"") -> bytes:
    return FRAME.pack(kind, len(payload), *words, *[0] * (5 - len(words))) + payload


class Rank:
    """Rank 0 of two, whose communicator calls one_shot all-reduces."""

    def __init__(self, timeout_s: float, numel: int = NUMEL) -> None:
        self.native = _C.NativeCommunicator(
            rank=0, ranks=2, max_boxes=BOXES, slot_bytes=SLOT_BYTES, timeout_s=timeout_s, yield_us=50.0
        )
        self.tensor = torch.ones(numel)
        spec = OpSpec("all_reduce", "sum", (TensorSpec(numel, torch.float32, codec("none")),), "one_shot")
        schedule = algorithms.build("one_shot", "all_reduce", 2)
        self.plan = native_plan(
            spec, schedule, 0, _C.Variants(piece_bytes=16 * 1024), SLOT_BYTES, BOXES, False
        )

    def attach(self, peer: dict[str, int], sockets: Sequence[int] = ()) -> None:
        own = _C.Address(**self.native.address(), name="rank 0")
        other = _C.Address(**peer, sockets=list(sockets), other_host=bool(sockets), name="rank 1")
        self.native.attach([own, other])

    def all_reduce(self) -> None:
        pointer = self.tensor.data_ptr()
        self.native.run(self.plan, pointer, pointer, 0, 1)

    def submit(self) -> _C.NativeWork:
        return self.native.submit(self.plan, [(self.tensor.data_ptr(), self.tensor.data_ptr(), 0)], 1)


@contextmanager
def rank_behind_socket(timeout_s: float) -> Iterator[tuple[Rank, socket.socket]]:
    near, far = socket.socketpair()
    rank = Rank(timeout_s)
    with closing(rank.native):
        rank.attach(rank.native.address(), [near.detach()])
        with far:
            yield rank, far


IMPOSSIBLE = {
    "waits for a rank far outside": frame(WAITING, 2**30),
    "waits for the rank behind the last": frame(WAITING, 2),
    "done with pieces that no rank can have begun": frame(DONE, SLOTS + 1),
    "done with fewer pieces than before": frame(DONE, 4) + frame(DONE, 2),
    "payload of a piece that no rank can have begun": frame(BOX, SLOTS + 1, 7, 0, 0, 0),
    "payload for a flag behind the last": frame(BOX, 1, 7, (SLOTS * BOXES) << 32, 0, 0),
    "payload that leaves its slot": frame(BOX, 1, 7, 0, 0, SLOT_BYTES - 4, payload=bytes(8)),
    "failure of no kind": frame(FAILURE, 0, 1, payload=b"text"),
    "failure of an unknown kind": frame(FAILURE, 77, 1, payload=b"text"),
    "failure of a rank behind the last": frame(FAILURE, 5, 2, payload=b"text"),
    "description of operation 0": frame(HEADER, 0, 7, payload=b"text"),
    "unknown kind of frame": frame(77),
}


@pytest.mark.parametrize("sent", IMPOSSIBLE.values(), ids=IMPOSSIBLE.keys())
def test_impossible_value_ends_the_connection(sent: bytes) -> None:
    with rank_behind_socket(LONG) as (rank, peer):
        peer.sendall(sent)
        with pytest.raises(PeerLost, match=r"rank 1 is gone: .*\(it sent an invalid frame\)"):
            rank.all_reduce()


def test_values_at_their_limits_are_accepted() -> None:
    with rank_behind_socket(0.05) as (rank, peer):
        peer.sendall(frame(WAITING, NONE) + frame(WAITING, 1) + frame(DONE, SLOTS) + frame(DONE, SLOTS))
        with pytest.raises(CollectiveTimeout, match="waiting for rank 1"):
            rank.all_reduce()


def test_failure_with_unknown_rank_is_passed_on() -> None:
    with rank_behind_socket(LONG) as (rank, peer):
        peer.sendall(frame(FAILURE, 5, NONE, payload=b"broken \xff text"))
        with pytest.raises(DtcommError, match="broken � text"):
            rank.all_reduce()
        assert rank.native.failure == "broken � text"


def receive_until(peer: socket.socket, last: int) -> dict[int, tuple[int, ...]]:
    """The words of the last frame of each kind, up to the first of kind ``last``."""
    received: dict[int, tuple[int, ...]] = {}
    with peer.makefile("rb") as stream:
        while last not in received:
            kind, size, *words = FRAME.unpack(stream.read(FRAME.size))
            stream.read(size)
            received[kind] = tuple(words)
    return received


@pytest.mark.parametrize(("missing", "moved"), [(4, 0), (0, 64), (0, 0)])
def test_payload_must_fill_its_place(missing: int, moved: int) -> None:
    payload = torch.full((NUMEL,), 2.0).numpy().tobytes()
    with rank_behind_socket(LONG) as (rank, peer):
        work = rank.submit()
        seq, operation, flag, first, offset = receive_until(peer, BOX)[BOX]
        sent = payload[: len(payload) - missing]
        peer.sendall(frame(BOX, seq, operation, flag, first, offset + moved, payload=sent))
        if not missing and not moved:
            work.wait()
            assert rank.tensor.eq(3).all()
            return
        with pytest.raises(
            PayloadCorrupt,
            match=rf"what rank 1 sent to rank 0 .*\({len(sent)} bytes at offset {moved} instead of 4000 at 0\)",
        ):
            work.wait()


VALID = [
    frame(WAITING, NONE),
    frame(WAITING, 1),
    frame(DONE, 4),
    frame(HEADER, 1, 7, payload=b"all_reduce"),
    frame(BOX, 1, 7, 0, 0, 0, payload=bytes(4000)),
    frame(FAILURE, 5, 1, payload=b"text"),
    frame(CLOSED),
]


def test_flipped_bits_end_in_an_error_of_the_library() -> None:
    generator = random.Random(1)
    seen = set()
    for _ in range(80):
        sent = bytearray()
        for valid in generator.sample(VALID, 2):
            sent += valid
            sent[len(sent) - len(valid) + generator.randrange(FRAME.size)] ^= 1 << generator.randrange(8)
        with rank_behind_socket(0.01) as (rank, peer):
            peer.sendall(sent)
            with pytest.raises(DtcommError) as raised:
                rank.all_reduce()
            rank.native.peer_snapshots()
            seen.add(raised.type)
    assert {PeerLost, CollectiveTimeout, CollectiveMismatch} <= seen


def test_error_while_sending_ends_the_connection() -> None:
    """The kernel refuses a message that is longer than the buffer of such a socket."""
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    rank = Rank(LONG, numel=4000)
    with closing(rank.native), far:
        rank.attach(rank.native.address(), [near.detach()])
        with pytest.raises(PeerLost, match=r"rank 1 is gone: its connection ended \(Message too long\)"):
            rank.all_reduce()


def test_sockets_behind_a_peer_that_cannot_be_attached_are_closed(tmp_path: Path) -> None:
    native = _C.NativeCommunicator(
        rank=0, ranks=3, max_boxes=BOXES, slot_bytes=SLOT_BYTES, timeout_s=LONG, yield_us=50.0
    )
    no_socket = os.open(tmp_path / "file", os.O_CREAT | os.O_RDWR)
    near, far = socket.socketpair()
    connections = [[], [no_socket], [near.detach()]]
    with closing(native), far:
        with pytest.raises(OSError, match="epoll_ctl"):
            native.attach([_C.Address(**native.address(), sockets=fds) for fds in connections])
        far.settimeout(LONG)
        assert far.recv(1) == b"", "the other end was closed"


@pytest.mark.parametrize("timeout_s", [1e11, float("inf")])
@pytest.mark.parametrize("later", [False, True])
def test_very_long_timeout_is_not_short(timeout_s: float, later: bool) -> None:
    with rank_behind_socket(0.01 if later else timeout_s) as (rank, peer):
        if later:
            rank.native.set_timeout(timeout_s)
        work = rank.submit()
        box = receive_until(peer, WAITING)[BOX]  # it sends whom it waits for before it looks at the deadline
        peer.sendall(frame(BOX, *box, payload=bytes(4 * NUMEL)))
        work.wait()


@pytest.mark.parametrize("timeout_s", [-1.0, -1e-9, float("nan")])
def test_negative_timeout_is_refused(timeout_s: float) -> None:
    with pytest.raises(ValueError, match="timeout_s: must be at least 0 seconds"):
        Rank(timeout_s)
    with (
        closing(Rank(1.0).native) as native,
        pytest.raises(ValueError, match=r"^seconds: must be at least 0"),
    ):
        native.set_timeout(timeout_s)


@contextmanager
def rank_beside_memory(timeout_s: float) -> Iterator[tuple[Rank, mmap.mmap]]:
    """Rank 0, and what rank 1 shares with it."""
    rank = Rank(timeout_s)
    peer = _C.NativeCommunicator(
        rank=1, ranks=2, max_boxes=BOXES, slot_bytes=SLOT_BYTES, timeout_s=timeout_s, yield_us=50.0
    )
    with closing(rank.native), closing(peer):
        rank.attach(peer.address())
        descriptor = os.open(f"/proc/self/fd/{peer.address()['region_fd']}", os.O_RDWR)
        with mmap.mmap(descriptor, mmap.PAGESIZE) as memory:
            os.close(descriptor)
            yield rank, memory


@pytest.mark.parametrize("awaited", [2, 2**30, -(2**31)])
def test_impossible_rank_in_shared_memory_counts_as_none(awaited: int) -> None:
    with rank_beside_memory(0.05) as (rank, memory):
        struct.pack_into("<iIQ", memory, WAITING_FOR, awaited, 0, 2**62)
        assert rank.native.peer_snapshots()[1]["waiting_for"] == -1
        with pytest.raises(CollectiveTimeout, match="waiting for rank 1, which is alive"):
            rank.all_reduce()


def test_impossible_failure_in_shared_memory_is_an_error_of_the_library() -> None:
    with rank_beside_memory(LONG) as (rank, memory):
        struct.pack_into("<IIi372s", memory, FAILURE_RECORD, 2, 77, 2**30, b"\xff" * 372)
        with pytest.raises(DtcommError, match=r"^�{372}$"):
            rank.all_reduce()
