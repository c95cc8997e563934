"""Connections of the engine: a caller and a listener prove that they know DTCOMM_SECRET, over IPv4 and IPv6."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from dtcomm.runtime.bootstrap import tcp
from dtcomm.runtime.bootstrap.tcp import is_proof, prove

NAMES = ["rank 0 (host a, pid 1)", "rank 1 (host b, pid 2)"]
_own = threading.local()


@pytest.fixture(params=["127.0.0.1", "::1"])
def listeners(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tcp.Listener]]:
    monkeypatch.setattr(tcp, "_local_address", lambda *_: request.param)
    monkeypatch.setattr(tcp, "_warned", {})
    monkeypatch.setattr(tcp, "secret", lambda: getattr(_own, "secret", b""))
    try:
        made = [tcp.Listener(), tcp.Listener()]
    except OSError:
        pytest.skip("no IPv6 here")
    yield made
    for listener in made:
        listener.close()


def connect(
    listeners: list[tcp.Listener], secrets: list[bytes], seconds: float = 10.0
) -> list[dict[int, list[int]] | OSError]:
    infos = [listener.info() for listener in listeners]

    def run(rank: int) -> dict[int, list[int]] | OSError:
        _own.secret = secrets[rank]
        try:
            peers = {1 - rank: infos[1 - rank]}
            return listeners[rank].connect(rank, peers, NAMES, seconds)
        except OSError as error:
            return error

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(run, range(2)))


@contextmanager
def sockets(results: list[Any]) -> Iterator[list[socket.socket]]:
    made = [socket.socket(fileno=results[rank][1 - rank][0]) for rank in range(2)]
    yield made
    for connection in made:
        connection.close()


@pytest.mark.parametrize("secret", [b"", b"a secret"])
def test_ranks_with_the_same_secret_are_connected(listeners: list[tcp.Listener], secret: bytes) -> None:
    with sockets(connect(listeners, [secret, secret])) as (first, second):
        assert not os.get_blocking(first.fileno()) and not os.get_blocking(second.fileno())
        first.send(b"hello")
        second.settimeout(5)
        assert second.recv(10) == b"hello"


@pytest.mark.parametrize("secrets", [[b"one", b"two"], [b"one", b""], [b"", b"two"]])
def test_another_secret_is_refused_and_logged(
    listeners: list[tcp.Listener], secrets: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    listening, calling = connect(listeners, secrets, seconds=1.0)
    assert isinstance(listening, TimeoutError)
    assert isinstance(calling, OSError) and "rank 0" in str(calling) and "DTCOMM_SECRET" in str(calling)
    assert "refused a connection from" in caplog.text and "as rank 1" in caplog.text
    assert "one" not in caplog.text.replace("connection", "") and "two" not in caplog.text


def test_a_listener_that_does_not_know_the_secret_is_not_believed(
    listeners: list[tcp.Listener], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp, "answer", lambda caller: caller.connection.sendall(bytes(32)) is None)
    _, calling = connect(listeners, [b"one", b"one"])
    assert isinstance(calling, ConnectionError) and "cannot be trusted" in str(calling)


def test_a_refused_caller_does_not_keep_the_right_one_out(listeners: list[tcp.Listener]) -> None:
    info = listeners[0].info()
    with socket.create_connection((info["address"], info["port"])) as stranger:
        identity = tcp.Hello(1, 0, 0, False).pack(info["token"])
        stranger.sendall(identity + prove(b"guessed", b"caller", identity))
        with sockets(connect(listeners, [b"one", b"one"])):
            stranger.settimeout(5)
            assert stranger.recv(10) == b""


def test_proofs_separate_their_parts() -> None:
    assert prove(b"k", b"ab", b"c") != prove(b"k", b"a", b"bc")
    assert is_proof(prove(b"k", b"a"), b"k", b"a")
    assert not is_proof(prove(b"k", b"a"), b"l", b"a")


def test_the_address_is_that_of_the_route_to_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    own = tcp._local_address()
    monkeypatch.setattr(tcp, "_host_name_address", lambda: "203.0.113.9")
    assert (
        tcp._local_address(("127.0.0.1", 80)) == "203.0.113.9"
    )  # the store's own host: others use another address
    if own != "127.0.0.1":
        assert tcp._local_address((own, 80)) == own
    with pytest.raises(OSError, match=r"rank 3 .* 127\.0\.0\.1:1: .*GLOO_SOCKET_IFNAME"):
        peer = {"address": "127.0.0.1", "port": 1, "token": 0}
        tcp._finish_connecting(
            tcp.start_connecting(peer, "rank 3"), peer, b"", "rank 3", time.monotonic() + 5
        )
