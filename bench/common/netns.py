"""Several emulated hosts on one machine: network namespaces connected by rate-limited veth links.

Used by tests and benchmarks of the TCP transport. Traffic never leaves the machine. Creating namespaces needs root and
iproute2; `why_unavailable` reports what is missing.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist

_CLONE_NEWNET, _CLONE_NEWNS = 0x40000000, 0x00020000
_MS_REC, _MS_SLAVE, _MNT_DETACH = 1 << 14, 1 << 19, 2
# What a limited link passes at once after an idle time. A cable passes nothing: with 4 ms, 1.2 MB at 1 Gbit/s took
# seven tenths of what they take on one. With less, the kernel's timers are late for the next burst: an all_reduce of
# 64 MB at 10 Gbit/s took an eighth longer with 0.2 ms than with 4 ms, and a fortieth longer with 1 ms.
BURST_SECONDS, LEAST_BURST = 1e-3, 128 * 1024
# Linux's default. A machine may have another one: with BBR a single connection carried 6.1 of 10 Gbit/s through such a
# link, with CUBIC 9.6.
CONGESTION_CONTROL = "cubic"
_TCP = "/proc/sys/net/ipv4"


def why_unavailable() -> str:
    """Return why namespaces cannot be created here, or an empty string if they can."""
    if shutil.which("ip") is None or shutil.which("tc") is None:
        return "ip and tc are missing: on Debian and Ubuntu, apt install iproute2"
    created = subprocess.run(["ip", "netns", "add", name_of(99)], capture_output=True, text=True)
    if created.returncode != 0:
        return f"ip netns add: {created.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name_of(99)], check=False)
    return ""


@contextmanager
def two_hosts(gbit: float) -> Iterator[list[str]]:
    """Create two connected namespaces whose interface ``dt0`` is limited to ``gbit`` Gbit/s in each direction.

    After an idle time the link passes at once what it carries in 1 ms, at least 128 KiB. TCP's congestion control is
    CUBIC, whatever the machine has.

    Args:
        gbit: Rate in Gbit/s; 0: no limit.

    Yields:
        The names of the namespaces, which are deleted at the end.
    """
    names = [name_of(0), name_of(1)]
    ends = [f"{name}v" for name in names]
    with namespaces_of(names):
        run_command("ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for number, (name, end) in enumerate(zip(names, ends)):
            run_command("ip", "link", "set", end, "netns", name)
            configure_link(name, end, number, gbit)
        yield names


@contextmanager
def many_hosts(count: int, gbit: float) -> Iterator[list[str]]:
    """Create ``count`` namespaces connected through a bridge in a further namespace; see `two_hosts`."""
    names, switch = [name_of(number) for number in range(count)], name_of(90)
    with namespaces_of([*names, switch]):
        run_command("ip", "-n", switch, "link", "add", "switch", "type", "bridge")
        run_command("ip", "-n", switch, "link", "set", "switch", "up")
        for number, name in enumerate(names):
            port = f"port{number}"
            peer = ("peer", "name", "cable", "netns", name)
            run_command("ip", "-n", switch, "link", "add", port, "type", "veth", *peer)
            run_command("ip", "-n", switch, "link", "set", port, "master", "switch", "up")
            configure_link(name, "cable", number, gbit)
            if gbit:  # what comes from the others together
                limit(switch, port, gbit)
        yield names


@contextmanager
def namespaces_of(names: list[str], congestion_control: str = CONGESTION_CONTROL) -> Iterator[None]:
    """Create namespaces of these names, and delete them at the end.

    Args:
        names: Their names.
        congestion_control: The congestion control of TCP in them, as the kernel calls it.

    Raises:
        OSError: The kernel lacks it.
    """
    try:
        _allow(congestion_control)
        for name in names:
            run_command("ip", "netns", "add", name)
            control = f"echo {congestion_control} > {_TCP}/tcp_congestion_control"
            run_command("ip", "netns", "exec", name, "sh", "-c", control)
        yield
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)


def _allow(congestion_control: str) -> None:
    """Let namespaces have a congestion control: the kernel refuses all but its default unless they are allowed."""
    allowed = Path(f"{_TCP}/tcp_allowed_congestion_control")
    names = allowed.read_text(encoding="ascii").split()
    if congestion_control not in names:
        allowed.write_text(" ".join([*names, congestion_control]), encoding="ascii")


def configure_link(name: str, end: str, number: int, gbit: float) -> None:
    """Rename the link's ``end`` in namespace ``name`` to dt0, bring it up and set its address and rate."""
    inside = ("ip", "-n", name)
    if end != "dt0":
        run_command(*inside, "link", "set", end, "name", "dt0")
    run_command(*inside, "addr", "add", f"10.77.0.{number + 1}/24", "dev", "dt0")
    run_command(*inside, "link", "set", "lo", "up")
    run_command(*inside, "link", "set", "dt0", "up")
    if gbit:
        limit(name, "dt0", gbit)


