"""Several "hosts" on one machine: network namespaces joined by cables of a given rate.

Traffic stays on the machine. Making namespaces takes root and iproute2; `available` says what is missing.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

_CLONE_NEWNET = 0x40000000


def available() -> str:
    """Empty, or why there can be no namespaces here."""
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "ip and tc are missing: on Debian and Ubuntu, apt install iproute2"
    made = subprocess.run(["ip", "netns", "add", _name(99)], capture_output=True, text=True)
    if made.returncode != 0:
        return f"ip netns add: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", _name(99)], check=False)
    return ""


@contextmanager
def two_hosts(gbit: float, *, burst_ms: float = 4.0) -> Iterator[list[str]]:
    """The names of two namespaces whose interface ``dt0`` runs at so many Gbit/s each way.

    After a rest it carries what takes ``burst_ms`` milliseconds at once (128 KiB at least). 4: enough for the kernel's
    ticks, too little to hide the rate.
    """
    names = [_name(0), _name(1)]
    ends = [f"{name}v" for name in names]
    with _namespaces(names):
        _run("ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for number, (name, end) in enumerate(zip(names, ends)):
            _run("ip", "link", "set", end, "netns", name)
            _plug(name, end, number, gbit, burst_ms)
        yield names


@contextmanager
def many_hosts(count: int, gbit: float, *, burst_ms: float = 4.0) -> Iterator[list[str]]:
    """As ``two_hosts``, but any number, joined by a switch (a bridge in a namespace of its own)."""
    names, switch = [_name(number) for number in range(count)], _name(90)
    with _namespaces([*names, switch]):
        _run("ip", "-n", switch, "link", "add", "switch", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "switch", "up")
        for number, name in enumerate(names):
            port = f"port{number}"
            peer = ("peer", "name", "cable", "netns", name)
            _run("ip", "-n", switch, "link", "add", port, "type", "veth", *peer)
            _run("ip", "-n", switch, "link", "set", port, "master", "switch", "up")
            _plug(name, "cable", number, gbit, burst_ms)
        yield names


@contextmanager
def _namespaces(names: list[str]) -> Iterator[None]:
    try:
        for name in names:
            _run("ip", "netns", "add", name)
        yield
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _plug(name: str, end: str, number: int, gbit: float, burst_ms: float) -> None:
    """The cable's ``end`` in namespace ``name`` becomes its interface dt0, up, with an address and a rate."""
    inside = ("ip", "-n", name)
    _run(*inside, "link", "set", end, "name", "dt0")
    _run(*inside, "addr", "add", f"10.77.0.{number + 1}/24", "dev", "dt0")
    _run(*inside, "link", "set", "lo", "up")
    _run(*inside, "link", "set", "dt0", "up")
    burst = max(128 * 1024, int(gbit * 1e9 / 8 * burst_ms * 1e-3))
    shape = ("rate", f"{int(gbit * 1000)}mbit", "burst", str(burst), "latency", "100ms")
    _run("tc", "-n", name, "qdisc", "add", "dev", "dt0", "root", "tbf", *shape)


def enter(name: str) -> None:
    """This thread's sockets, and those of threads it makes, are made in the namespace from now on. OSError where that
    is not allowed.
    """
    with open(f"/run/netns/{name}") as handle:
        _switch(handle.fileno(), name)


def _switch(namespace: int, what: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), f"setns to {what}")


@contextmanager
def visit(rank: int, ranks: int, rendezvous: str, namespaces: list[str]) -> Iterator[None]:
    """``join`` for the time of the block; then the group is gone and this thread back in its own namespace."""
    with open("/proc/self/ns/net") as home:
        try:
            join(rank, ranks, rendezvous, namespaces)
            yield
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            _switch(home.fileno(), "its own namespace")


def join(rank: int, ranks: int, rendezvous: str, namespaces: list[str]) -> None:
    """Make this process a rank, in the namespace listed for it, of a Gloo group that meets in a file."""
    enter(namespaces[rank])
    os.environ["GLOO_SOCKET_IFNAME"] = "dt0"
    os.environ["DTCOMM_HOST_ID"] = namespaces[rank]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=60),
    )


def _name(number: int) -> str:
    return f"dt{os.getpid() % 100000}n{number}"


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
