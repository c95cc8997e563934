"""Emulated links: DTCOMM_LINK makes the runtimes deliver no byte earlier than such a link would.

``10gbit,50us`` is a rate (bit/s: kbit, mbit, gbit, tbit) and, after a comma, a latency (ns, us, ms, s; 0 if left out);
every rank then has a network card of its own, also where ranks share a host. ``inside=400gbit,2us;between=10gbit,50us``
gives a link to each level, inside the hosts and between them; a level that is left out is as fast as the machine.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from dtcomm import env

# Of the 1,538 bytes that a full Ethernet frame takes of the wire, with its gap and preamble, TCP's payload.
PAYLOAD, FRAME = 1448, 1538
_RATES = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
_TIMES = {"ns": 1e9, "us": 1e6, "µs": 1e6, "ms": 1e3, "s": 1.0}  # a second of them
_RATE = re.compile(r"(\d+(?:\.\d+)?)(kbit|mbit|gbit|tbit)")
_LATENCY = re.compile(r"(\d+(?:\.\d+)?)(ns|us|µs|ms|s)")


@dataclass(frozen=True, kw_only=True)
class Link:
    """``bits_per_second`` on the wire, frames and all; ``latency_s`` one way."""

    bits_per_second: float
    latency_s: float = 0.0

    @property
    def ns_per_byte(self) -> float:
        """What a byte of payload takes."""
        return 8e9 / self.bits_per_second * FRAME / PAYLOAD

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
    if len(words) > 2:
        raise _wrong(text, f"{said!r} is more than a rate and a latency")
    seconds = 0.0
    if len(words) == 2:
        latency = _LATENCY.fullmatch(words[1])
        if latency is None:
            raise _wrong(text, f"{words[1]!r} is not a latency such as 50us")
        seconds = float(latency[1]) / _TIMES[latency[2]]
    return Link(bits_per_second=float(rate[1]) * _RATES[rate[2]], latency_s=seconds)


def _wrong(text: str, why: str) -> ValueError:
    return ValueError(
        f"DTCOMM_LINK={text!r}: {why}; valid are '10gbit,50us' and 'inside=400gbit,2us;between=10gbit,50us'"
    )
