"""Connections of several that end and are made anew: results, generations, requests to call, peers that are gone."""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from dtcomm import _C
from dtcomm.errors import CollectiveTimeout, DtcommError, PeerLost
from dtcomm.runtime.bootstrap import reconnect, tcp
from dtcomm.runtime.bootstrap.reconnect import ConnectionKeeper
from tests.unit.runtime.test_parallel_connections import (
    CUTS,
    NUMEL,
    SOCKETS,
    Relay,
    attach,
    expected,
    make,
    plan,
)

NAMES = ["rank 0 (host a)", "rank 1 (host b)"]
CALLS = 3
_own = threading.local()


@pytest.fixture(autouse=True)
def local_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "_local_address", lambda *_: "127.0.0.1")
    monkeypatch.setattr(tcp, "_warned", {})


@dataclass
class Pair:
    """Two communicators, the relays of their first connections, and what makes these anew."""

    natives: list[_C.NativeCommunicator]
    relays: list[Relay | HalfOpen]
    listeners: list[tcp.Listener]
    keepers: list[ConnectionKeeper | None]

    def call_later(self, rank: int, generation: int, number: int = 1) -> socket.socket:
        """Call the listener of a rank as the other one would, at once."""
        info = self.listeners[rank].info()
        caller = socket.create_connection((info["address"], info["port"]), timeout=5)
        hello = tcp.Hello(1 - rank, number, generation, False)
        caller.sendall(tcp.with_proof(hello.pack(info["token"])))
        return caller


@contextmanager
def pair(
    limits: list[int | None],
    timeout_s: float = 20.0,
    kept: tuple[int, ...] = (0, 1),
    relay_of: Callable[[int | None], Relay | HalfOpen] = Relay,
) -> Iterator[Pair]:
    """Two communicators whose first connections are cut after so many bytes; ranks that are not kept ignore that."""
    with ExitStack() as stack:
        relays = [relay_of(limit) for limit in limits]
        natives = [make(rank, timeout_s, wide_area=True) for rank in range(2)]
        listeners = [tcp.Listener() for _ in range(2)]
        infos = [listener.info() for listener in listeners]
        for rank, native in enumerate(natives):
            attach(native, rank, [relay.outer[rank].detach() for relay in relays])
        keepers = [
            ConnectionKeeper(
                natives[rank],
                rank,
                listeners[rank],
                {1 - rank: infos[1 - rank]},
                {1 - rank: len(limits)},
                NAMES,
                timeout_s,
            )
            if rank in kept
            else None
            for rank in range(2)
        ]
        made = Pair(natives, relays, listeners, keepers)
        stack.callback(lambda: [relay.close() for relay in relays])
        stack.callback(lambda: [keeper.close() for keeper in keepers if keeper is not None])
        stack.callback(lambda: _C.NativeCommunicator.close_all(natives))
        yield made


def reduce(made: Pair) -> tuple[list[torch.Tensor], list[DtcommError]]:
    """All-reduce between the two several times."""
    tensors = [torch.arange(NUMEL, dtype=torch.float32).remainder_(1000).mul_(rank + 1) for rank in range(2)]
    failures: list[DtcommError] = []

    def run(rank: int) -> None:
        pointer = tensors[rank].data_ptr()
        try:
            reduction = plan(rank, NUMEL)
            works = [made.natives[rank].submit(reduction, [(pointer, pointer, 0)], 1) for _ in range(CALLS)]
            for work in works:
                work.wait()
        except DtcommError as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return tensors, failures


