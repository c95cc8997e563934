"""UCX: how it is found, and what the engine does with what a peer sends through it, played by the test."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from unittest import mock

import pytest
import torch

from dtcomm import _C, algorithms
from dtcomm.codecs import codec
from dtcomm.errors import CollectiveTimeout, PayloadCorrupt, PeerLost
from dtcomm.runtime.bootstrap import between_hosts
from dtcomm.runtime.native import native_plan
from dtcomm.runtime.types import OpSpec, TensorSpec
from tests.support.ucx import requires_ucx

BOX, DONE, HEADER, WAITING, FAILURE, CLOSED, HELLO = range(1, 8)  # csrc/engine/stream_bundle.h
SLOTS = 8
SLOT_BYTES = 64 * 1024
BOXES = 8
LONG = 20.0  # seconds: an error that is raised because of a timeout would come too late


class Rank:
    """Rank 0 of two, which calls a one_shot all_reduce; the test plays rank 1 through a socket and UCX."""

    def __init__(self, numel: int, timeout_s: float, peer_connects: bool = True) -> None:
        between_hosts.open_ucx()
        self.native = _C.NativeCommunicator(
            rank=0, ranks=2, max_boxes=BOXES, slot_bytes=SLOT_BYTES, timeout_s=timeout_s, yield_us=50.0
        )
        self.tensor = torch.ones(numel)
        spec = OpSpec("all_reduce", "sum", (TensorSpec(numel, torch.float32, codec("none")),), "one_shot")
        schedule = algorithms.build("one_shot", "all_reduce", 2)
        self.plan = native_plan(
            spec, schedule, 0, _C.Variants(piece_bytes=SLOT_BYTES), SLOT_BYTES, BOXES, False
        )
        near, self.socket = socket.socketpair()
        address = self.native.address()
        own = _C.Address(**address, name="rank 0")
        other = _C.Address(**address, sockets=[near.detach()], other_host=True, name="rank 1")
        self.native.attach([own, other])
        self.peer = _C.UcxPeer(7)
        ucx_address = self.native.make_ucx_address()
        self.native.connect_ucx([b"", self.peer.address()])
        self.frames: list[tuple[int, list[int], bytes]] = []
        # UCX before 1.14 aborts if a connection ends while its answer to the request waits to be sent. Without progress
        # it does not answer.
        self.peer_progresses = peer_connects
        if peer_connects:
            self.peer.connect(0, 1, ucx_address)
            self.peer.send(HELLO, [0] * 5)
            self.progress_until(self.native.ucx_is_connected)

    def progress_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LONG
        while not condition():
            assert time.monotonic() < deadline
            if self.peer_progresses:
                self.frames += self.peer.receive()

    def submit(self) -> _C.NativeWork:
        return self.native.submit(self.plan, [(self.tensor.data_ptr(), self.tensor.data_ptr(), 0)], 1)

    def received(self, kind: int) -> list[tuple[list[int], bytes]]:
        return [(words, payload) for other, words, payload in self.frames if other == kind]


@contextmanager
def rank_with_ucx(numel: int = 1000, timeout_s: float = LONG, peer_connects: bool = True) -> Iterator[Rank]:
    rank = Rank(numel, timeout_s, peer_connects)
    with closing(rank.native), rank.socket:
        yield rank


@requires_ucx
@pytest.mark.parametrize("numel", [1000, 16_000])  # 64 KB are sent by rendezvous
@pytest.mark.parametrize(("missing", "moved"), [(4, 0), (0, 64), (0, 0)])
def test_payload_must_fill_its_place(numel: int, missing: int, moved: int) -> None:
    with rank_with_ucx(numel) as rank:
        work = rank.submit()
        rank.progress_until(lambda: bool(rank.received(BOX)))
        words, payload = rank.received(BOX)[0]
        assert payload == torch.ones(numel).numpy().tobytes()
        reply = torch.full((numel,), 2.0).numpy().tobytes()[: len(payload) - missing]
        rank.peer.send(BOX, [*words[:4], words[4] + moved], reply)
        if not missing and not moved:
            rank.progress_until(work.finished)
            work.wait()
            assert rank.tensor.eq(3).all()
            return
        with pytest.raises(PayloadCorrupt, match=rf"\({len(reply)} bytes at offset {moved} instead of"):
            rank.progress_until(work.finished)
            work.wait()


IMPOSSIBLE = {
    "waits for a rank far outside": (WAITING, [2**30], b"", False),
    "done with pieces that no rank can have begun": (DONE, [SLOTS + 1], b"", False),
    "payload of a piece that no rank can have begun": (BOX, [SLOTS + 1, 7], b"x", False),
    "payload for a flag behind the last": (BOX, [1, 7, (SLOTS * BOXES) << 32], b"x", False),
    "payload that leaves its slot": (BOX, [1, 7, 0, 0, SLOT_BYTES - 4], bytes(8), False),
    "large payload that leaves its slot": (BOX, [1, 7, 0, 0, 0], bytes(SLOT_BYTES + 4), False),
    "payload where there is none": (DONE, [1], b"x", False),
    "failure of an unknown kind": (FAILURE, [77, 1], b"text", True),
    "description of operation 0": (HEADER, [0, 7], b"text", True),
    "description that is too long": (HEADER, [1, 7], bytes(600), True),
    "unknown kind of frame": (77, [], b"", False),
}


@requires_ucx
@pytest.mark.parametrize(("kind", "words", "payload", "is_text"), IMPOSSIBLE.values(), ids=IMPOSSIBLE.keys())
def test_impossible_value_ends_the_connection(
    kind: int, words: list[int], payload: bytes, is_text: bool
) -> None:
    with rank_with_ucx() as rank:
        work = rank.submit()
        rank.peer.send(kind, words + [0] * (5 - len(words)), payload, is_text)
        rank.progress_until(work.finished)
        with pytest.raises(PeerLost, match=r"rank 1 is gone: .*\(it sent an invalid frame\)"):
            work.wait()


@requires_ucx
def test_messages_without_the_token_are_ignored() -> None:
    with rank_with_ucx(timeout_s=0.3) as rank:
        forger = _C.UcxPeer(8)
        address = bytearray(rank.native.make_ucx_address())
        address[0] ^= 1
        forger.connect(0, 1, bytes(address))
        work = rank.submit()
        forger.send(77, [0] * 5)
        rank.progress_until(lambda: bool(forger.receive()) or work.finished())
        with pytest.raises(CollectiveTimeout):
            work.wait()


@requires_ucx
def test_peer_that_closes_is_heard_behind_its_payloads() -> None:
    frame = _frame(CLOSED, 1)  # behind one payload
    with rank_with_ucx() as rank:
        work = rank.submit()
        rank.progress_until(lambda: bool(rank.received(BOX)))
        rank.socket.sendall(frame)
        rank.socket.close()
        end = time.monotonic() + 0.3
        rank.progress_until(lambda: time.monotonic() > end)
        assert not work.finished()
        words, _ = rank.received(BOX)[0]
        rank.peer.send(BOX, words, torch.full((1000,), 2.0).numpy().tobytes())
        rank.progress_until(work.finished)
        work.wait()
        assert rank.tensor.eq(3).all()
        second = rank.submit()
        rank.progress_until(second.finished)
        with pytest.raises(PeerLost, match="rank 1 has destroyed its communicator"):
            second.wait()


@requires_ucx
def test_socket_that_ends_is_the_end_of_the_peer() -> None:
    with rank_with_ucx() as rank:
        work = rank.submit()
        rank.socket.close()
        rank.progress_until(work.finished)
        with pytest.raises(
            PeerLost, match=r"rank 1 is gone: its connection ended \((closed|Connection reset) by"
        ):
            work.wait()


@requires_ucx
def test_connection_that_ends_too_early_is_named() -> None:
    with rank_with_ucx(peer_connects=False) as rank:
        rank.socket.close()
        with pytest.raises(
            RuntimeError, match=r"the connection to rank 1 ended \((closed|Connection reset) by"
        ):
            rank.progress_until(rank.native.ucx_is_connected)


@requires_ucx
def test_closing_does_not_wait_for_a_peer_that_never_connected() -> None:
    with rank_with_ucx(peer_connects=False) as rank:
        began = time.monotonic()
        rank.native.close()
        assert time.monotonic() - began < 1.5  # it waits two seconds for what an operation has sent


# A process in which UCX cannot accept a connection, as there are no descriptors left; then it makes other endpoints.
STARVED = """
import contextlib, os, resource
from dtcomm import _C
from dtcomm.runtime.bootstrap import between_hosts
between_hosts.open_ucx()
peer = _C.UcxPeer(7)
limits = resource.getrlimit(resource.RLIMIT_NOFILE)
highest = max(map(int, os.listdir("/proc/self/fd")))
resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, limits[1]))
held = []
with contextlib.suppress(OSError):
    while True:
        held.append(os.open("/dev/null", os.O_RDONLY))
