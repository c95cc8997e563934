"""A link with a long round trip between two network namespaces: TUN interfaces and a process that delays packets.

The kernel of a container may lack netem. Here each namespace has a TUN interface, limited to a rate by tbf, and a relay
process reads the packets of one interface, keeps them for half of the round trip, and writes them to the other one.
What the kernel sees is IP packets that take long, so TCP's windows and congestion control act as between two sites.

As to a network card that cuts and joins segments, the kernel gives the relay up to 64 KiB of a connection at once, with
a header that says how they are to be cut; else the relay of one core would be the limit from about 4 Gbit/s on. If
packets are to be lost, they are passed on one by one.
"""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import random
import select
import struct
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection

from bench.common import netns

_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI, _IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
_TUNSETOFFLOAD = 0x400454D0
_TUN_F_CSUM, _TUN_F_TSO4, _TUN_F_TSO6 = 0x01, 0x02, 0x04
_LARGEST = 65536 + 64  # bytes of a packet, and of the header before it
RELAY = "dtcomm-relay"  # the name of its process
_PACKETS = 64  # read from one interface before the other one has its turn


def why_unavailable() -> str:
    """Return why such a link cannot be made here, or an empty string."""
    if reason := netns.why_unavailable():
        return reason
    return "" if os.access("/dev/net/tun", os.R_OK | os.W_OK) else "/dev/net/tun is missing"


@contextmanager
def two_sites(
    gbit: float,
    round_trip_ms: float,
    *,
    loss: float = 0.0,
    mtu: int = 9000,
    congestion_control: str = "bbr",
) -> Iterator[list[str]]:
    """Create two namespaces, joined by the interface ``dt0`` with addresses 10.77.0.1 and 10.77.0.2.

    Args:
        gbit: The rate in Gbit/s in each direction; 0: no limit but the relay's, a few Gbit/s.
        round_trip_ms: The round trip in milliseconds.
        loss: The share of packets that are lost, such as 0.0001.
        mtu: The largest packet in bytes.
        congestion_control: TCP's, as the kernel calls it. BBR suits such links: CUBIC takes each loss for congestion.

    Yields:
        The names of the namespaces, which are deleted at the end.
    """
    names = [netns.name_of(0), netns.name_of(1)]
    context = multiprocessing.get_context("spawn")
    with netns.namespaces_of(names, congestion_control):
        ours, theirs = context.Pipe()
        relay = context.Process(
            target=_relay, args=(theirs, names, round_trip_ms / 2e3, loss), name=RELAY, daemon=True
        )
        relay.start()
        theirs.close()
        try:
            error = ours.recv() if ours.poll(60) else "no answer"
            if error:
                raise OSError(f"the relay did not start: {error}")
            for number, name in enumerate(names):
                netns.run_command(
                    "ip", "-n", name, "link", "set", "dt0", "mtu", str(mtu), "txqueuelen", "10000"
                )
                netns.configure_link(name, "dt0", number, gbit)
            yield names
        finally:
            ours.close()  # the relay ends
            relay.join(5)
            if relay.is_alive():
                relay.kill()
                relay.join()


def _relay(parent: Connection, names: list[str], delay_s: float, loss: float) -> None:
    """Pass packets on until the parent closes its end."""
    try:
        ends = [_open_tun(name, joins=not loss) for name in names]
    except OSError as error:
        parent.send(str(error))
        return
    parent.send("")
    chance = random.Random(0)
    queues: list[deque[tuple[float, bytes]]] = [deque(), deque()]  # to be written to the other end
    poll = select.poll()
    for end in ends:
        poll.register(end, select.POLLIN)
    poll.register(parent.fileno(), select.POLLIN)
    while True:
        now = time.monotonic()
        next_due = min((queue[0][0] for queue in queues if queue), default=now + 1)
        ready = {descriptor for descriptor, _ in poll.poll(max(0.0, next_due - now) * 1e3)}
        if parent.fileno() in ready:
            return
        for index, end in enumerate(ends):
            if end in ready:
                due = time.monotonic() + delay_s
                with suppress(BlockingIOError):
                    for _ in range(_PACKETS):
                        packet = os.read(end, _LARGEST)
                        if not loss or chance.random() >= loss:
                            queues[index].append((due, packet))
        now = time.monotonic()
        for index, queue in enumerate(queues):
            while queue and queue[0][0] <= now:
                with suppress(OSError):  # the interface is going down
                    os.write(ends[1 - index], queue.popleft()[1])


def _open_tun(namespace: str, joins: bool) -> int:
    """Make the interface dt0 in a namespace; it stays there when this thread goes back.

    Args:
        namespace: The namespace.
        joins: Whether segments of a connection come and go together, as one packet behind a header.
    """
    with open("/proc/self/ns/net") as home:
        netns.enter_namespace(namespace)
        try:
            descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            flags = _IFF_TUN | _IFF_NO_PI | (_IFF_VNET_HDR if joins else 0)
            fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", b"dt0", flags))
            if joins:
                fcntl.ioctl(descriptor, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4 | _TUN_F_TSO6)
        finally:
            netns.set_namespace(home.fileno(), "the original namespace")
    return descriptor
