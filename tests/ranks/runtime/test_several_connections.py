"""Ranks with several connections to each other: the same results and errors as with one, also after some have ended."""

import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from typing import Any
from unittest import mock

import pytest
import torch

import dtcomm.collectives as C
from dtcomm.errors import CollectiveMismatch, CollectiveTimeout, DtcommError, PeerLost
from dtcomm.launch.ranks import run_ranks, spawn_ranks
from dtcomm.runtime.bootstrap import between_hosts
from dtcomm.runtime.bootstrap.tcp import Listener
from tests.ranks.runtime.test_sockets import broadcast_and_leave, reduce_unequal_sizes, reduce_until_failure
from tests.unit.runtime.every_collective import calls

SEVERAL = {"DTCOMM_TRANSPORT": "sockets", "DTCOMM_CONNECTIONS": "3"}


def compare_with_one(rank: int, world_size: int, round_trip_ms: float) -> dict[str, Any]:
    """Call every collective with one connection to each rank near by, and with three to ranks so far away."""
    results, infos = {}, {}
    os.environ.update(SEVERAL)
    if round_trip_ms:
        os.environ["DTCOMM_HOST_ID"] = f"host {rank}"
    for connections, milliseconds in (("1", 0.0), ("3", round_trip_ms)):
        os.environ["DTCOMM_CONNECTIONS"] = connections
        measure = mock.patch.object(
            between_hosts, "round_trip_ms", lambda peers, to_each=milliseconds: [to_each] * len(peers)
        )
        with measure:
            results[connections] = calls(rank, world_size, specs=("none", "int8"), sizes=(1, 200_001))
            infos[connections] = C.info()
        C.release()
    same = [torch.equal(a, b) for a, b in zip(results["1"], results["3"], strict=True)]
    return {"same": all(same), "one": infos["1"], "several": infos["3"]}


@pytest.mark.parametrize("round_trip_ms", [0.0, 75.0], ids=["near", "far"])
def test_same_bits_and_bytes_as_with_one_connection(round_trip_ms: float) -> None:
    for report in run_ranks(compare_with_one, 3, round_trip_ms):
        one, several = report["one"], report["several"]
        assert report["same"] and one["transport"] == several["transport"] == "sockets"
        assert (one["connections"], several["connections"]) == (1, 3)
        assert (one["round_trip_ms"], several["round_trip_ms"]) == (0.0, round_trip_ms)
        assert one["wire_bytes"] == several["wire_bytes"]


def number_of_connections(rank: int, world_size: int, variables: dict[str, str], round_trip_ms: float) -> int:
    os.environ.update(variables)
    os.environ["DTCOMM_HOST_ID"] = f"host {rank}"
    with mock.patch.object(between_hosts, "round_trip_ms", lambda peers: [round_trip_ms * rank] * len(peers)):
        C.all_reduce(torch.ones(10))
    return int(C.info()["connections"])


def test_the_number_follows_the_longer_one_of_what_the_ends_measured() -> None:
    assert run_ranks(number_of_connections, 2, {}, 0.1) == [1, 1]
    far = run_ranks(number_of_connections, 2, {}, 50.0)
    assert far == [far[0]] * 2 and far[0] >= between_hosts.MIN_FAR_CONNECTIONS
    assert run_ranks(number_of_connections, 2, {"DTCOMM_CONNECTIONS": "1"}, 50.0) == [1, 1]
    assert run_ranks(number_of_connections, 2, {"DTCOMM_EMULATE_LINK": "10gbit,50us"}, 50.0) == [1, 1]


def number_after_a_measurement(rank: int, world_size: int) -> list[int]:
    """The connections of two communicators; between the two rank 1 measures 20 Gbit/s."""
    os.environ["DTCOMM_HOST_ID"] = f"host {rank}"
    numbers = []
    with mock.patch.object(between_hosts, "round_trip_ms", lambda peers: [40.0] * len(peers)):
        for measured in (0.0, 20.0 * rank):
            with mock.patch.object(between_hosts, "measured_gbit", lambda host, gbit=measured: gbit):
                C.all_reduce(torch.ones(10))
                numbers.append(int(C.info()["connections"]))
            C.release()
    return numbers


def test_later_communicators_take_the_rate_that_one_end_has_measured() -> None:
    first, second = run_ranks(number_after_a_measurement, 2)
    assert first == second and first[0] < first[1] == between_hosts.MAX_CONNECTIONS


def differ_in_the_variable(rank: int, world_size: int) -> str:
    os.environ["DTCOMM_CONNECTIONS"] = str(rank + 1)
    with pytest.raises(CollectiveMismatch) as raised:
        C.all_reduce(torch.ones(10))
    return str(raised.value)


def test_ranks_with_other_numbers_are_told() -> None:
    for text in run_ranks(differ_in_the_variable, 2, env={"DTCOMM_TRANSPORT": "sockets"}):
        assert "DTCOMM_CONNECTIONS" in text