def wait_for(condition: Any, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class HalfOpen:
    """A connection that delivers nothing. Rank 0 sees it end; rank 1 does not."""

    def __init__(self) -> None:
        self.outer, self.inner = zip(*(socket.socketpair() for _ in range(2)), strict=True)
        self.inner[0].shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for end in self.inner:
            end.close()


ALL = {"all": [3000, 300_000, 600_000, 900_000], "all at once": [0, 0, 0, 0]}


@pytest.mark.parametrize("limits", [*CUTS.values(), *ALL.values()], ids=[*CUTS, *ALL])
def test_a_message_survives_whatever_is_cut(limits: list[int | None]) -> None:
    with pair(limits) as made:
        tensors, failures = reduce(made)
        assert failures == []
        assert all(torch.equal(tensor, expected(CALLS)) for tensor in tensors)
        cut = sum(limit is not None for limit in limits)
        assert [relay.cut.is_set() for relay in made.relays if isinstance(relay, Relay)] == [
            limit is not None for limit in limits
        ]
        for native in made.natives:
            wait_for(lambda native=native: native.restoring_counts() == (0, cut))
        again, failures = reduce(made)  # over the new ones
        assert failures == [] and all(torch.equal(tensor, expected(CALLS)) for tensor in again)


def test_new_connections_carry_payloads(caplog: pytest.LogCaptureFixture) -> None:
    with pair([None, 300_000, 300_000, 300_000]) as made:
        reduce(made)
        for native in made.natives:
            wait_for(lambda native=native: native.restoring_counts() == (0, 3))
    # They may end one by one. The peer gives up one over which a part was arriving that comes again over another.
    ended = r"[123] of 4 connections to rank 0 \(host a\) ended \((closed|given up) by the peer\); "
    assert re.search(ended + "making (it|them) anew", caplog.text), caplog.text
    assert "connection 2 to rank 1 (host b) was made anew" in caplog.text


def test_a_connection_that_only_one_rank_has_lost_is_made_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank with the lower number does not call: it asks for a call, and the other ends what still looks alive."""
    monkeypatch.setattr(reconnect, "ASK_S", 0.05)
    with pair(
        [None, None, 0, None], relay_of=lambda limit: HalfOpen() if limit == 0 else Relay(limit)
    ) as made:
        tensors, failures = reduce(made)
        assert failures == [] and all(torch.equal(tensor, expected(CALLS)) for tensor in tensors)
        for native in made.natives:
            wait_for(lambda native=native: native.restoring_counts() == (0, 1))


@pytest.mark.parametrize("gone", [0, 1])
def test_a_peer_whose_process_has_ended_is_lost_at_once(gone: int) -> None:
    with pair([3000, 300_000, 600_000, 900_000], kept=(1 - gone,)) as made:
        made.listeners[gone].close()
        began = time.monotonic()
        _, failures = reduce(made)
        assert time.monotonic() - began < 10
        lost = next(failure for failure in failures if "refuses" in str(failure))
        assert isinstance(lost, PeerLost) and "its connection ended (closed by the peer, and" in str(lost)


def test_a_peer_whose_place_another_process_has_taken_is_lost() -> None:
    with pair([3000, 300_000, 600_000, 900_000], kept=(1,)) as made:
        listener = made.listeners[0]

        def turn_away() -> None:
            while listener.fileno() >= 0:
                if caller := listener.accept():
                    caller.connection.close()
                time.sleep(0.005)

        threading.Thread(target=turn_away, daemon=True).start()
        _, failures = reduce(made)
        listener.close()
        assert any(isinstance(failure, PeerLost) for failure in failures), failures


def test_a_peer_that_does_not_answer_is_named_at_the_timeout() -> None:
    with pair([3000, 300_000, 600_000, 900_000], timeout_s=1.0, kept=(1,)) as made:
        made.natives[0].allow_restoring(0)  # it waits for a new connection, too; none is accepted
        _, failures = reduce(made)
        assert len(failures) == 2 and all(isinstance(failure, CollectiveTimeout) for failure in failures)
        assert any("rank 0, to which all connections have ended" in str(failure) for failure in failures)
        made.listeners[0].close()


def test_a_rank_with_another_secret_is_refused(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tcp, "secret", lambda: b"ours")
    with pair([None] * SOCKETS) as made:
        monkeypatch.setattr(
            tcp,
            "secret",
            lambda: b"ours" if threading.current_thread().name == "dtcomm-connections" else b"another",
        )
        with made.call_later(0, 1) as caller:
            assert caller.recv(100) == b""
        assert "refused a connection from 127.0.0.1 as rank 1" in caplog.text
        monkeypatch.setattr(tcp, "secret", lambda: b"ours")
        tensors, failures = reduce(made)
        assert failures == [] and all(torch.equal(tensor, expected(CALLS)) for tensor in tensors)
        assert [native.restoring_counts() for native in made.natives] == [(0, 0)] * 2


def test_an_old_call_is_refused() -> None:
    """What an earlier call said is of no use: its generation is not new."""
    with pair([None] * SOCKETS) as made:
        with made.call_later(0, 0) as caller:
            caller.settimeout(5)
            assert read_to_the_end(caller) <= 32
        _, failures = reduce(made)
        assert failures == [] and made.natives[0].restoring_counts() == (0, 0)


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(200)])
def test_strangers_have_no_effect(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "_HELLO_SECONDS", 0.2)
    with pair([None] * SOCKETS) as made:
        info = made.listeners[0].info()
        with socket.create_connection((info["address"], info["port"]), timeout=5) as stranger:
            stranger.sendall(said)
            tensors, failures = reduce(made)
            assert failures == [] and all(torch.equal(tensor, expected(CALLS)) for tensor in tensors)
            assert read_to_the_end(stranger) == 0


def read_to_the_end(connection: socket.socket) -> int:
    """The number of bytes that come before the other end closes or resets the connection."""
    size = 0
    with suppress(ConnectionResetError):
        while data := connection.recv(4096):
            size += len(data)
    return size


def test_a_peer_that_closes_is_not_called(caplog: pytest.LogCaptureFixture) -> None:
    with pair([None] * SOCKETS) as made:
        reduce(made)
        made.natives[1].close()
        keeper = made.keepers[1]
        assert keeper is not None
        keeper.close()
        with pytest.raises(PeerLost, match="has destroyed its communicator"):
            tensor = torch.ones(1000)
            made.natives[0].run(plan(0, 1000), tensor.data_ptr(), tensor.data_ptr(), 0, 1)
        time.sleep(0.2)
        assert caplog.text == ""


def test_a_forked_child_does_not_stop_the_thread_of_its_parent() -> None:
    with pair([None] * SOCKETS) as made:
        child = os.fork()
        if child == 0:
            for keeper in made.keepers:
                if keeper is not None:
                    keeper.close()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        made.natives[0].end_connection(1, 2, 0)
        for native in made.natives:
            wait_for(lambda native=native: native.restoring_counts() == (0, 1))


def test_nothing_is_left_when_keepers_are_closed() -> None:
    counts = []
    for _ in range(3):  # the first one makes what the process keeps
        with pair([None, 100_000, None, None]) as made:
            reduce(made)
        counts.append((len(os.listdir("/proc/self/fd")), threading.active_count()))
    assert counts[1] == counts[2] == counts[0]


def test_a_rank_that_is_out_of_descriptors_accepts_a_call_later(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    accept, failures = tcp.Listener.accept, [OSError(24, "Too many open files")] * 2

    def accept_later(listener: tcp.Listener) -> tcp.Caller | None:
        if failures:
            raise failures.pop()
        return accept(listener)

    monkeypatch.setattr(tcp.Listener, "accept", accept_later)
    with pair([None, 300_000]) as made:
        tensors, errors = reduce(made)
        assert errors == [] and all(torch.equal(tensor, expected(CALLS)) for tensor in tensors)
        for native in made.natives:
            wait_for(lambda native=native: native.restoring_counts() == (0, 1))
    assert failures == [] and "cannot accept a connection: [Errno 24]" in caplog.text
