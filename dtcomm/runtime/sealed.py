"""Messages that carry more than their payload: a seal behind it, which the receiver checks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dtcomm import _C
from dtcomm.errors import PayloadCorrupt
from dtcomm.runtime.replay import Messages

CHECKSUM_BYTES = 4  # CRC32C, little-endian


class Sealed:
    """``messages`` with the CRC32C of its payload behind each; PayloadCorrupt where it is another on arrival.

    ``names[rank]`` is how errors call a rank, ``rank`` is this one. Payload and seal are one message, so each is
    copied into a buffer of its own and out of it again.
    """

    overhead = CHECKSUM_BYTES

    def __init__(self, messages: Messages, names: Sequence[str], rank: int) -> None:
        self._messages = messages
        self._names = names
        self._rank = rank

    def send(self, payload: torch.Tensor, peer: int, tag: int) -> Any:
        """Start to send; the payload may change at once."""
        sealed = torch.empty(payload.numel() + CHECKSUM_BYTES, dtype=torch.uint8)
        sealed[: payload.numel()].copy_(payload)
        sealed[payload.numel() :].copy_(_seal(_C.crc32c(payload.data_ptr(), payload.numel())))
        return self._messages.send(sealed, peer, tag), None, sealed

    def receive(self, payload: torch.Tensor, peer: int, tag: int) -> Any:
        """Start to receive; the payload is there when the handle was waited for."""
        sealed = torch.empty(payload.numel() + CHECKSUM_BYTES, dtype=torch.uint8)
        return self._messages.receive(sealed, peer, tag), payload, sealed

    def wait(self, handle: Any, peer: int, doing: str) -> None:
        """Until it is complete, and as it was sent."""
        inner, payload, sealed = handle
        self._messages.wait(inner, peer, doing)
        if payload is None:
            return
        arrived = _seal(_C.crc32c(sealed.data_ptr(), payload.numel()))
        sent = sealed[payload.numel() :]
        if not torch.equal(sent, arrived):
            raise PayloadCorrupt(
                f"what {self._names[peer]} sent to {self._names[self._rank]} arrived damaged, {doing} "
                f"(checksum {_hex(sent)} when sent, {_hex(arrived)} on arrival)"
            )
        payload.copy_(sealed[: payload.numel()])


def _seal(checksum: int) -> torch.Tensor:
    return torch.frombuffer(bytearray(checksum.to_bytes(CHECKSUM_BYTES, "little")), dtype=torch.uint8)


def _hex(seal: torch.Tensor) -> str:
    return f"{int.from_bytes(bytes(seal.tolist()), 'little'):08x}"
