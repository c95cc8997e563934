"""What a coordinator and its members send to each other.

A message is a JSON object behind its length and an HMAC (`dtcomm.runtime.bootstrap.tcp`). The coordinator
begins with its nonce. The member answers with its own nonce and its facts; the key of this message is made of the
secret and the coordinator's nonce, the key of all later ones of the secret and both nonces. Direction and number are
part of each HMAC, so that messages cannot be repeated.

Requests of a member, each of which is answered when all members of its view have made it:

- ``vote``: whether an average succeeded on this rank. The answer is a `Verdict`.
- ``reform``: make a new view; the answer is a `View`. The first one is the answer to a member's facts.

``ping`` and ``leave`` are not answered.

A member whose connection has ended makes another one, with the same proofs, and the same identity among its facts. It
also says where it is, by the number of its view and of the answers that it has had in that view, and what its last
answer was. The coordinator then repeats an answer that was lost, and the member a request that has no answer; each
request says where it is made, so that one that arrives twice counts once. A coordinator that has been started again
takes the view over from what its members say.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import Any

from dtcomm.runtime.bootstrap.tcp import PROOF_BYTES, is_proof, prove

PROTOCOL = 3
MAX_MESSAGE = 1 << 20
HEAD = struct.Struct(f"<I{PROOF_BYTES}s")
COORDINATOR, MEMBER = b"coordinator", b"member"  # who sends


@dataclass(frozen=True, kw_only=True)
class View:
    """The members of the group from one change to the next.

    Attributes:
        number: Counts the views of a coordinator from 1.
        rank: The rank of the member that receives this.
        names: The name of each rank.
        steps: The steps that the state of each rank has seen; -1: it has none yet, or the others went on without it.
        store_port: The port of this view's store, at the coordinator's address.
    """

    number: int
    rank: int
    names: tuple[str, ...]
    steps: tuple[int, ...]
    store_port: int


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The outcome of a vote.

    Attributes:
        commit: Whether the average succeeded on all ranks that live; otherwise none of them applies it.
        change: Whether a rank is gone or waits to join.
    """

    commit: bool
    change: bool


class Seal:
    """Seals and opens the messages of one direction of a connection, from ``sender``, with the HMAC's ``key``."""

    def __init__(self, key: bytes, sender: bytes, number: int = 0) -> None:
        self._key, self._sender, self._number = key, sender, number

    def head(self, *body: Any) -> bytes:
        """Return what stands before a message, which is given in parts."""
        return HEAD.pack(sum(map(len, body)), prove(self._key, *self._next(body)))

    def check(self, proof: bytes, *body: Any) -> None:
        """PermissionError if the sender of a message, which is given in the same parts, has another key."""
        if not is_proof(proof, self._key, *self._next(body)):
            raise PermissionError

    def close(self, message: dict[str, Any]) -> bytes:
        """Return the bytes of a message."""
        body = json.dumps(message).encode()
        return self.head(body) + body

    def open(self, proof: bytes, body: bytes) -> dict[str, Any]:
        """Return the message; PermissionError if the sender has another key, ValueError if it is no JSON object."""
        self.check(proof, body)
        message = json.loads(body)
        if not isinstance(message, dict):
            raise ValueError(f"expected an object, got {type(message).__name__}")
        return message

    def _next(self, body: tuple[Any, ...]) -> tuple[Any, ...]:
        self._number += 1
        return self._sender, struct.pack("<Q", self._number - 1), *body


def split_head(head: bytes) -> tuple[int, bytes]:
    """Return the length and the HMAC of the message behind a head; ValueError if the message is too long."""
    length, proof = HEAD.unpack(head)
    if length > MAX_MESSAGE:
        raise ValueError(f"a message of {length} bytes; at most {MAX_MESSAGE} are allowed")
    return length, proof


def parse_address(text: str, argument: str = "coordinator") -> tuple[str, int]:
    """Return host and port of ``host:port`` or ``[::1]:29400``; a ValueError names ``argument``."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        colon = ""
    if not colon or not port.isdecimal() or not int(port) <= 65535:
        raise ValueError(f"{argument}: {text!r}; expected host:port or [IPv6 address]:port")
    return host, int(port)
