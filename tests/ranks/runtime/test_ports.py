"""DTCOMM_PORTS: the ports on which ranks listen for the engine's connections."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import stat
from collections.abc import Iterator

import pytest
import torch

import dtcomm.collectives as C
from dtcomm import env
from dtcomm.errors import DtcommError
from dtcomm.launch.ranks import run_ranks
from dtcomm.runtime.bootstrap.tcp import Listener


@contextlib.contextmanager
def _listening(ports: range) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for port in ports:
            stack.enter_context(socket.create_server(("", port)))
        yield


def _free_ports(count: int) -> range:
    """Consecutive ports on which nothing listens, below those that the kernel gives to clients."""
    for _ in range(100):
        first = random.randrange(15000, 30000)
        ports = range(first, first + count)
        with contextlib.suppress(OSError), _listening(ports):
            return ports
    raise AssertionError("no free ports")


def _text(ports: range) -> str:
    return f"{ports[0]}-{ports[-1]}"


def _connected_ports() -> list[tuple[int, int]]:
    """The local and the remote port of each TCP connection of this process."""
    connections = []
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not stat.S_ISSOCK(os.stat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.family in (socket.AF_INET, socket.AF_INET6):
                    connections.append((connection.getsockname()[1], connection.getpeername()[1]))
    return connections


def _reduce(rank: int, world_size: int) -> tuple[dict[str, object], list[tuple[int, int]]]:
    os.environ["DTCOMM_HOST_ID"] = f"host {rank}"
    x = torch.ones(1000)
    C.all_reduce(x)
    assert x.eq(world_size).all()
    return C.info(), _connected_ports()


def test_all_connections_of_the_engine_use_the_range() -> None:
    ports = _free_ports(4)
    with _listening(ports[:1]):  # one of them is in use
        results = run_ranks(_reduce, 3, env={"DTCOMM_PORTS": _text(ports)})
    for rank, (info, connections) in enumerate(results):
        assert info["transport"] == "sockets", info
        accepted = [local for local, _ in connections if local in ports]
        connected = [remote for _, remote in connections if remote in ports]
        assert (len(accepted), len(connected)) == (2 - rank, rank), connections
        assert ports[0] not in (*accepted, *connected)


def _reduce_or_error(rank: int, world_size: int, hosts: bool) -> str:
    if hosts:
        os.environ["DTCOMM_HOST_ID"] = f"host {rank}"
    try:
        C.all_reduce(torch.ones(10))
    except (DtcommError, ValueError) as error:
        return str(error)
    return str(C.info()["transport"])


def test_a_range_with_too_few_free_ports_is_an_error_on_all_ranks_that_need_connections() -> None:
    ports = _free_ports(1)
    for text in run_ranks(_reduce_or_error, 2, True, env={"DTCOMM_PORTS": str(ports[0])}):
        assert f"all 1 ports of DTCOMM_PORTS={ports[0]} are in use at" in text
        assert "each rank of a host needs one" in text
    # Ranks that share memory close their listening sockets before they communicate: one port is enough.
    assert run_ranks(_reduce_or_error, 2, False, env={"DTCOMM_PORTS": str(ports[0])}) == ["memory", "memory"]


def test_ranks_with_different_ranges_are_refused() -> None:
    for text in run_ranks(_reduce_with_own_range, 2):
        assert (
            'DTCOMM_ variables: rank 0: {"DTCOMM_PORTS": "20000-20100"}; rank 1: {"DTCOMM_PORTS": "20001-'
            in text
        )


def _reduce_with_own_range(rank: int, world_size: int) -> str:
    os.environ["DTCOMM_PORTS"] = f"2000{rank}-20100"
    return _reduce_or_error(rank, world_size, True)


@pytest.mark.parametrize(
    "value", ["20000:20100", "20100-20000", "0-10", "65000-65536", "20000-", "many", "-1"]
)
def test_malformed_ranges_are_refused(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("DTCOMM_PORTS", value)
    with pytest.raises(ValueError, match=f"DTCOMM_PORTS='{value}': expected .* such as 20000-20100"):
        env.get("DTCOMM_PORTS")
    with pytest.raises(ValueError, match="DTCOMM_PORTS"):
        Listener()


def test_a_port_that_may_not_be_opened_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(address: tuple[str, int], **options: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setenv("DTCOMM_PORTS", "80")
    monkeypatch.setattr(socket, "create_server", refuse)
    with pytest.raises(OSError, match=r"cannot listen at .*:80: Permission denied"):
        Listener()
