"""The lowered programs of all ranks do what the schedule means, bit for bit."""

import sys

import pytest

from dtcomm import algorithms
from dtcomm.errors import ScheduleError
from dtcomm.schedule import Schedule, Transfer, lower, parse
from dtcomm.schedule.ir import REDUCING, ROOTED, trace
from dtcomm.schedule.lower import Copy, Decode, Encode, Forward, Local, Receive, Reduce, Send, steps
from tests.unit.algorithms.every_algorithm import NAMES, build
from tests.unit.schedule.program_interpreter import Programs, evaluate, inputs_of, lossy_round

CASES = [
    (collective, name, ranks, root)
    for collective, name in NAMES
    for ranks in (1, 2, 3, 4, 5, 7, 8, 9)
    for root in ({0, ranks // 2, ranks - 1} if collective in ROOTED else {0})
]


def check_programs(schedule: Schedule, divisor: int = 1) -> None:
    inputs = inputs_of(schedule)
    programs = [lower(schedule, rank) for rank in range(schedule.ranks)]
    expected = evaluate(schedule, inputs, lossy_round, divisor)
    for seed in range(3):
        machine = Programs(programs, inputs, lossy_round, divisor)
        assert machine.run(seed) == expected
        assert max(machine.encodings.values(), default=0) <= 1
    assert {program.payload_counts for program in programs} == {programs[0].payload_counts}
    received = {
        (rank, i.peer, i.payload_id)
        for rank, p in enumerate(programs)
        for i in p.instructions
        if isinstance(i, Receive)
    }
    assert received == machine.visible


@pytest.mark.parametrize(("collective", "name", "ranks", "root"), CASES)
def test_programs_do_what_the_schedule_means(collective: str, name: str, ranks: int, root: int) -> None:
    schedule = build(name, collective, ranks, root)
    check_programs(schedule)
    if collective in REDUCING:
        check_programs(schedule, divisor=ranks)


@pytest.mark.parametrize("chunks", [1, 2, 5])
@pytest.mark.parametrize("ranks", [2, 3, 6])
def test_programs_of_several_chunks(ranks: int, chunks: int) -> None:
    check_programs(algorithms.build("tree", "all_reduce", ranks, chunks=chunks))
    check_programs(algorithms.build("one_shot", "all_reduce", ranks, chunks=chunks))
    for name in ("ring", "tree", "one_shot"):
        check_programs(algorithms.build(name, "broadcast", ranks, root=1, chunks=chunks))


def test_two_shot_over_two_ranks() -> None:
    assert lower(algorithms.build("two_shot", "all_reduce", 2), 1).instructions == (
        Encode(chunk=0, payload_id=0),
        Send(chunk=0, payload_id=0, peers=(0,)),
        Receive(chunk=1, peer=0, payload_id=0),
        Reduce(
            chunk=1,
            inputs=((0, 0),),
            local=Local.INPUT,
            position=1,
            payload_id=1,
            output=True,
            divide=True,
            input_levels=(0,),
        ),
        Send(chunk=1, payload_id=1, peers=(0,)),
        Receive(chunk=0, peer=0, payload_id=1),
        Decode(chunk=0, peer=0, payload_id=1),
    )


def test_one_shot_reads_its_own_bytes() -> None:
    *_, reduce = lower(algorithms.build("one_shot", "all_reduce", 3), 1).instructions
    assert isinstance(reduce, Reduce)
    assert reduce.inputs == ((0, 0), (1, 0), (2, 0))
    assert reduce.local is Local.NONE


def test_a_copy_is_forwarded_before_it_is_decoded() -> None:
    kinds = [
        type(i)
        for i in lower(
            parse("broadcast ranks=3 chunks=1\nrank 0|c0=1|.\nrank 1|.|c0=2\nrank 2|.|."), 1
        ).instructions
    ]
    assert kinds == [Receive, Forward, Send, Decode]


def test_sums_that_are_not_sent_stay_unencoded() -> None:
    program = lower(algorithms.build("tree", "all_reduce", 4), 0)
    first, second = (i for i in program.instructions if isinstance(i, Reduce))
    assert (
        first.keep_partial_sum
        and first.payload_id is None
        and first.local is Local.INPUT
        and not first.divide
    )
    assert second.local is Local.ACCUMULATOR and second.payload_id == 0 and second.output and second.divide


def test_a_copied_version_that_is_summed_is_read_where_it_was_received() -> None:
    schedule = Schedule(
        collective="reduce",
        ranks=3,
        chunks=1,
        transfers=(
            Transfer(0, 1, 2, 0, "copy"),
            Transfer(1, 0, 2, 0, "reduce"),
            Transfer(2, 2, 0, 0, "copy"),
        ),
    )
    reduce = next(i for i in lower(schedule, 2).instructions if isinstance(i, Reduce))
    assert reduce.inputs == ((0, 0), (1, 0))
    check_programs(schedule)


def test_a_version_sent_in_two_steps_is_encoded_once() -> None:
    check_programs(parse("broadcast ranks=3 chunks=1\nrank 0|c0=1|c0=2\nrank 1|.|.\nrank 2|.|."))


def test_the_program_of_one_rank_is_a_copy() -> None:
    assert lower(algorithms.build("ring", "all_reduce", 1), 0).instructions == (Copy(chunk=0),)


def test_forwarded_bytes_keep_their_level() -> None:
    schedule = parse("broadcast ranks=3 chunks=1\nrank 0|c0=1@1|.\nrank 1|.|c0=2\nrank 2|.|.")
    assert [i.level for i in lower(schedule, 0).instructions] == [1, 1]
    assert {i.level for i in lower(schedule, 1).instructions} == {1}
    assert {i.level for i in lower(schedule, 2).instructions} == {1}


@pytest.mark.parametrize("name", algorithms.available("all_reduce"))
def test_instructions_have_the_steps_of_the_schedule(name: str) -> None:
    schedule = build(name, "all_reduce", 5)
    sent = {(t.step, t.src, t.dst, t.chunk) for t in schedule.transfers}
    for rank in range(5):
        numbered = list(zip(steps(schedule, rank), lower(schedule, rank).instructions, strict=True))
        assert [step for step, _ in numbered] == sorted(step for step, _ in numbered)
        received = {(step, i.peer, rank, i.chunk) for step, i in numbered if isinstance(i, Receive)}
        assert received == {message for message in sent if message[2] == rank}


def test_flat_programs_have_operand_counts() -> None:
    program = lower(algorithms.build("tree", "all_reduce", 5), 0)
    flat, at, codes = program.flat(), 0, []
    while at < len(flat):
        code, _, length = flat[at : at + 3]
        codes.append(code)
        at += 3 + length
    assert at == len(flat)
    assert codes == [i.code for i in program.instructions]


def test_a_rank_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rank: 2 is not a rank of 0\.\.1"):
        lower(algorithms.build("ring", "all_reduce", 2), 2)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            "rank 0|c0=1|c0=2\nrank 1|.|c0=2\nrank 2|.|.",
            "rank 0 -> rank 2 chunk 0 copy: rank 1 sends it the same chunk",
        ),
        (
            "rank 0|.\nrank 1|c0=2\nrank 2|.",
            "step 0: rank 1 -> rank 2 chunk 0 copy: rank 1 does not hold this chunk yet",
        ),
        ("rank 0|c0=1 c0=2@1\nrank 1|.\nrank 2|.", "first sent at level 0 and at this one"),
    ],
)
def test_meaningless_transfers_are_refused(rows: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        lower(parse("broadcast ranks=3 chunks=1\n" + rows), 0)


def test_concurrent_lowering_uses_one_history_per_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that lower one schedule at the same time may each get a history of their own from the cache."""
    schedule = algorithms.build("ring", "all_reduce", 3)
    expected = [lower(schedule, rank) for rank in range(3)]
    monkeypatch.setattr(sys.modules[lower.__module__], "trace", trace.__wrapped__)  # never the cached history
    assert [lower(schedule, rank) for rank in range(3)] == expected
    assert [steps(schedule, rank) for rank in range(3)]
