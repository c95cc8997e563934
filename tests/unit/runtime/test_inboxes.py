"""Inboxes of pushed payloads: every algorithm can be pushed, and every wrong inbox or program is refused by name."""

from dataclasses import replace

import pytest

from dtcomm.errors import ScheduleError
from dtcomm.runtime.cuda_peer.launch import Inbox, plan_inboxes, verify_inboxes
from dtcomm.schedule import Program, Schedule, lower
from dtcomm.schedule.lower import Decode, Forward, Receive, Reduce, Send, steps
from tests.unit.algorithms.every_algorithm import NAMES, build

Lowered = tuple[list[Program], list[tuple[int, ...]]]


def lowered(schedule: Schedule) -> Lowered:
    ranks = range(schedule.ranks)
    return [lower(schedule, rank) for rank in ranks], [steps(schedule, rank) for rank in ranks]


def reads_of_peers(program: Program) -> set[tuple[int, int]]:
    """What a rank reads of its peers: (owner, payload_id)."""
    read: set[tuple[int, int]] = set()
    for instruction in program.instructions:
        if isinstance(instruction, Reduce):
            read.update(instruction.inputs)
        elif isinstance(instruction, Decode):
            read.add((instruction.peer, instruction.payload_id))
        elif isinstance(instruction, Forward):
            read.add((instruction.peer, instruction.source_id))
    return {(owner, payload_id) for owner, payload_id in read if owner != program.rank}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
def test_every_algorithm_can_be_pushed(ranks: int) -> None:
    """An inbox has a place for each payload that its rank reads, and for no other."""
    for collective, algorithm in NAMES:
        schedule = build(algorithm, collective, ranks)
        programs, step_of = lowered(schedule)
        inboxes = plan_inboxes(programs)
        verify_inboxes(programs, step_of, max(schedule.steps, 1), inboxes)
        for program, inbox in zip(programs, inboxes, strict=True):
            assert set(inbox) == reads_of_peers(program) and len(set(inbox)) == len(inbox)


def refusal(programs: list[Program], step_of: list[tuple[int, ...]], inboxes: tuple[Inbox, ...]) -> str:
    with pytest.raises(ScheduleError) as caught:
        verify_inboxes(programs, step_of, max(map(max, step_of)) + 1, inboxes)
    return str(caught.value)


def change(lowering: Lowered, rank: int, kind: type, **changes: object) -> Lowered:
    """The programs with the first instruction of a kind changed, or without it."""
    programs, step_of = list(lowering[0]), list(lowering[1])
    instructions = list(programs[rank].instructions)
    index = next(i for i, instruction in enumerate(instructions) if isinstance(instruction, kind))
    if changes:
        instructions[index] = replace(instructions[index], **changes)
    else:
        del instructions[index]
        step_of[rank] = step_of[rank][:index] + step_of[rank][index + 1 :]
    programs[rank] = replace(programs[rank], instructions=tuple(instructions))
    return programs, step_of


def test_inboxes_without_a_place_or_with_two_are_refused() -> None:
    programs, step_of = lowered(build("ring", "all_reduce", 3))
    inboxes = plan_inboxes(programs)
    without = (inboxes[0], inboxes[1][1:], inboxes[2])
    assert refusal(programs, step_of, without) == (
        "rank 0 step 0 chunk 2: payload 0 of rank 0 has no place in the inbox of rank 1"
    )
    twice = (inboxes[0], inboxes[1] + inboxes[1][:1], inboxes[2])
    assert refusal(programs, step_of, twice) == "rank 1: a payload has two places in the inbox"


def test_programs_that_cannot_be_pushed_are_refused() -> None:
    ring = lowered(build("ring", "all_reduce", 3))
    inboxes = plan_inboxes(ring[0])
    cases = {
        # Without a peer to send to, the payload stays in its owner's memory, from which a reader must not load.
        "rank 1 step 0 chunk 2: payload 0 of rank 0 is not sent to it in this step": change(
            ring, 0, Send, peers=()
        ),
        "rank 1 step 0 chunk 2: payload 0 of rank 0 is read before it has arrived": change(ring, 1, Receive),
        "rank 0 step 0 chunk 2: payload 1 of rank 0 is not complete": change(ring, 0, Send, payload_id=1),
        "rank 0 step 0 chunk 2: payload 0 of rank 0 is pushed to rank 1 twice": change(
            ring, 0, Send, peers=(1, 1)
        ),
    }
    for message, (programs, step_of) in cases.items():
        assert refusal(programs, step_of, inboxes) == message


def test_signal_of_another_step_is_refused() -> None:
    """Kernels number signals by steps: a receive that waits for another step's would wait for ever."""
    programs, step_of = lowered(build("ring", "all_reduce", 3))
    inboxes = plan_inboxes(programs)
    program = programs[1]
    index = next(i for i, instruction in enumerate(program.instructions) if isinstance(instruction, Receive))
    later = [step + (position >= index) for position, step in enumerate(step_of[1])]
    assert "rank 1 step 1 chunk 2: payload 0 of rank 0 is not sent to it in this step" == refusal(
        programs, [step_of[0], tuple(later), step_of[2]], inboxes
    )