def limit(namespace: str, interface: str, gbit: float) -> None:
    """Limit what an interface sends to a rate."""
    burst = max(LEAST_BURST, int(gbit * 1e9 / 8 * BURST_SECONDS))
    shape = ("rate", f"{int(gbit * 1000)}mbit", "burst", str(burst), "latency", "100ms")
    run_command("tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", "tbf", *shape)


@contextmanager
def mpirun(namespaces: list[str]) -> Iterator[list[str]]:
    """Yield the command that starts Open MPI with one rank in each of two namespaces of `two_hosts`."""
    with TemporaryDirectory(prefix="dtcomm-mpi-") as folder:
        # Open MPI starts its daemon on the second host through this script, which is given the host and a command.
        (agent := Path(folder) / "agent").write_text(
            f'#!/bin/sh\nshift\nTMPDIR={folder}/remote exec ip netns exec {namespaces[1]} sh -c "$*"\n'
        )
        agent.chmod(0o755)
        (Path(folder) / "remote").mkdir()
        (hosts := Path(folder) / "hosts").write_text("10.77.0.1 slots=1\n10.77.0.2 slots=1\n")
        command = ["ip", "netns", "exec", namespaces[0], "mpirun", "--hostfile", str(hosts)]
        command += ["--map-by", "node", "--bind-to", "none"]
        for name, value in {
            "plm_rsh_agent": str(agent),
            "oob_tcp_if_include": "dt0",
            "btl_tcp_if_include": "dt0",
        }.items():
            command += ["--mca", name, value]
        yield command


def enter_namespace(name: str) -> None:
    """Move this thread, and threads it starts later, into a network namespace.

    Raises:
        OSError: The process lacks the permission.
    """
    with open(f"/run/netns/{name}") as handle:
        set_namespace(handle.fileno(), name)


def mount_own_sysfs() -> None:
    """Show this thread, and threads it starts later, the network devices of their namespace in /sys, where UCX looks.

    Raises:
        OSError: The process lacks the permission.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    for failed in (
        libc.unshare(_CLONE_NEWNS),
        libc.mount(b"none", b"/", None, _MS_REC | _MS_SLAVE, None),
        libc.umount2(b"/sys", _MNT_DETACH),
        libc.mount(b"sysfs", b"/sys", b"sysfs", 0, None),
    ):
        if failed:
            raise OSError(ctypes.get_errno(), "mounting /sys of a network namespace")


def set_namespace(namespace: int, description: str) -> None:
    """Move this thread into the network namespace of a descriptor; errors call it ``description``."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, _CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), f"setns to {description}")


@contextmanager
def temporary_process_group(rank: int, ranks: int, rendezvous: str, namespaces: list[str]) -> Iterator[None]:
    """Run the block as in `init_process_group`; then destroy the group and return to the original namespace."""
    with open("/proc/self/ns/net") as home:
        try:
            init_process_group(rank, ranks, rendezvous, namespaces)
            yield
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            set_namespace(home.fileno(), "the original namespace")


def init_process_group(rank: int, ranks: int, rendezvous: str, namespaces: list[str]) -> None:
    """Enter ``namespaces[rank]``, or stay on this host if there are none, and initialize a Gloo group.

    Args:
        rank: The rank.
        ranks: Number of ranks.
        rendezvous: The file through which they find each other.
        namespaces: A namespace for each rank, or none.
    """
    if namespaces:
        enter_namespace(namespaces[rank])
        os.environ["DTCOMM_HOST_ID"] = namespaces[rank]
    os.environ["GLOO_SOCKET_IFNAME"] = "dt0" if namespaces else "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=60),
    )


def name_of(number: int) -> str:
    """Return the name of a namespace of this process."""
    return f"dt{os.getpid() % 100000}n{number}"


def run_command(*command: str) -> None:
    """Run a command; OSError with what it printed if it fails."""
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
