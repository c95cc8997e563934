"""Two "hosts" on one machine: network namespaces joined by a cable of a given rate.

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
    try:
        for name in names:
            _run("ip", "netns", "add", name)
        _run("ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for number, (name, end) in enumerate(zip(names, ends)):
            _run("ip", "link", "set", end, "netns", name)
            inside = ("ip", "-n", name)
            _run(*inside, "link", "set", end, "name", "dt0")
            _run(*inside, "addr", "add", f"10.77.0.{number + 1}/24", "dev", "dt0")
            _run(*inside, "link", "set", "lo", "up")
            _run(*inside, "link", "set", "dt0", "up")
            burst = max(128 * 1024, int(gbit * 1e9 / 8 * burst_ms * 1e-3))
            shape = ("rate", f"{int(gbit * 1000)}mbit", "burst", str(burst), "latency", "100ms")
            _run("tc", "-n", name, "qdisc", "add", "dev", "dt0", "root", "tbf", *shape)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def enter(name: str) -> None:
    """This process's sockets are made in the namespace from now on. OSError where that is not allowed."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{name}") as handle:
        if libc.setns(handle.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns to {name}")


def join(rank: int, ranks: int, rendezvous: str, namespaces: list[str]) -> None:
    """Make this process a rank, in a namespace of its own, of a Gloo group that meets in a file."""
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
