"""Inboxes: where the payloads that peers push to a rank lie in its memory.

A program's receivers may load payloads from the memory of the rank that owns them. Over PCIe such loads are slow, while
stores are not waited for. With inboxes, a `Send` stores the payload into a place of each receiver's memory, and every
instruction reads payloads of peers from its own rank's inbox. `verify_inboxes` proves it for the programs of a
schedule; `dtcomm.runtime.cuda_peer` runs them.
"""

from __future__ import annotations

from collections.abc import Sequence

from dtcomm.errors import ScheduleError
from dtcomm.schedule.lower import Decode, Encode, Forward, Instruction, Program, Receive, Reduce, Send

#: The payloads that are pushed to a rank, (owner, payload_id) each, by their place.
Inbox = tuple[tuple[int, int], ...]


def plan_inboxes(programs: Sequence[Program]) -> tuple[Inbox, ...]:
    """Return the inbox of each rank: a place for every payload that a `Send` makes available to it.

    Args:
        programs: The programs of all ranks, by rank.
    """
    places: list[list[tuple[int, int]]] = [[] for _ in programs]
    for owner, program in enumerate(programs):
        for instruction in program.instructions:
            if isinstance(instruction, Send):
                for peer in instruction.peers:
                    places[peer].append((owner, instruction.payload_id))
    return tuple(map(tuple, places))


def verify_inboxes(
    programs: Sequence[Program], step_of: Sequence[Sequence[int]], steps: int, inboxes: Sequence[Inbox]
) -> None:
    """Prove that ranks which only store into their peers' memory can execute the programs.

    The proof covers that every payload of a peer is read from the reader's own inbox, that it was pushed there before,
    in a step whose signal the reader has waited for, and that no place is written twice.

    Args:
        programs: The programs of all ranks, by rank; of a verified schedule.
        step_of: For each rank the step of each instruction (`dtcomm.schedule.lower.steps`).
        steps: Steps of the schedule. Instructions of later steps run in the last one.
        inboxes: The inbox of each rank.

    Raises:
        ScheduleError: If a property does not hold. The message names rank, step and chunk.
    """
    for rank, inbox in enumerate(inboxes):
        if len(set(inbox)) < len(inbox):
            raise ScheduleError(f"rank {rank}: a payload has two places in the inbox")
    by_step: list[list[tuple[int, Instruction]]] = [[] for _ in range(steps)]
    for rank, (program, own_steps) in enumerate(zip(programs, step_of, strict=True)):
        for instruction, step in zip(program.instructions, own_steps, strict=True):
            by_step[min(step, steps - 1)].append((rank, instruction))
    execution = _Execution(inboxes)
    for instructions in by_step:
        execution.run_step(instructions)


class _Execution:
    """The programs of all ranks, executed step by step, without data."""

    def __init__(self, inboxes: Sequence[Inbox]) -> None:
        self.step = 0
        self._places = [set(inbox) for inbox in inboxes]
        self._written: set[tuple[int, int]] = set()  # (owner, payload_id) of complete payloads
        self._pushed: dict[tuple[int, int, int], int] = {}  # (receiver, owner, payload_id): the step
        self._received: set[tuple[int, int, int]] = set()  # whose signals the receiver has waited for

    def run_step(self, instructions: Sequence[tuple[int, Instruction]]) -> None:
        """Execute a step: payloads are written, then pushed; the peers' signals arrive; then the rest."""
        for rank, instruction in instructions:
            if isinstance(instruction, Forward):
                self._read(rank, instruction, instruction.peer, instruction.source_id)
            if isinstance(instruction, Encode | Forward):
                self._written.add((rank, instruction.payload_id))
        for rank, instruction in instructions:
            if isinstance(instruction, Send):
                self._push(rank, instruction)
        for rank, instruction in instructions:
            if isinstance(instruction, Receive):
                place = (rank, instruction.peer, instruction.payload_id)
                sent = self._pushed.get(place) == self.step
                self._require(sent, rank, instruction, f"{_name(*place[1:])} is not sent to it in this step")
                self._received.add(place)
        for rank, instruction in instructions:
            if isinstance(instruction, Decode):
                self._read(rank, instruction, instruction.peer, instruction.payload_id)
            if isinstance(instruction, Reduce):
                for owner, payload_id in instruction.inputs:
                    self._read(rank, instruction, owner, payload_id)
                if instruction.payload_id is not None:
                    self._written.add((rank, instruction.payload_id))
        self.step += 1

    def _push(self, rank: int, send: Send) -> None:
        name = _name(rank, send.payload_id)
        self._read(rank, send, rank, send.payload_id)
        for peer in send.peers:
            has_place = (rank, send.payload_id) in self._places[peer]
            self._require(has_place, rank, send, f"{name} has no place in the inbox of rank {peer}")
            place = (peer, rank, send.payload_id)
            self._require(place not in self._pushed, rank, send, f"{name} is pushed to rank {peer} twice")
            self._pushed[place] = self.step

    def _read(self, rank: int, instruction: Instruction, owner: int, payload_id: int) -> None:
        name = _name(owner, payload_id)
        if owner == rank:
            self._require((rank, payload_id) in self._written, rank, instruction, f"{name} is not complete")
        else:
            arrived = (rank, owner, payload_id) in self._received
            self._require(arrived, rank, instruction, f"{name} is read before it has arrived")

    def _require(self, holds: bool, rank: int, instruction: Instruction, problem: str) -> None:
        if not holds:
            raise ScheduleError(f"rank {rank} step {self.step} chunk {instruction.chunk}: {problem}")


def _name(owner: int, payload_id: int) -> str:
    return f"payload {payload_id} of rank {owner}"
