"""Payloads that go in parts over several connections, of which some end in the middle of a message."""

from __future__ import annotations

import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import pytest
import torch

from dtcomm import _C, algorithms
from dtcomm.codecs import codec
from dtcomm.errors import CollectiveTimeout, DtcommError, PeerLost
from dtcomm.runtime.native import native_plan
from dtcomm.runtime.types import OpSpec, TensorSpec

BOX, PART, DONE = 1, 8, 2  # csrc/engine/stream_bundle.h
FRAME = struct.Struct("<II5Q")
SLOT_BYTES = 2 * 2**20
BOXES = 8
SOCKETS = 4  # of which three carry payloads
NUMEL = 1_500_000


def make(rank: int, timeout_s: float = 20.0, wide_area: bool = False) -> _C.NativeCommunicator:
    return _C.NativeCommunicator(
        rank=rank,
        ranks=2,
        max_boxes=BOXES,
        slot_bytes=SLOT_BYTES,
        timeout_s=timeout_s,
        yield_us=50.0,
        wide_area=wide_area,
    )


def plan(rank: int, numel: int, piece_bytes: int = SLOT_BYTES) -> _C.NativePlan:
    spec = OpSpec("all_reduce", "sum", (TensorSpec(numel, torch.float32, codec("none")),), "two_shot")
    schedule = algorithms.build("two_shot", "all_reduce", 2)
    return native_plan(spec, schedule, rank, _C.Variants(piece_bytes=piece_bytes), SLOT_BYTES, BOXES, False)


def attach(native: _C.NativeCommunicator, rank: int, fds: list[int]) -> None:
    own = _C.Address(**native.address(), name=f"rank {rank}")
    other = _C.Address(**native.address(), sockets=fds, other_host=True, name=f"rank {1 - rank}")
    native.attach([own, other] if rank == 0 else [other, own])


