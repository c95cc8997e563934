"""Lowering: from a schedule to the program of one rank.

Versions that are sent become payloads, transfers become instructions. Every runtime calls `lower`; the runtimes that
execute a program step by step also call `steps`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from dtcomm.schedule.ir import REDUCING, History, Origin, Schedule, Version, trace
from dtcomm.schedule.program import (
    Copy,
    Decode,
    Encode,
    Forward,
    Instruction,
    Local,
    Program,
    Receive,
    Reduce,
    Send,
)

PayloadIds = dict[Version, int]


def lower(schedule: Schedule, rank: int) -> Program:
    """Return the program that ``rank`` executes for ``schedule``, its instructions in the order of the steps.

    Within a step the rank first encodes or forwards and sends what the step sends, then writes outputs that it also
    passed on, then receives. Each `Receive` stands just before the instruction that reads the payload. A version that
    is ever sent has a payload; the `Reduce` that computes a sum also encodes it.

    Args:
        schedule: A schedule, which should be verified.
        rank: A rank of the schedule.

    Returns:
        The program.

    Raises:
        ValueError: If the schedule has no such rank.
        ScheduleError: If the transfers have no meaning.

    Example:
        >>> from dtcomm import algorithms
        >>> from dtcomm.schedule import lower
        >>> program = lower(algorithms.build("two_shot", "all_reduce", 2), rank=0)
        >>> [type(instruction).__name__ for instruction in program.instructions]
        ['Encode', 'Send', 'Receive', 'Reduce', 'Send', 'Receive', 'Decode']
    """
    # One history for both: another thread's `trace` of an equal schedule has versions of its own.
    history = trace(schedule)
    payload_ids, counts = _number_payloads(schedule, history)
    return Program(
        collective=schedule.collective,
        rank=rank,
        ranks=schedule.ranks,
        chunks=schedule.chunks,
        payload_counts=tuple(counts),
        instructions=tuple(instruction for _, instruction in _emit(schedule, history, rank, payload_ids)),
    )


def steps(schedule: Schedule, rank: int) -> tuple[int, ...]:
    """Return the step of each instruction of ``lower(schedule, rank)``; steps never decrease in program order."""
    history = trace(schedule)
    return tuple(step for step, _ in _emit(schedule, history, rank, _number_payloads(schedule, history)[0]))


def _emit(
    schedule: Schedule, history: History, rank: int, payload_ids: PayloadIds
) -> Iterator[tuple[int, Instruction]]:
    if not 0 <= rank < schedule.ranks:
        raise ValueError(f"rank: {rank} is not a rank of 0..{schedule.ranks - 1}")
    own_versions = [version for version in history.versions if version.rank == rank]
    outputs = {version for place, version in history.outputs.items() if place[0] == rank}

    sends: dict[int, dict[Version, list[int]]] = defaultdict(dict)
    created: dict[int, list[Version]] = defaultdict(list)
    for version in sorted(own_versions, key=lambda version: version.chunk):
        created[version.step].append(version)
        for transfer in version.sends:
            sends[transfer.step].setdefault(version, []).append(transfer.dst)

    unsent_sums = {v for v in own_versions if v.origin is Origin.SUM and not v.sends}
    partial_sums = {source for v in own_versions for source in v.sources if source in unsent_sums}
    all_ranks = (1 << schedule.ranks) - 1

    for step in range(schedule.steps):
        decodes_of_forwarded: list[Instruction] = []
        for version, peers in sends[step].items():
            if version.first_sent == step:
                if version.origin is Origin.INPUT:
                    yield step, _encode(version, payload_ids, version in outputs)
                elif version.origin is Origin.COPY:
                    yield step, _forward(version, payload_ids)
                    if version in outputs:
                        decodes_of_forwarded.append(_decode(version, payload_ids))
            yield (
                step,
                Send(
                    chunk=version.chunk,
                    payload_id=payload_ids[version],
                    peers=tuple(sorted(peers)),
                    level=version.level,
                ),
            )
        for instruction in decodes_of_forwarded:
            yield step, instruction
        for version in created[step]:
            for receive in _receives(version, payload_ids):
                yield step, receive
            if version.origin is Origin.SUM:
                divide = schedule.collective in REDUCING and version.contributors == all_ranks
                keep_partial_sum = version in partial_sums
                yield step, _reduce(version, payload_ids, version in outputs, keep_partial_sum, divide)
            elif version in outputs and not version.sends:
                yield step, _decode(version, payload_ids)
    for version in created[-1]:
        if version in outputs and not version.sends:
            yield schedule.steps, Copy(chunk=version.chunk)


def _number_payloads(schedule: Schedule, history: History) -> tuple[PayloadIds, list[int]]:
    """Return the payload_id of every version that is sent, and how many payloads each rank owns."""
    # Every rank computes the numbering of all ranks, so a payload needs no other name on the wire.
    sent = [version for version in history.versions if version.sends]
    payload_ids: PayloadIds = {}
    counts = [0] * schedule.ranks
    for version in sorted(sent, key=lambda v: (v.sends[0].step, v.chunk)):
        payload_ids[version] = counts[version.rank]
        counts[version.rank] += 1
    return payload_ids, counts


def _payload_of(version: Version, payload_ids: PayloadIds) -> tuple[int, int]:
    """Return the (rank, payload_id) of the version's bytes: its own, or the one that a copy was received in."""
    if version in payload_ids:
        return version.rank, payload_ids[version]
    return version.sources[0].rank, payload_ids[version.sources[0]]


def _encode(version: Version, payload_ids: PayloadIds, output: bool) -> Encode:
    return Encode(chunk=version.chunk, payload_id=payload_ids[version], output=output, level=version.level)


def _forward(version: Version, payload_ids: PayloadIds) -> Forward:
    source = version.sources[0]
    return Forward(
        chunk=version.chunk,
        peer=source.rank,
        source_id=payload_ids[source],
        payload_id=payload_ids[version],
        level=version.level,
    )


def _decode(version: Version, payload_ids: PayloadIds) -> Decode:
    peer, payload_id = _payload_of(version, payload_ids)
    return Decode(chunk=version.chunk, peer=peer, payload_id=payload_id, level=version.level)


def _receives(version: Version, payload_ids: PayloadIds) -> list[Instruction]:
    return [
        Receive(chunk=version.chunk, peer=source.rank, payload_id=payload_ids[source], level=source.level)
        for source in version.sources
        if source.rank != version.rank
    ]


def _reduce(
    version: Version, payload_ids: PayloadIds, output: bool, keep_partial_sum: bool, divide: bool
) -> Reduce:
    terms = list(version.sources)
    local, position = Local.NONE, 0
    own = next(index for index, term in enumerate(terms) if term.rank == version.rank)
    if not terms[own].sends and terms[own].origin is not Origin.COPY:
        local = Local.INPUT if terms[own].origin is Origin.INPUT else Local.ACCUMULATOR
        position = own
        del terms[own]
    return Reduce(
        chunk=version.chunk,
        inputs=tuple(_payload_of(term, payload_ids) for term in terms),
        local=local,
        position=position,
        payload_id=payload_ids.get(version),
        output=output,
        keep_partial_sum=keep_partial_sum,
        divide=divide,
        level=version.level,
        input_levels=tuple(term.level for term in terms),
    )
