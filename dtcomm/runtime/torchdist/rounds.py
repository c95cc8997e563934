"""A program as rounds: what a rank computes, hands to its group in one go, and computes from what came.

A group's collectives are faster than its messages and take one launch, so a step in which every rank sends to every
other one becomes an all_to_all or an all_gather of bytes. All ranks read that off the same schedule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from dtcomm.runtime.torchdist.layout import Piece, payload_bytes
from dtcomm.runtime.torchdist.plan import ALIGNMENT, Box, Plan
from dtcomm.runtime.types import OpSpec
from dtcomm.schedule import Schedule
from dtcomm.schedule.ir import Origin, Version, trace
from dtcomm.schedule.lower import steps
from dtcomm.schedule.program import Forward, Instruction, Receive, Send

ALL_TO_ALL, ALL_GATHER, MESSAGES, NOTHING = "all_to_all", "all_gather", "messages", ""
# A launch and its bookkeeping take as long as some megabytes: smaller pieces would overlap nothing.
LEAST_PIECE_BYTES = 4 * 2**20
MOST_PIECES = 8

Sized = tuple[int, int]  # (chunk, level): the payload's size in a piece follows


class Parcel(NamedTuple):
    """A box that goes to or comes from a peer."""

    peer: int
    box: Box
    sized: Sized


class Round(NamedTuple):
    """One step of a rank: instructions are (position in the program, instruction), arithmetic alone.

    ``everybody`` is what each rank contributes to an all_gather; ``forwards`` are boxes and whose bytes they are.
    """

    before: tuple[tuple[int, Instruction], ...]
    way: str
    sends: tuple[Parcel, ...]
    receives: tuple[Parcel, ...]
    after: tuple[tuple[int, Instruction], ...]
    everybody: tuple[Sized, ...] = ()
    forwards: tuple[tuple[Box, Box], ...] = ()


class Region(NamedTuple):
    """Where a round's bytes lie in a piece's memory: ``parts`` are bytes by rank."""

    start: int
    parts: tuple[int, ...]

    @property
    def stop(self) -> int:
        return self.start + sum(self.parts)


class Rounds:
    """The plan of calls of one shape.

    ``order`` lists (piece, round) in the order in which all ranks hand rounds to the group: each piece one round behind
    the one before it, the newest first, so that its encoding runs beside the exchange of the others. A round reads what
    rounds before it in this order have brought, whatever the rank: nobody waits in a circle.
    """

    def __init__(self, spec: OpSpec, schedule: Schedule, rank: int, message_bytes: int = 0) -> None:
        self.ranks, self.rank, self.spec = schedule.ranks, rank, spec
        payload = sum(part.codec.wire_bytes(part.numel, part.dtype) for part in spec.parts)
        whole = max(LEAST_PIECE_BYTES, -(-payload // MOST_PIECES))
        self.plan = Plan(spec, schedule, rank, message_bytes or max(1, whole // schedule.chunks))
        self.text = self.plan.text
        self.rounds = tuple(_rounds(schedule, self.plan))
        pieces, rounds = len(self.plan.pieces), len(self.rounds)
        self.order = [
            (piece, time - piece)
            for time in range(pieces + rounds - 1)
            for piece in range(min(time, pieces - 1), -1, -1)
            if time - piece < rounds
        ]
        self.places: list[dict[Box, int]] = []
        self.regions: list[list[tuple[Region, Region]]] = []  # of what is sent and of what comes
        self.bytes: list[int] = []
        self.sent_bytes = 0
        for piece in self.plan.pieces:
            self._place(piece)

    def _place(self, piece: Piece) -> None:
        places: dict[Box, int] = {}
        regions: list[tuple[Region, Region]] = []
        at = 0

        def size(sized: Sized) -> int:
            return payload_bytes(piece[sized[0]], sized[1])

        def lay(parcels: Sequence[Parcel]) -> Region:
            nonlocal at
            parts, start = [0] * self.ranks, at
            for parcel in parcels:  # by peer
                places[parcel.box] = at
                parts[parcel.peer] = size(parcel.sized)
                at += parts[parcel.peer]
            at = _aligned(at)
            return Region(start, tuple(parts))

        for each in self.rounds:
            for box, source in each.forwards:
                places[box] = places[source]
            if each.way == ALL_TO_ALL:
                regions.append((lay(each.sends), lay(each.receives)))
            elif each.way == ALL_GATHER:
                largest = max(map(size, each.everybody))
                region = Region(at, (largest,) * self.ranks)
                for parcel in (*each.receives, each.sends[0]._replace(peer=self.rank)):
                    places[parcel.box] = at + parcel.peer * largest
                at = _aligned(region.stop)
                regions.append((Region(region.start + self.rank * largest, (largest,)), region))
            else:
                regions.append((Region(at, ()), Region(at, ())))
                for parcel in (*each.sends, *each.receives):
                    if parcel.box not in places:
                        places[parcel.box] = at
                        at = _aligned(at + size(parcel.sized))
        self.places.append(places)
        self.regions.append(regions)
        self.bytes.append(at)
        # What other ranks are handed; the padding of an all_gather is not counted.
        self.sent_bytes += sum(size(parcel.sized) for each in self.rounds for parcel in each.sends)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _rounds(schedule: Schedule, plan: Plan) -> Iterator[Round]:
    step_of = steps(schedule, plan.rank)
    ways = _ways(schedule)
    for step in range(schedule.steps + 1):  # the last one has what nobody sent
        before: list[tuple[int, Instruction]] = []
        after: list[tuple[int, Instruction]] = []
        sends: list[Parcel] = []
        receives: list[Parcel] = []
        forwards: list[tuple[Box, Box]] = []
        for at, instruction in enumerate(plan.instructions):
            if step_of[at] != step:
                continue
            match instruction:
                case Send(chunk=chunk, payload_id=box, peers=peers, level=level):
                    sends += [Parcel(peer, (plan.rank, box), (chunk, level)) for peer in peers]
                case Receive(chunk=chunk, peer=peer, payload_id=box, level=level):
                    receives.append(Parcel(peer, (peer, box), (chunk, level)))
                case Forward(peer=peer, source_id=source, payload_id=box):
                    forwards.append(((plan.rank, box), (peer, source)))
                case _:
                    (after if receives else before).append((at, instruction))
        way, everybody = ways.get(step, (NOTHING, ()))
        if way == MESSAGES and not sends and not receives:
            way = NOTHING
        yield Round(
            tuple(before),
            way,
            tuple(sorted(sends)),
            tuple(sorted(receives)),
            tuple(after),
            everybody,
            tuple(forwards),
        )


def _ways(schedule: Schedule) -> dict[int, tuple[str, tuple[Sized, ...]]]:
    """How each step is handed to the group: the same on all ranks."""
    ranks = schedule.ranks
    sent: dict[int, dict[tuple[int, int], list[Version]]] = {}
    for version in trace(schedule).versions:
        for transfer in version.sends:
            sent.setdefault(transfer.step, {}).setdefault((transfer.src, transfer.dst), []).append(version)
    ways: dict[int, tuple[str, tuple[Sized, ...]]] = {}
    for step, pairs in sent.items():
        ways[step] = MESSAGES, ()
        versions = [version for each in pairs.values() for version in each]
        if len(versions) != ranks * (ranks - 1) or len(pairs) != len(versions):
            continue
        if any(
            version.origin is Origin.COPY or any(transfer.step != step for transfer in version.sends)
            for version in versions
        ):
            continue
        if len(set(map(id, versions))) == len(versions):
            ways[step] = ALL_TO_ALL, ()
        elif len(set(map(id, versions))) == ranks:
            by_rank = {version.rank: (version.chunk, version.level) for version in versions}
            ways[step] = ALL_GATHER, tuple(by_rank[rank] for rank in range(ranks))
    return ways
