"""A transport between ranks that are threads, on a stream of the group that is checked like a device's stream."""

from __future__ import annotations

from typing import Any

import torch

from dtcomm.runtime.torchdist.transport import Transport
from tests.support.op_recorder import not_recording
from tests.support.stream_checker import GROUP, Clock, RecordedStreams


class ThreadTransport(Transport):
    """The executor's transport between threads; ``post`` moves the bytes, on a stream of the group.

    ``post(sends, receives)`` takes (payload, peer) pairs and returns when all payloads have arrived.
    """

    name = "threads"

    def __init__(self, streams: RecordedStreams, rank: int, post: Any, leave_out: str = "") -> None:
        self._streams, self._rank, self._post, self._leave_out = streams, rank, post, leave_out

    def all_to_all(
        self, output: torch.Tensor, output_sizes: Any, input: torch.Tensor, input_sizes: Any
    ) -> Clock:
        sends = zip(torch.split(input, list(input_sizes)), range(len(input_sizes)), strict=True)
        receives = zip(torch.split(output, list(output_sizes)), range(len(output_sizes)), strict=True)
        return self._go(
            [(part, peer) for part, peer in sends if part.numel()],
            [(part, peer) for part, peer in receives if part.numel()],
        )

    def all_gather(self, output: torch.Tensor, input: torch.Tensor) -> Clock:
        places = torch.split(output, input.numel())
        others = [peer for peer in range(len(places)) if peer != self._rank]
        return self._go([(input, peer) for peer in others], [(places[peer], peer) for peer in others])

    def send_recv(self, sends: Any, receives: Any, checksum: bool, context: str) -> Clock:
        return self._go([message[:2] for message in sends], [message[:2] for message in receives])

    def wait(self, handle: Clock) -> None:
        if self._leave_out != "exchange":
            self._streams.learn(self._streams.current(), handle)

    def describe(self, device: torch.device) -> str:
        return f"{self.name}, queued on streams of {device}"

    def _go(self, sends: list[tuple[torch.Tensor, int]], receives: list[tuple[torch.Tensor, int]]) -> Clock:
        streams = self._streams
        if self._leave_out != "follow":
            streams.follow(GROUP, streams.current())
        for part, _ in sends:
            streams.access(part, False, GROUP)
        for part, _ in receives:
            streams.access(part, True, GROUP)
        with not_recording():
            self._post(sends, receives)
        with streams.on(GROUP):
            return streams.record()
