"""One call replayed over messages: pieces in a window, receives posted early, sends left to themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from dtcomm.runtime.torchdist.arithmetic import Arithmetic
from dtcomm.runtime.torchdist.layout import payload_bytes
from dtcomm.runtime.torchdist.plan import WINDOW, Plan
from dtcomm.schedule.program import Forward, Receive, Send

TAGS = 2**31 - 1


class Messages(Protocol):
    """Point-to-point messages between the ranks of a group; a tag names a message."""

    overhead: int
    """Bytes that each message takes beside its payload."""

    def send(self, payload: torch.Tensor, peer: int, tag: int) -> Any:
        """Start to send; the payload stays as it is until the handle was waited for."""

    def receive(self, payload: torch.Tensor, peer: int, tag: int) -> Any:
        """Start to receive into ``payload``."""

    def wait(self, handle: Any, peer: int, doing: str) -> None:
        """Until it is complete; raises DtcommError naming ranks where it never will be."""


class Replay:
    """The state of one call; ``number`` is the call's, equal on all ranks, as is what they ``agreed`` on."""

    def __init__(
        self, plan: Plan, arithmetic: Arithmetic, messages: Messages, number: int, agreed: int = 0
    ) -> None:
        self._plan = plan
        self._arithmetic = arithmetic
        self._messages = messages
        self._number = number
        self._base = plan.fingerprint + number * 0x9E3779B1 + agreed
        self._receives: dict[tuple[int, int], Any] = {}  # (piece, position in the program) -> handle
        self._sends: dict[int, list[tuple[Any, int]]] = {}  # piece -> (handle, peer)
        self._started = 0
        self._oldest = 0
        self._finished: set[int] = set()
        self._sent_bytes = 0

    def begin(self) -> None:
        """Encode and send the first pieces; nothing waits here."""
        self._start()

    def run(self, launched: Callable[[], None] = lambda: None) -> int:
        """To the end; returns the bytes sent. ``launched`` is called once all pieces are on their way: what follows
        may begin. See ``Plan.order`` for why this cannot deadlock.
        """
        self._start()
        told = False
        for number, at in self._plan.order:
            if not told and self._started == len(self._plan.pieces):
                told = True
                launched()
            receive = self._plan.instructions[at]
            assert isinstance(receive, Receive)
            handle = self._receives.pop((number, at))
            self._messages.wait(handle, receive.peer, self._doing("receiving", number, receive.chunk))
            self._go(number, at + 1)
            self._start()
        for number in list(self._sends):
            self._settle(number)
        return self._sent_bytes

    def _start(self) -> None:
        pieces = self._plan.pieces
        while self._started < len(pieces) and self._started - self._oldest < WINDOW:
            number = self._started
            self._settle(number - WINDOW)  # it used the same slot
            for at, instruction in enumerate(self._plan.instructions):
                if isinstance(instruction, Receive) and pieces[number][instruction.chunk]:
                    payload = self._payload(
                        number, instruction.peer, instruction.payload_id, instruction.chunk, instruction.level
                    )
                    tag = self._tag(number, instruction.payload_id)
                    self._receives[number, at] = self._messages.receive(payload, instruction.peer, tag)
            self._started += 1
            self._go(number, 0)

    def _go(self, number: int, at: int) -> None:
        # Up to the next message that the piece has to wait for.
        piece = self._plan.pieces[number]
        for position in range(at, len(self._plan.instructions)):
            instruction = self._plan.instructions[position]
            if not piece[instruction.chunk]:  # both ends of an empty chunk skip it
                continue
            match instruction:
                case Receive():
                    return
                case Send(chunk=chunk, payload_id=box, peers=peers, level=level):
                    payload = self._payload(number, self._plan.rank, box, chunk, level)
                    for peer in peers:
                        handle = self._messages.send(payload, peer, self._tag(number, box))
                        self._sends.setdefault(number, []).append((handle, peer))
                        self._sent_bytes += payload.numel() + self._messages.overhead
                case Forward():
                    pass  # the bytes are sent on from where they arrived
                case _:
                    self._arithmetic.do(number % WINDOW, piece, position, instruction)
        self._finished.add(number)
        while self._oldest in self._finished:
            self._finished.remove(self._oldest)
            self._oldest += 1

    def _settle(self, number: int) -> None:
        for handle, peer in self._sends.pop(number, ()):
            self._messages.wait(handle, peer, self._doing("sending", number))

    def _payload(self, number: int, rank: int, box: int, chunk: int, level: int) -> torch.Tensor:
        piece = self._plan.pieces[number]
        assert payload_bytes(piece[chunk], level)
        return self._arithmetic.payload(number % WINDOW, rank, box, piece[chunk], level)

    def _tag(self, number: int, box: int) -> int:
        # Two pieces of one slot may share a tag: messages of one tag keep their order. 0 is for headers.
        return 1 + (self._base + number % WINDOW + WINDOW * box) % (TAGS - 1)

    def _doing(self, verb: str, number: int, chunk: int | None = None) -> str:
        what = f"piece {number}" if chunk is None else f"chunk {chunk} of piece {number}"
        return f"{verb} {what} of call {self._number}, {self._plan.text}"