def keep_connections(made: list[int]) -> Any:
    """Record duplicates of the connections that the engine is given, so that a test can end them."""
    connect = Listener.connect

    def connect_and_record(self: Listener, *arguments: Any) -> dict[int, list[int]]:
        connected = connect(self, *arguments)
        made.extend(os.dup(fd) for fds in connected.values() for fd in fds)
        return connected

    return mock.patch.object(Listener, "connect", connect_and_record)


def reduce_while_connections_end(
    rank: int, world_size: int, ended: list[int], by_kernel: bool
) -> tuple[list[bool], str]:
    """Rank 0 ends some of its connections to rank 1, one after the other, in the middle of operations."""
    fds: list[int] = []
    with keep_connections(fds):
        C.all_reduce(torch.ones(10))
    ends = [socket.socket(fileno=fd) for fd in fds]
    right, finished, error = [], threading.Event(), ""

    def end_connections() -> None:
        for number in ended:
            time.sleep(0.05)
            if by_kernel:
                port = ends[number].getsockname()[1]
                other = ends[number].getpeername()[1]
                subprocess.run(
                    ["ss", "-K", "sport", "=", f":{port}", "and", "dport", "=", f":{other}"],
                    check=True,
                    capture_output=True,
                )
            else:
                ends[number].shutdown(socket.SHUT_RDWR)
        finished.set()

    if rank == 0:
        threading.Thread(target=end_connections).start()
    try:
        stop = torch.zeros(1)
        while not stop.item():
            for codec in ("none", "int8"):
                x = torch.full((1_000_000,), float(rank + 1))
                C.all_reduce(x, codec=codec)
                right.append(bool(x.sub(3).abs().max() < 0.1))
            stop[0] = float(finished.is_set())
            C.all_reduce(stop)
        C.all_gather(gathered := torch.empty(2000), torch.full((1000,), float(rank)))
        right.append(bool(gathered.mean() == 0.5))
        # An engine notices the end of a connection when it next looks at it: that none is missing says little.
        deadline = time.monotonic() + 20
        while (info := C.info())["restored_connections"] < len(ended) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert (info["missing_connections"], info["restored_connections"]) == (0, len(ended)), info
    except DtcommError as failure:
        error = f"{type(failure).__name__}: {failure}"
    for end in ends:
        end.close()
    C.release()
    return right, error


def can_kill_sockets() -> bool:
    """Whether ss may end connections here: it needs root and a kernel that was built for it."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as connection:
            port = connection.getsockname()[1]
            if shutil.which("ss") is None:
                return False
            subprocess.run(["ss", "-K", "sport", "=", f":{port}"], check=False, capture_output=True)
            connection.setblocking(False)
            try:
                connection.recv(1)
            except BlockingIOError:
                return False
            except OSError:
                return True
            return True


@pytest.mark.parametrize(
    "ended",
    [[2], [0], [1, 0, 3], [1, 0, 3, 2]],
    ids=["payloads", "short frames", "all but one", "all"],
)
def test_a_message_survives_the_end_of_connections(ended: list[int]) -> None:
    for right, error in run_ranks(reduce_while_connections_end, 2, ended, False, env=SEVERAL):
        assert error == "" and len(right) > 2 and all(right)


def test_a_message_survives_connections_that_the_kernel_ends() -> None:
    """With a reset at both ends, so that what lies in the buffers of the kernel is lost."""
    if not can_kill_sockets():
        pytest.skip("ss -K cannot end connections here")
    for right, error in run_ranks(reduce_while_connections_end, 2, [2, 0, 1, 3], True, env=SEVERAL):
        assert error == "" and len(right) > 2 and all(right)


@pytest.mark.parametrize("sig", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_rank_is_named(sig: signal.Signals) -> None:
    killed = sig == signal.SIGKILL
    kind, limit = (PeerLost, 2.0) if killed else (CollectiveTimeout, 5.0)
    with spawn_ranks(
        reduce_until_failure, 3, False, env=SEVERAL, group_timeout=30.0 if killed else 2.0
    ) as ranks:
        for rank in range(3):
            assert ranks.receive(rank) == "ready"
        time.sleep(0.2)
        ranks.kill(1, sig)
        for rank in (0, 2):
            name, text, elapsed = ranks.receive(rank)
            assert name == kind.__name__ and "rank 1 (" in text, text
            assert elapsed.within(cpu_s=limit, wall_s=5 * limit), elapsed


def test_messages_arrive_after_their_sender_has_left() -> None:
    assert run_ranks(broadcast_and_leave, 2, env=SEVERAL) == [0.0, 0.0]


def test_mismatch_names_the_ranks_and_their_calls() -> None:
    for text in run_ranks(reduce_unequal_sizes, 3, env=SEVERAL):
        assert "1000 float32" in text and "1001 float32" in text
