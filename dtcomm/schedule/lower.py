"""From a schedule to the program of one rank: versions become boxes, transfers become instructions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from dtcomm.schedule.ir import REDUCING, Schedule
from dtcomm.schedule.program import (
    Adopt,
    Copy,
    Encode,
    Forward,
    Instruction,
    Local,
    Program,
    Receive,
    Reduce,
    Send,
)
from dtcomm.schedule.trace import Origin, Version, trace

Boxes = dict[Version, int]


def lower(schedule: Schedule, rank: int) -> Program:
    """What ``rank`` does, in the order of the steps.

    Within a step it first encodes or forwards and sends what the step sends, then writes outputs that it also
    passed on, then receives, each box just before the instruction that reads it. A version that is ever sent
    has a box; a sum is encoded into its box by the ``Reduce`` that makes it.
    """
    boxes, counts = _number(schedule)
    return Program(
        collective=schedule.collective,
        rank=rank,
        ranks=schedule.ranks,
        chunks=schedule.chunks,
        boxes=tuple(counts),
        instructions=tuple(instruction for _, instruction in _emit(schedule, rank, boxes)),
    )


def steps(schedule: Schedule, rank: int) -> tuple[int, ...]:
    """The step of each instruction of ``lower(schedule, rank)``; in program order they never fall."""
    return tuple(step for step, _ in _emit(schedule, rank, _number(schedule)[0]))


def _emit(schedule: Schedule, rank: int, boxes: Boxes) -> Iterator[tuple[int, Instruction]]:
    if not 0 <= rank < schedule.ranks:
        raise ValueError(f"rank: {rank} is not a rank of 0..{schedule.ranks - 1}")
    history = trace(schedule)
    mine = [version for version in history.versions if version.rank == rank]
    final = {version for place, version in history.outputs.items() if place[0] == rank}

    sending: dict[int, dict[Version, list[int]]] = defaultdict(dict)
    made: dict[int, list[Version]] = defaultdict(list)
    for version in sorted(mine, key=lambda version: version.chunk):
        made[version.step].append(version)
        for transfer in version.sends:
            sending[transfer.step].setdefault(version, []).append(transfer.dst)

    unsent_sums = {v for v in mine if v.origin is Origin.SUM and not v.sends}
    kept = {source for v in mine for source in v.sources if source in unsent_sums}
    everyone = (1 << schedule.ranks) - 1

    for step in range(schedule.steps):
        passed_on: list[Instruction] = []
        for version, peers in sending[step].items():
            if version.first_sent == step:
                if version.origin is Origin.INPUT:
                    yield step, _encode(version, boxes, version in final)
                elif version.origin is Origin.COPY:
                    yield step, _forward(version, boxes)
                    if version in final:
                        passed_on.append(_adopt(version, boxes))
            peers_of = tuple(sorted(peers))
            yield step, Send(chunk=version.chunk, box=boxes[version], peers=peers_of, level=version.level)
        for instruction in passed_on:
            yield step, instruction
        for version in made[step]:
            for receive in _receive(version, boxes):
                yield step, receive
            if version.origin is Origin.SUM:
                divide = schedule.collective in REDUCING and version.contributors == everyone
                yield step, _reduce(version, boxes, version in final, version in kept, divide)
            elif version in final and not version.sends:
                yield step, _adopt(version, boxes)
    for version in made[-1]:
        if version in final and not version.sends:
            yield schedule.steps, Copy(chunk=version.chunk)


def _number(schedule: Schedule) -> tuple[Boxes, list[int]]:
    # Every rank computes every rank's numbering, so a box needs no other name on the wire.
    sent = [version for version in trace(schedule).versions if version.sends]
    boxes: Boxes = {}
    counts = [0] * schedule.ranks
    for version in sorted(sent, key=lambda v: (v.sends[0].step, v.chunk)):
        boxes[version] = counts[version.rank]
        counts[version.rank] += 1
    return boxes, counts


def _payload(version: Version, boxes: Boxes) -> tuple[int, int]:
    # The (rank, box) that holds the bytes: the rank's own, or the one that a copy was received in.
    if version in boxes:
        return version.rank, boxes[version]
    return version.sources[0].rank, boxes[version.sources[0]]


def _encode(version: Version, boxes: Boxes, output: bool) -> Encode:
    return Encode(chunk=version.chunk, box=boxes[version], output=output, level=version.level)


def _forward(version: Version, boxes: Boxes) -> Forward:
    source = version.sources[0]
    return Forward(
        chunk=version.chunk, peer=source.rank, source=boxes[source], box=boxes[version], level=version.level
    )


def _adopt(version: Version, boxes: Boxes) -> Adopt:
    peer, box = _payload(version, boxes)
    return Adopt(chunk=version.chunk, peer=peer, box=box, level=version.level)


def _receive(version: Version, boxes: Boxes) -> list[Instruction]:
    return [
        Receive(chunk=version.chunk, peer=source.rank, box=boxes[source], level=source.level)
        for source in version.sources
        if source.rank != version.rank
    ]


def _reduce(version: Version, boxes: Boxes, output: bool, keep: bool, divide: bool) -> Reduce:
    terms = list(version.sources)
    local, position = Local.NONE, 0
    own = next(index for index, term in enumerate(terms) if term.rank == version.rank)
    if not terms[own].sends and terms[own].origin is not Origin.COPY:
        local = Local.INPUT if terms[own].origin is Origin.INPUT else Local.ACCUMULATOR
        position = own
        del terms[own]
    return Reduce(
        chunk=version.chunk,
        inputs=tuple(_payload(term, boxes) for term in terms),
        local=local,
        position=position,
        box=boxes.get(version),
        output=output,
        keep=keep,
        divide=divide,
        level=version.level,
        input_levels=tuple(term.level for term in terms),
    )
