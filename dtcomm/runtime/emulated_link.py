"""Emulated links: with DTCOMM_EMULATE_LINK the native engine delivers no byte earlier than such a link would.

``10gbit,50us`` is a rate (bit/s: kbit, mbit, gbit, tbit) and after a comma a latency (ns, us, ms, s; 0 if left out).
Every rank then has a network card of its own, also where ranks share a host. ``inside=400gbit,2us;between=10gbit,50us``
gives a link to each level, inside the hosts and between them; a level that is left out is as fast as the machine.

The CPU time that the kernel's network stack takes at either end is spent too, where bytes do not go through one: up to
50 Gbit/s hosts are assumed to use TCP, above that RDMA, which bypasses the kernel. ``tcp``, ``rdma`` or a cost such as
``0.5ns/byte`` as a third field (``10gbit,50us,0.5ns/byte``) overrides that.
"""

from __future__ import annotations

import functools
import re
import socket
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from dtcomm import env

# TCP payload in the 1,538 bytes that a full Ethernet frame takes on the wire with its gap and preamble.
PAYLOAD, FRAME = 1448, 1538
_RATES = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
_TIMES = {"ns": 1e9, "us": 1e6, "µs": 1e6, "ms": 1e3, "s": 1.0}  # per second
_RATE = re.compile(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit|tbit)")
_LATENCY = re.compile(r"(\d+(?:\.\d+)?)(ns|us|µs|ms|s)")
_COST = re.compile(r"(\d+(?:\.\d+)?)ns/b(?:yte)?")
MAX_TCP_RATE = 50e9  # bits per second; faster hosts are assumed to bypass the kernel
_TRIAL_BYTES, _TRIAL_PIECE, _TRIALS = 8 << 20, 256 << 10, 3


@dataclass(frozen=True, kw_only=True)
class Link:
    """One emulated link.

    Attributes:
        bits_per_second: The rate on the wire, frame headers included.
        latency_s: The latency in one direction, in seconds.
        cost: Nanoseconds of CPU time that a byte takes at either end; None: TCP's up to ``MAX_TCP_RATE``, else 0.
    """

    bits_per_second: float
    latency_s: float = 0.0
    cost: float | None = None

    @property
    def ns_per_byte(self) -> float:
        """Nanoseconds that a byte of payload takes on the wire."""
        return 8e9 / self.bits_per_second * FRAME / PAYLOAD

    def cpu_ns_per_byte(self) -> float:
        """Nanoseconds of CPU time of a byte at either end; that of TCP is measured at the first call."""
        if self.cost is not None:
            return self.cost
        return tcp_ns_per_byte() if self.bits_per_second <= MAX_TCP_RATE else 0.0

    @property
    def latency_ns(self) -> int:
        """The latency in one direction, in nanoseconds."""
        return round(self.latency_s * 1e9)


@dataclass(frozen=True, kw_only=True)
class Links:
    """The links inside hosts and between them; None is as fast as the machine."""

    inside: Link | None = None
    between: Link | None = None

    def __bool__(self) -> bool:
        return self.inside is not None or self.between is not None


def parse(text: str, source: str = "DTCOMM_EMULATE_LINK") -> Links:
    """The links that the text describes, none if it is empty; ValueError that names ``source`` if it is not valid."""
    text = text.strip().lower()
    if not text:
        return Links()
    if "=" not in text:
        link = _link(text, text, source)
        return Links(inside=link, between=link)
    levels: dict[str, Link] = {}
    for part in text.split(";"):
        name, _, description = part.partition("=")
        name = name.strip()
        if name not in ("inside", "between") or name in levels:
            raise _wrong(source, text, f"{name!r} is not one of inside, between, each at most once")
        levels[name] = _link(description, text, source)
    return Links(**levels)


def links() -> Links:
    """The links that DTCOMM_EMULATE_LINK describes."""
    return parse(env.get("DTCOMM_EMULATE_LINK"))


@functools.cache
def tcp_ns_per_byte() -> float:
    """CPU time of a byte at either end of a TCP connection, measured over the loopback in about 20 ms."""
    source, target = memoryview(b"\1" * _TRIAL_BYTES), memoryview(bytearray(b"\1" * _TRIAL_BYTES))
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        receiver, _ = server.accept()
    with sender, receiver:
        sender.setblocking(False)
        receiver.settimeout(10)
        return statistics.median(_trial(sender, receiver, source, target) for _ in range(_TRIALS))


def _trial(sender: socket.socket, receiver: socket.socket, source: memoryview, target: memoryview) -> float:
    # From memory to memory, as the pieces of a tensor: bytes in a cache would cost a third.
    begin, sent, received = time.thread_time_ns(), 0, 0
    while received < len(target):
        try:
            sent += sender.send(source[sent : sent + _TRIAL_PIECE])
        except BlockingIOError:
            pass  # the socket's buffer is full
        if sent > received:
            received += receiver.recv_into(target[received : received + _TRIAL_PIECE])
    return (time.thread_time_ns() - begin) / len(target) / 2


def machine() -> str:
    """A string that is equal for all processes whose monotonic clocks agree."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _link(description: str, text: str, source: str) -> Link:
    words = [word.strip() for word in description.split(",")]
    rate = _RATE.fullmatch(words[0])
    if rate is None or float(rate[1]) == 0:
        raise _wrong(source, text, f"{words[0]!r} is not a rate such as 10gbit")
    if len(words) > 3:
        raise _wrong(source, text, f"{description!r} is more than a rate, a latency and a cost")
    seconds = 0.0
    if len(words) > 1:
        latency = _LATENCY.fullmatch(words[1])
        if latency is None:
            raise _wrong(source, text, f"{words[1]!r} is not a latency such as 50us")
        seconds = float(latency[1]) / _TIMES[latency[2]]
    bits = float(rate[1]) * _RATES[rate[2]]
    return Link(
        bits_per_second=bits,
        latency_s=seconds,
        cost=_cost(words[2], text, source) if len(words) > 2 else None,
    )


def _cost(word: str, text: str, source: str) -> float:
    if word in ("tcp", "rdma"):
        return tcp_ns_per_byte() if word == "tcp" else 0.0
    cost = _COST.fullmatch(word)
    if cost is None:
        raise _wrong(source, text, f"{word!r} is not tcp, rdma, or a cost such as 0.5ns/byte")
    return float(cost[1])


def _wrong(source: str, text: str, reason: str) -> ValueError:
    return ValueError(
        f"{source}={text!r}: {reason}; valid are '10gbit,50us' and 'inside=400gbit,2us;between=10gbit,50us'"
    )
