"""How many connections and bytes under way a round trip takes, and making several connections to a rank."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from dtcomm import env
from dtcomm.runtime.bootstrap import between_hosts
from dtcomm.runtime.bootstrap.tcp import Listener
from dtcomm.runtime.native.copy_policy import SOCKET_SLOT_BYTES

MIB = 2**20


@pytest.fixture(autouse=True)
def without_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DTCOMM_CONNECTIONS", raising=False)


@pytest.mark.parametrize("round_trip_ms", [0.0, 0.1, 1.0, 1.9])
def test_ranks_of_a_site_have_one_connection_and_the_usual_slots(round_trip_ms: float) -> None:
    assert between_hosts.connections(round_trip_ms, 4 * MIB) == 1
    assert not between_hosts.is_far(round_trip_ms)
    assert between_hosts.slot_bytes(round_trip_ms) == SOCKET_SLOT_BYTES


def test_connections_hold_the_bytes_of_a_round_trip() -> None:
    assert between_hosts.connections(75, 4 * MIB) == 12  # 47 MB at 5 Gbit/s
    assert between_hosts.connections(75, 64 * MIB) == between_hosts.MIN_FAR_CONNECTIONS
    assert between_hosts.connections(300, 4 * MIB) == between_hosts.MAX_CONNECTIONS
    counts = [between_hosts.connections(ms, 4 * MIB) for ms in range(2, 200)]
    assert counts == sorted(counts)
    assert [between_hosts.slot_bytes(ms) // MIB for ms in (5, 20, 75, 300)] == [2, 4, 16, 16]


def test_the_variable_forces_the_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTCOMM_CONNECTIONS", "3")
    assert between_hosts.connections(0.0, 4 * MIB) == 3 and between_hosts.connections(75, 4 * MIB) == 3
    for wrong in ("65", "-1", "two"):
        monkeypatch.setenv("DTCOMM_CONNECTIONS", wrong)
        with pytest.raises(ValueError, match=r"DTCOMM_CONNECTIONS=.*a whole number from 0 to 64"):
            env.get("DTCOMM_CONNECTIONS")


def test_sockets_of_payloads_are_all_but_the_first_of_several() -> None:
    assert [between_hosts.sockets(count) for count in (1, 2, 8)] == [1, 3, 9]
    assert [between_hosts.payload_connections([0] * between_hosts.sockets(n)) for n in (1, 2, 8)] == [1, 2, 8]


def test_round_trips_are_measured_and_those_to_closed_ports_are_zero() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as gone:
        closed_port = gone.getsockname()[1]
        gone.close()
        answering = {"address": "127.0.0.1", "port": server.getsockname()[1]}
        times = between_hosts.round_trip_ms(
            [answering, {"address": "127.0.0.1", "port": closed_port}, answering]
        )
    assert 0 < times[0] < 1000 and times[1] == 0 and 0 < times[2] < 1000
    assert between_hosts.round_trip_ms([]) == []
    assert between_hosts.buffer_bytes() > 64 * 1024


def test_both_ends_order_their_connections_alike() -> None:
    names = ["rank 0", "rank 1", "rank 2"]
    counts = {(0, 1): 4, (0, 2): 1, (1, 2): 2}
    with ExitStack() as stack:
        listeners = [Listener() for _ in names]
        infos = [listener.info() for listener in listeners]
        probes = between_hosts.round_trip_ms(infos)  # callers that leave at once
        assert all(ms > 0 for ms in probes)

        def connect(rank: int) -> dict[int, list[int]]:
            peers = {peer: infos[peer] for peer in range(3) if peer != rank}
            numbers = {peer: counts[min(peer, rank), max(peer, rank)] for peer in peers}
            return listeners[rank].connect(rank, peers, names, 10.0, connections=numbers)

        with ThreadPoolExecutor(3) as threads:
            made = list(threads.map(connect, range(3)))
        for listener in listeners:
            listener.close()
        ends = {
            (rank, peer, number): stack.enter_context(socket.socket(fileno=fd))
            for rank, of_rank in enumerate(made)
            for peer, fds in of_rank.items()
            for number, fd in enumerate(fds)
        }
        assert len(ends) == 2 * sum(counts.values())
        for (rank, _, number), end in ends.items():
            end.sendall(f"{rank} {number}".encode())
        for (_, peer, number), end in ends.items():
            end.settimeout(5)
            assert end.recv(10).decode() == f"{peer} {number}"


def test_a_measured_rate_takes_the_place_of_the_assumed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(between_hosts, "_measured_gbit", {})
    assert between_hosts.rate_gbit(0.0, 0.0) == between_hosts.REACHED_GBIT
    assert between_hosts.rate_gbit(0.8, 0.0) == between_hosts.rate_gbit(0.0, 0.8) == 1.0
    assert between_hosts.connections(75, 4 * MIB, 1.0) == between_hosts.MIN_FAR_CONNECTIONS
    assert between_hosts.connections(75, 4 * MIB, 10.0) == between_hosts.MAX_CONNECTIONS
    assert [between_hosts.slot_bytes(75, gbit) // MIB for gbit in (1.0, 2.0, 5.0, 10.0)] == [2, 4, 16, 16]
    between_hosts.remember("a host", 1e8)
    between_hosts.remember("a host", 0.0)  # not measured
    assert between_hosts.measured_gbit("a host") == pytest.approx(0.8)
    assert between_hosts.measured_gbit("another host") == 0
