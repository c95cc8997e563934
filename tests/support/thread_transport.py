"""What moves bytes between ranks that are threads, on a stream of the group's, which is judged as a device's."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.op_recorder import unwatched
from tests.support.stream_checker import GROUP, Clock, RecordedStreams


class Letters:
    """An ``Exchange`` of threads: what goes from one rank to another by ``post``, on a stream of the group's.

    ``post(sends, receives)`` returns when all of both have been handed over; see ``tests.runtime``.
    """

    name = "threads"

    def __init__(self, streams: RecordedStreams, rank: int, post: Any, leave_out: str = "") -> None:
        self._streams, self._rank, self._post, self._leave_out = streams, rank, post, leave_out

    def all_to_all(self, out: torch.Tensor, out_parts: Any, given: torch.Tensor, given_parts: Any) -> Clock:
        sends = zip(torch.split(given, list(given_parts)), range(len(given_parts)), strict=True)
        takes = zip(torch.split(out, list(out_parts)), range(len(out_parts)), strict=True)
        return self._go(
            [(part, peer) for part, peer in sends if part.numel()],
            [(part, peer) for part, peer in takes if part.numel()],
        )

    def all_gather(self, out: torch.Tensor, given: torch.Tensor) -> Clock:
        places = torch.split(out, given.numel())
        others = [peer for peer in range(len(places)) if peer != self._rank]
        return self._go([(given, peer) for peer in others], [(places[peer], peer) for peer in others])

    def letters(self, sends: Any, receives: Any) -> Clock:
        return self._go([each[:2] for each in sends], [each[:2] for each in receives])

    def wait(self, handle: Clock) -> None:
        if self._leave_out != "exchange":
            self._streams.learn(self._streams.current(), handle)

    def _go(self, sends: list[tuple[torch.Tensor, int]], receives: list[tuple[torch.Tensor, int]]) -> Clock:
        streams = self._streams
        if self._leave_out != "follow":
            streams.follow(GROUP, streams.current())
        for part, _ in sends:
            streams.access(part, False, GROUP)
        for part, _ in receives:
            streams.access(part, True, GROUP)
        with unwatched():
            self._post(sends, receives)
        with streams.on(GROUP):
            return streams.record()