print("address", peer.address().hex(), flush=True)
input()
for descriptor in held:
    os.close(descriptor)
resource.setrlimit(resource.RLIMIT_NOFILE, limits)
del peer
print("endpoints:", len([_C.UcxPeer(8) for _ in range(3)]))
"""
# A process that connects to it.
CONNECTING = """
import sys, time
from dtcomm import _C
from dtcomm.runtime.bootstrap import between_hosts
between_hosts.open_ucx()
peer = _C.UcxPeer(9)
end = time.monotonic() + 20
try:
    peer.connect(0, 1, bytes.fromhex(sys.argv[1]))
    peer.send(7, [0] * 5)
    while not peer.end_reason and time.monotonic() < end:
        peer.receive()
    print("ended:", peer.end_reason)
except RuntimeError as error:
    print("ended:", error)
"""


@requires_ucx
def test_process_without_descriptors_does_not_end_its_peer_and_can_use_ucx_later() -> None:
    starved = [sys.executable, "-c", STARVED]
    with subprocess.Popen(starved, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        address = next(line for line in process.stdout if line.startswith("address")).split()[1]
        connecting = [sys.executable, "-c", CONNECTING, address]
        done = subprocess.run(connecting, capture_output=True, text=True, timeout=LONG, check=False)
        output, _ = process.communicate("\n", timeout=LONG)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ended: " in done.stdout
    assert "endpoints: 3" in output
    # UCX then writes to memory that it has freed.
    assert "use this id" not in output, output


def _frame(kind: int, *words: int) -> bytes:
    return b"".join(word.to_bytes(4, "little") for word in (kind, 0)) + b"".join(
        word.to_bytes(8, "little") for word in (*words, *[0] * (5 - len(words)))
    )


def test_library_that_is_missing_is_named() -> None:
    code = "from dtcomm import _C; _C.open_ucx(['nowhere.so'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "UCX is not installed: nowhere.so" in done.stderr or "built without UCX headers" in done.stderr


def test_library_of_a_wheel_is_found(tmp_path: Path) -> None:
    (library := tmp_path / "libucx" / "lib" / "libucp.so.0").parent.mkdir(parents=True)
    library.touch()
    (tmp_path / "libucx" / "__init__.py").touch()
    with (
        mock.patch.object(sys, "path", [str(tmp_path)]),
        mock.patch.object(between_hosts._C, "open_ucx") as opened,
    ):
        opened.return_value = ("1.17.0", ["rc_mlx5/mlx5_0:1", "tcp/eth0"])
        assert between_hosts.open_ucx().rdma_devices == ["rc_mlx5/mlx5_0:1"]
    opened.assert_called_once_with(["libucp.so.0", str(library)])
