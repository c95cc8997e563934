"""Messages that carry more than their payload: a seal behind it, with its checksum and when it may be delivered."""

from __future__ import annotations

import struct
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from dtcomm import _C
from dtcomm.errors import PayloadCorrupt
from dtcomm.runtime.emulated_link import Link
from dtcomm.runtime.torchdist.replay import Messages

CHECKSUM = struct.Struct("<I")  # CRC32C
STAMP = struct.Struct("<Q")  # when the first byte comes in over an emulated link, monotonic ns


class Wire(NamedTuple):
    """The emulated link to one peer, and this rank's end of it."""

    nic: _C.EmulatedNic
    link: Link

    def busy_ns(self, bytes: int) -> int:
        """How long so many bytes take the wire."""
        return int(bytes * self.link.ns_per_byte)


class Sealed:
    """``messages`` with a seal behind each payload.

    With ``checksum`` it holds the payload's CRC32C: PayloadCorrupt where it is another on arrival. To and from peers
    that have a wire in ``wires`` (by rank) it says when the first byte may arrive, and the receiver waits until the
    last one could have. ``names[rank]`` is how errors call a rank, ``rank`` is this one. Payload and seal are one
    message, so each is copied into a buffer of its own and out of it again.
    """

    def __init__(
        self,
        messages: Messages,
        names: Sequence[str],
        rank: int,
        checksum: bool,
        wires: Sequence[Wire | None] = (),
    ) -> None:
        self._messages = messages
        self._names = names
        self._rank = rank
        self._checksum = checksum
        self._wires = wires or [None] * len(names)
        self.overhead = CHECKSUM.size if checksum else 0

    def send(self, payload: torch.Tensor, peer: int, tag: int) -> Any:
        """Start to send; the payload may change at once."""
        wire, bytes = self._wires[peer], payload.numel()
        seal = CHECKSUM.pack(_C.crc32c(payload.data_ptr(), bytes)) if self._checksum else b""
        if wire is not None:
            leaves = wire.nic.send(time.monotonic_ns(), wire.busy_ns(bytes))
            seal += STAMP.pack(leaves + wire.link.latency_ns)
        if not seal:
            return self._messages.send(payload, peer, tag), None, payload
        sealed = torch.empty(bytes + len(seal), dtype=torch.uint8)
        sealed[:bytes].copy_(payload)
        sealed[bytes:].copy_(torch.frombuffer(bytearray(seal), dtype=torch.uint8))
        return self._messages.send(sealed, peer, tag), None, sealed

    def receive(self, payload: torch.Tensor, peer: int, tag: int) -> Any:
        """Start to receive; the payload is there when the handle was waited for."""
        more = self.overhead + (0 if self._wires[peer] is None else STAMP.size)
        if not more:
            return self._messages.receive(payload, peer, tag), None, payload
        sealed = torch.empty(payload.numel() + more, dtype=torch.uint8)
        return self._messages.receive(sealed, peer, tag), payload, sealed

    def wait(self, handle: Any, peer: int, doing: str) -> None:
        """Until it is complete, delivered and as it was sent."""
        inner, payload, sealed = handle
        self._messages.wait(inner, peer, doing)
        if payload is None:
            return
        bytes = payload.numel()
        seal = sealed[bytes:].numpy().tobytes()
        if self._checksum:
            (sent,), arrived = CHECKSUM.unpack_from(seal), _C.crc32c(sealed.data_ptr(), bytes)
            if sent != arrived:
                raise PayloadCorrupt(
                    f"what {self._names[peer]} sent to {self._names[self._rank]} arrived damaged, {doing} "
                    f"(checksum {sent:08x} when sent, {arrived:08x} on arrival)"
                )
        wire = self._wires[peer]
        if wire is not None:
            (first,) = STAMP.unpack_from(seal, self.overhead)
            _sleep_until(wire.nic.receive(first, wire.busy_ns(bytes)))
        payload.copy_(sealed[:bytes])


def _sleep_until(due: int) -> None:
    while (left := due - time.monotonic_ns()) > 0:
        time.sleep(left * 1e-9)