class Relay:
    """Passes bytes on between two ends of a connection, in both directions, until ``limit`` bytes have passed one way.

    Then it closes both ends, so that bytes on the way are lost.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.outer, inner = zip(*(socket.socketpair() for _ in range(2)), strict=True)
        self.passed = [0, 0]
        self.inner = inner
        self.cut = threading.Event()
        for end in (*self.outer, *inner):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 32 * 1024)
        self.threads = [threading.Thread(target=self._pass, args=(way,)) for way in range(2)]
        for thread in self.threads:
            thread.start()

    def _pass(self, way: int) -> None:
        source, target = self.inner[way], self.inner[1 - way]
        try:
            while data := source.recv(16 * 1024):
                if self.limit is not None and self.passed[way] + len(data) > self.limit:
                    target.sendall(data[: self.limit - self.passed[way]])
                    self.cut.set()
                    break
                target.sendall(data)
                self.passed[way] += len(data)
        except OSError:
            pass
        for end in self.inner:
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass

    def close(self) -> None:
        for thread in self.threads:
            thread.join(20)
        for end in self.inner:
            end.close()


def reduce_through(
    limits: list[int | None], calls: int = 3, wide_area: bool = False, piece_bytes: int = SLOT_BYTES
) -> tuple[list[torch.Tensor], list[str], list[Relay]]:
    """All-reduce between two communicators of this process, whose connections are cut after so many bytes."""
    relays = [Relay(limit) for limit in limits]
    natives = [make(rank, wide_area=wide_area) for rank in range(2)]
    for rank, native in enumerate(natives):
        attach(native, rank, [relay.outer[rank].detach() for relay in relays])
    tensors = [torch.arange(NUMEL, dtype=torch.float32).remainder_(1000).mul_(rank + 1) for rank in range(2)]
    failures: list[str] = []

    def run(rank: int) -> None:
        reduction = plan(rank, NUMEL, piece_bytes)
        pointer = tensors[rank].data_ptr()
        try:
            works = [natives[rank].submit(reduction, [(pointer, pointer, 0)], 1) for _ in range(calls)]
            for work in works:
                work.wait()
        except DtcommError as error:
            failures.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    _C.NativeCommunicator.close_all(natives)
    for relay in relays:
        relay.close()
    return tensors, failures, relays


def expected(calls: int = 3) -> torch.Tensor:
    first = torch.arange(NUMEL, dtype=torch.float32).remainder_(1000)
    return first * 3 * 2 ** (calls - 1)


@pytest.mark.parametrize("wide_area", [False, True])
def test_all_payload_connections_carry_payloads(wide_area: bool) -> None:
    tensors, failures, relays = reduce_through([None] * SOCKETS, wide_area=wide_area, piece_bytes=2**19)
    assert failures == [] and all(torch.equal(tensor, expected()) for tensor in tensors)
    control, *payloads = [relay.passed for relay in relays]
    total = 3 * 4 * NUMEL  # half of the sum and half of the input, in each call
    for way in range(2):
        assert control[way] < 64 * 1024
        assert all(passed[way] > total / 20 for passed in payloads), payloads
        assert total <= sum(passed[way] for passed in payloads) < 1.01 * total


CUTS: dict[str, list[int | None]] = {
    "one of payloads": [None, None, 1_000_000, None],
    "in the head of a part": [None, 3 * (48 + 128 * 1024) + 20, None, None],
    "two of payloads": [None, 700_003, 1_500_001, None],
    "all of payloads": [None, 500_000, 1_000_000, 1_200_000],
    "that of short frames": [200, None, None, None],
    "that of short frames and one of payloads": [200, 300_001, None, None],
    "all but the last": [200, 300_001, 600_001, None],
    "at once": [None, 0, None, None],
}


@pytest.mark.parametrize("limits", CUTS.values(), ids=CUTS.keys())
@pytest.mark.parametrize("wide_area", [False, True])
def test_a_message_survives_connections_that_are_cut(limits: list[int | None], wide_area: bool) -> None:
    tensors, failures, relays = reduce_through(limits, wide_area=wide_area)
    assert failures == []
    assert all(torch.equal(tensor, expected()) for tensor in tensors)
    assert [relay.cut.is_set() for relay in relays] == [limit is not None for limit in limits]


def test_the_peer_is_lost_with_its_last_connection() -> None:
    _, failures, _ = reduce_through([3000, 300_000, 600_000, 900_000])
    assert failures and all(text.startswith("PeerLost: ") for text in failures), failures


@contextmanager
def rank_beside_peer(timeout_s: float) -> Iterator[tuple[_C.NativeCommunicator, list[socket.socket]]]:
    """Rank 0 of two, and the ends of the connections of rank 1, which the test plays."""
    pairs = [socket.socketpair() for _ in range(SOCKETS)]
    native = make(0, timeout_s)
    with closing(native):
        attach(native, 0, [near.detach() for near, _ in pairs])
        yield native, [far for _, far in pairs]
        for _, far in pairs:
            far.close()


def part(
    seq: int = 1,
    index: int = 0,
    total: int = 4,
    number: int = 0,
    sent_before: int = 0,
    at: int = 0,
    data: bytes = b"",
) -> bytes:
    word = total << 32 | sent_before << 16 | number
    return FRAME.pack(PART, len(data), seq, 7, index << 32, word, at) + data


IMPOSSIBLE = {
    "a whole payload": FRAME.pack(BOX, 4, 1, 7, 0, 0, 0) + bytes(4),
    "a part behind the last": part(number=1, data=bytes(4)),
    "a part of another size": part(total=8, data=bytes(4)),
    "a payload larger than its slot": part(total=SLOT_BYTES + 4096, data=bytes(4)),
    "a payload of a piece that no rank can have begun": part(seq=9, data=bytes(4)),
    "a flag behind the last": part(index=8 * BOXES, data=bytes(4)),
    "a payload of another size than before": part(total=2**19, data=bytes(2**17))
    + part(total=2**18, number=1, data=bytes(2**17)),
    "a payload at another place than before": part(total=2**19, data=bytes(2**17))
    + part(total=2**19, number=1, at=64, data=bytes(2**17)),
}  # fmt: skip


@pytest.mark.parametrize("sent", IMPOSSIBLE.values(), ids=IMPOSSIBLE.keys())
def test_an_impossible_part_ends_its_connection(sent: bytes) -> None:
    with rank_beside_peer(0.3) as (native, ends):
        tensor = torch.ones(1000)
        threading.Thread(target=send_all, args=(ends[1], sent), daemon=True).start()
        with pytest.raises(CollectiveTimeout):  # the other connections are there
            native.run(plan(0, 1000), tensor.data_ptr(), tensor.data_ptr(), 0, 1)
        ends[1].settimeout(5)
        while ends[1].recv(2**16):
            pass


def send_all(end: socket.socket, data: bytes) -> None:
    try:
        end.sendall(data)
    except OSError:
        pass


def test_parts_on_a_peers_only_connection_are_refused() -> None:
    near, far = socket.socketpair()
    native = make(0)
    tensor = torch.ones(1000)
    with closing(native), far:
        attach(native, 0, [near.detach()])
        far.sendall(part(data=bytes(4)))
        with pytest.raises(PeerLost, match="invalid frame"):
            native.run(plan(0, 1000), tensor.data_ptr(), tensor.data_ptr(), 0, 1)


def receive_part(end: socket.socket) -> tuple[list[int], bytes]:
    with end.makefile("rb", buffering=0) as stream:
        kind, size, *words = FRAME.unpack(read_exactly(stream.read, FRAME.size))
        assert kind == PART
        return words, read_exactly(stream.read, size)


def read_exactly(read: Callable[[int], bytes], size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = read(size - len(data))
        assert more, "the connection has ended"
        data += more
    return data


def test_a_part_that_comes_twice_is_stored_once() -> None:
    """Sent again on another connection: the first transmission, however late, changes nothing."""
    with rank_beside_peer(20.0) as (native, ends):
        tensor = torch.ones(8192)
        work = native.submit(plan(0, 8192), [(tensor.data_ptr(), tensor.data_ptr(), 0)], 1)
        for end in ends:
            end.settimeout(10)
        words, data = receive_part(ends[1])
        operation, index = words[1], words[2] >> 32
        assert len(data) == 16384 and words[3] >> 32 == 16384

        def answer(number: int, index: int, value: float, sent_before: int, upto: int | None = None) -> None:
            payload = struct.pack("<4096f", *[value] * 4096)
            frame = FRAME.pack(
                PART, 16384, words[0], operation, index << 32, 16384 << 32 | sent_before << 16, words[4]
            )
            ends[number].sendall((frame + payload)[:upto])

        # Half of a part on one connection; the whole part on another ends the first one.
        answer(2, index, 99.0, 0, 1000)
        answer(3, index, 5.0, 1)
        assert ends[2].recv(1) == b""
        answer(1, index, 77.0, 2)  # again, after it has arrived
        ready, _, _ = select.select([ends[1], ends[3]], [], [], 10)
        words, data = receive_part(ready[0])
        assert struct.unpack("<4096f", data) == (6.0,) * 4096
        words[2] = words[2] & ~0xFFFFFFFF
        answer(1, words[2] >> 32, 4.0, 0)
        work.wait()
        assert tensor[:4096].eq(6).all() and tensor[4096:].eq(4).all()


SO_MAX_PACING_RATE = 47


def test_the_rate_of_busy_connections_is_measured() -> None:
    paced = 4_000_000  # bytes per second of each connection
    natives = [make(rank, wide_area=True) for rank in range(2)]
    ends: list[list[int]] = [[], []]
    with socket.create_server(("127.0.0.1", 0)) as server:
        for _ in range(SOCKETS):
            caller = socket.create_connection(server.getsockname())
            for rank, end in enumerate((caller, server.accept()[0])):
                end.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, paced)
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 128 * 1024)
                ends[rank].append(end.detach())
    for rank, native in enumerate(natives):
        attach(native, rank, ends[rank])
    assert [native.measured_rates() for native in natives] == [[0.0, 0.0]] * 2
    tensors = [torch.ones(NUMEL) for _ in natives]

    def run(rank: int) -> None:
        pointer = tensors[rank].data_ptr()
        for _ in range(3):
            natives[rank].run(plan(rank, NUMEL), pointer, pointer, 0, 1)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    rates = natives[0].measured_rates()
    _C.NativeCommunicator.close_all(natives)
    assert rates[0] == 0 and 0.4 < rates[1] / (paced * (SOCKETS - 1)) < 2.5, rates
