"""Messages from and to a device, through the host's memory: for backends that read and write that alone (Gloo)."""

from __future__ import annotations

from typing import Any

import torch

from dtcomm.device.streams import Streams
from dtcomm.runtime.torchdist.replay import Messages


class Staged:
    """``messages`` with payloads of the device of ``streams``.

    Before a send the host waits for the payload, and for nothing else that the stream was given; what arrives is copied
    in the stream's order. Torch's allocator of host memory keeps a buffer until the copies from and to it are over.
    """

    def __init__(self, messages: Messages, streams: Streams) -> None:
        self._messages = messages
        self._streams = streams
        self.overhead = messages.overhead

    def send(self, payload: torch.Tensor, peer: int, tag: int) -> Any:
        """Start to send; the payload may change at once."""
        staging = self._streams.staging(payload.numel())
        staging.copy_(payload, non_blocking=True)
        self._streams.synchronize(self._streams.record())
        return self._messages.send(staging, peer, tag), staging, None

    def receive(self, payload: torch.Tensor, peer: int, tag: int) -> Any:
        """Start to receive into ``payload``, which is written by ``wait``."""
        staging = self._streams.staging(payload.numel())
        return self._messages.receive(staging, peer, tag), staging, payload

    def wait(self, handle: Any, peer: int, doing: str) -> None:
        """Until it is complete; what follows on the stream finds what came."""
        inner, staging, payload = handle
        self._messages.wait(inner, peer, doing)
        if payload is not None:
            payload.copy_(staging, non_blocking=True)
