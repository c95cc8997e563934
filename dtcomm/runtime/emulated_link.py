"""Emulated links: DTCOMM_LINK makes the runtimes deliver no byte earlier than such a link would.

``10gbit,50us`` is a rate (bit/s: kbit, mbit, gbit, tbit) and, after a comma, a latency (ns, us, ms, s; 0 if left out);
every rank then has a network card of its own, also where ranks share a host. ``inside=400gbit,2us;between=10gbit,50us``
gives a link to each level, inside the hosts and between them; a level that is left out is as fast as the machine.

What the network stack of the kernel costs either end is spent too, where the bytes do not really go through one: up to
50 Gbit/s hosts are taken to talk TCP, above it past the kernel (RDMA). ``tcp``, ``rdma`` or a cost of one's own as a
third word (``10gbit,50us,0.5ns/byte``) says otherwise.
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

# Of the 1,538 bytes that a full Ethernet frame takes of the wire, with its gap and preamble, TCP's payload.
PAYLOAD, FRAME = 1448, 1538
_RATES = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
_TIMES = {"ns": 1e9, "us": 1e6, "µs": 1e6, "ms": 1e3, "s": 1.0}  # a second of them
_RATE = re.compile(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit|tbit)")
_LATENCY = re.compile(r"(\d+(?:\.\d+)?)(ns|us|µs|ms|s)")
_COST = re.compile(r"(\d+(?:\.\d+)?)ns/b(?:yte)?")
MOST_TCP = 50e9  # bits a second, above which hosts talk past the kernel
_TRIAL_BYTES, _TRIAL_PIECE, _TRIALS = 8 << 20, 256 << 10, 3


@dataclass(frozen=True, kw_only=True)
class Link:
    """``bits_per_second`` on the wire, frames and all; ``latency_s`` one way.

    ``cost``: nanoseconds of CPU time that a byte takes at either end; None: those of TCP, as far as the rate lets.
    """

    bits_per_second: float
    latency_s: float = 0.0
    cost: float | None = None

    @property
    def ns_per_byte(self) -> float:
        """What a byte of payload takes."""
        return 8e9 / self.bits_per_second * FRAME / PAYLOAD

    def cpu_ns_per_byte(self) -> float:
        """At either end; where it is TCP's it is measured at the first call."""
        if self.cost is not None:
            return self.cost
        return tcp_ns_per_byte() if self.bits_per_second <= MOST_TCP else 0.0

    @property
    def latency_ns(self) -> int:
        """One way."""
        return round(self.latency_s * 1e9)


@dataclass(frozen=True, kw_only=True)
class Links:
    """The link of each level; None: as fast as the machine."""

    inside: Link | None = None
    between: Link | None = None

    def __bool__(self) -> bool:
        return self.inside is not None or self.between is not None


def parse(text: str) -> Links:
    """What DTCOMM_LINK says; ValueError where it says something else. Empty: no link."""
    text = text.strip().lower()
    if not text:
        return Links()
    if "=" not in text:
        link = _link(text, text)
        return Links(inside=link, between=link)
    levels: dict[str, Link] = {}
    for part in text.split(";"):
        name, _, said = part.partition("=")
        name = name.strip()
        if name not in ("inside", "between") or name in levels:
            raise _wrong(text, f"{name!r} is not one of inside, between, each at most once")
        levels[name] = _link(said, text)
    return Links(**levels)


def links() -> Links:
    """Of this process."""
    return parse(env.get("DTCOMM_LINK"))


@functools.cache
def tcp_ns_per_byte() -> float:
    """CPU time of a byte at either end of a TCP connection, by sending some over this machine's loopback: 20 ms."""
    source, target = memoryview(b"\1" * _TRIAL_BYTES), memoryview(bytearray(b"\1" * _TRIAL_BYTES))
    with socket.create_server(("127.0.0.1", 0)) as server:
        sender = socket.create_connection(server.getsockname())
        receiver, _ = server.accept()
    with sender, receiver:
        sender.setblocking(False)
        receiver.settimeout(10)
        return statistics.median(_trial(sender, receiver, source, target) for _ in range(_TRIALS))


def _trial(sender: socket.socket, receiver: socket.socket, source: memoryview, target: memoryview) -> float:
    # From memory to memory, as a tensor's pieces go: what lies in a cache would cost a third.
    begin, sent, received = time.thread_time_ns(), 0, 0
    while received < len(target):
        try:
            sent += sender.send(source[sent : sent + _TRIAL_PIECE])
        except BlockingIOError:
            pass  # there is enough under way
        if sent > received:
            received += receiver.recv_into(target[received : received + _TRIAL_PIECE])
    return (time.thread_time_ns() - begin) / len(target) / 2


def machine() -> str:
    """The same for all processes whose clocks agree."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _link(said: str, text: str) -> Link:
    words = [word.strip() for word in said.split(",")]
    rate = _RATE.fullmatch(words[0])
    if rate is None or float(rate[1]) == 0:
        raise _wrong(text, f"{words[0]!r} is not a rate such as 10gbit")
    if len(words) > 3:
        raise _wrong(text, f"{said!r} is more than a rate, a latency and a cost")
    seconds = 0.0
    if len(words) > 1:
        latency = _LATENCY.fullmatch(words[1])
        if latency is None:
            raise _wrong(text, f"{words[1]!r} is not a latency such as 50us")
        seconds = float(latency[1]) / _TIMES[latency[2]]
    bits = float(rate[1]) * _RATES[rate[2]]
    return Link(
        bits_per_second=bits, latency_s=seconds, cost=_cost(words[2], text) if len(words) > 2 else None
    )


def _cost(word: str, text: str) -> float:
    if word in ("tcp", "rdma"):
        return tcp_ns_per_byte() if word == "tcp" else 0.0
    found = _COST.fullmatch(word)
    if found is None:
        raise _wrong(text, f"{word!r} is not tcp, rdma, or a cost such as 0.5ns/byte")
    return float(found[1])


def _wrong(text: str, why: str) -> ValueError:
    return ValueError(
        f"DTCOMM_LINK={text!r}: {why}; valid are '10gbit,50us' and 'inside=400gbit,2us;between=10gbit,50us'"
    )
