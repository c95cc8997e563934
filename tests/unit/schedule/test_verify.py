"""The verifier accepts every algorithm and refuses every schedule that brute force finds wrong."""

import itertools
import re
from dataclasses import replace

import pytest
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from dtcomm import algorithms
from dtcomm.errors import ScheduleError
from dtcomm.schedule import Schedule, Transfer, parse, verify
from dtcomm.schedule.ir import ROOTED
from tests.unit.algorithms.every_algorithm import NAMES, build, takes_chunks
from tests.unit.schedule.program_interpreter import outputs_are_correct


@st.composite
def schedules(draw: st.DrawFn, max_ranks: int = 6) -> Schedule:
    collective, name = draw(st.sampled_from(NAMES))
    ranks = draw(st.integers(1, max_ranks))
    root = draw(st.integers(0, ranks - 1)) if collective in ROOTED else 0
    if name == "hierarchical":
        cuts = sorted(draw(st.sets(st.integers(1, ranks - 1), max_size=3))) if ranks > 1 else []
        edges = [0, *cuts, ranks]
        hosts = tuple(end - start for start, end in itertools.pairwise(edges))
        return algorithms.build(name, collective, ranks, root, hosts=hosts)
    chunks = draw(st.integers(1, 4)) if takes_chunks(name, collective) else None
    return algorithms.build(name, collective, ranks, root, chunks)


@given(schedules(max_ranks=17))
@settings(max_examples=300, deadline=None)
def test_every_algorithm_is_proved_and_encodes_each_chunk_once(schedule: Schedule) -> None:
    proof = verify(schedule)
    assert proof.encodes_once
    assert proof.requantizations == schedule.requantizations()
    if schedule.ranks <= 6:
        assert outputs_are_correct(schedule)


def drop(draw: st.DrawFn, s: Schedule, i: int) -> tuple[Transfer, ...]:
    return s.transfers[:i] + s.transfers[i + 1 :]


def duplicate(draw: st.DrawFn, s: Schedule, i: int) -> tuple[Transfer, ...]:
    return (*s.transfers, replace(s.transfers[i], step=draw(st.integers(0, s.steps))))


def reorder(draw: st.DrawFn, s: Schedule, i: int) -> tuple[Transfer, ...]:
    j = draw(st.integers(0, len(s.transfers) - 1))
    swapped = list(s.transfers)
    swapped[i] = replace(s.transfers[i], step=s.transfers[j].step)
    swapped[j] = replace(s.transfers[j], step=s.transfers[i].step)
    return tuple(swapped)


def retarget(draw: st.DrawFn, s: Schedule, i: int) -> tuple[Transfer, ...]:
    t = s.transfers[i]
    dst = draw(st.integers(0, s.ranks - 1).filter(lambda rank: rank != t.src))
    return (*drop(draw, s, i), replace(t, dst=dst))


def relabel(draw: st.DrawFn, s: Schedule, i: int) -> tuple[Transfer, ...]:
    return (*drop(draw, s, i), replace(s.transfers[i], chunk=draw(st.integers(0, s.chunks - 1))))


def change_op(draw: st.DrawFn, s: Schedule, i: int) -> tuple[Transfer, ...]:
    t = s.transfers[i]
    return (*drop(draw, s, i), replace(t, op="copy" if t.op == "reduce" else "reduce"))


@pytest.mark.parametrize("corrupt", [drop, duplicate, reorder, retarget, relabel, change_op])
@given(data=st.data())
@settings(max_examples=120, deadline=None)
def test_corruptions_that_change_the_outcome_are_refused(corrupt, data: st.DataObject) -> None:
    schedule = data.draw(schedules())
    assume(schedule.transfers)
    transfers = corrupt(data.draw, schedule, data.draw(st.integers(0, len(schedule.transfers) - 1)))
    try:
        corrupted = replace(schedule, transfers=transfers)
    except ScheduleError as error:  # only summing a chunk in a collective that does not reduce
        assert corrupt is change_op and "does not reduce" in str(error)
        return
    if outputs_are_correct(corrupted):
        event("harmless")
        try:
            verify(corrupted)
        except ScheduleError as error:
            # Or one encoding would have to be in the codecs of two levels, which shows in no sum.
            known = (
                "useless transfer",
                "redundant transfer",
                "empty step",
                "the same version is first sent at level",
            )
            assert any(reason in str(error) for reason in known), "refused, though nothing is wrong with it"
        return
    event("harmful")
    with pytest.raises(ScheduleError) as caught:
        verify(corrupted)
    for noun in ("rank", "step", "chunk"):
        assert re.search(rf"{noun} \d+", str(caught.value)), str(caught.value)


def test_dropping_any_transfer_of_an_algorithm_is_refused() -> None:
    for collective, name in NAMES:
        schedule = build(name, collective, 4)
        for i in range(len(schedule.transfers)):
            with pytest.raises(ScheduleError, match=r"rank \d+.* chunk \d+"):
                verify(replace(schedule, transfers=schedule.transfers[:i] + schedule.transfers[i + 1 :]))


DOUBLING = """all_reduce ranks=4 chunks=1
rank 0 | c0+1 | c0+2
rank 1 | c0+0 | c0+3
rank 2 | c0+3 | c0+0
rank 3 | c0+2 | c0+1"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "all_reduce ranks=2 chunks=1\nrank 0|.\nrank 1|c0+0",
            "rank 1 step 0 chunk 0: the output lacks the contribution of rank 0",
        ),
        (
            "all_reduce ranks=3 chunks=1\nrank 0|c0+1|c0=2\nrank 1|c0+0|c0+0\nrank 2|.|.",
            "rank 0 step 1 chunk 0: the sum counts ranks 0, 1 more than once",
        ),
        (
            "reduce ranks=3 chunks=1 root=2\nrank 0|c0+1|.\nrank 1|.|c0+2\nrank 2|.|c0+0",
            "rank 0 step 1 chunk 0: useless transfer: no output depends on what it delivers",
        ),
        (
            "all_to_all ranks=2 chunks=4\nrank 0|c1=1\nrank 1|c3=0",
            "rank 0 step 0 chunk 2: missing output: no transfer delivers this chunk|rank 0 step 0 chunk 3",
        ),
        (
            "broadcast ranks=3 chunks=1\nrank 0|.|c0=1\nrank 1|c0=2|.\nrank 2|.|.",
            "step 0: rank 1 -> rank 2 chunk 0 copy: rank 1 does not hold this chunk yet",
        ),
        (
            "broadcast ranks=3 chunks=1\nrank 0|c0=1\nrank 1|.\nrank 2|.",
            "rank 2 step 0 chunk 0: missing output: no transfer delivers this chunk",
        ),
        (
            "all_reduce ranks=2 chunks=1\nrank 0|c0+1|.\nrank 1|.|.",
            "rank 0 step 0 chunk 0: the output lacks the contribution of rank 1",
        ),
        (
            # Recursive doubling: the ranks of a pair encode the same sum, each in its own way.
            DOUBLING,
            r"rank 1 step 1 chunk 0: ends with \(q1\(q0\(x0\)\+q1\(x1\)\)\+q3\(.*\), but rank 0 with \(q0\(",
        ),
        (
            "broadcast ranks=2 chunks=1\nrank 0|c0=1|c0=1\nrank 1|.|.",
            "rank 1 step 0 chunk 0: useless transfer: no output depends on what it delivers",
        ),
        (
            "broadcast ranks=3 chunks=1\nrank 0|c0=1|c0=1\nrank 1|.|c0=2\nrank 2|.|.",
            "rank 1 step 1 chunk 0: redundant transfer: the destination already holds this version",
        ),
        (
            "broadcast ranks=2 chunks=1\nrank 0|.|c0=1\nrank 1|.|.",
            "step 0: empty step: no rank sends any chunk",
        ),
        (
            "reduce_scatter ranks=2 chunks=2\nrank 0|c0+1 c1+1\nrank 1|c0+0",
            "rank 1 step 0 chunk 0: useless transfer: no output depends on what it delivers",
        ),
    ],
)
def test_errors_name_rank_step_and_chunk(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        verify(parse(text))


@pytest.mark.parametrize(
    "text",
    [
        "reduce ranks=3 chunks=1 root=1\nrank 0|c0+1\nrank 1|.\nrank 2|c0+1",
        "gather ranks=3 chunks=3 root=1\nrank 0|c0=1\nrank 1|.\nrank 2|c2=1",
        "scatter ranks=3 chunks=3 root=1\nrank 0|.\nrank 1|c0=0 c2=2\nrank 2|.",
        "all_to_all ranks=2 chunks=4\nrank 0|c1=1\nrank 1|c2=0",
    ],
)
def test_schedules_written_by_hand_verify(text: str) -> None:
    schedule = parse(text)
    verify(schedule)
    assert outputs_are_correct(schedule)
    for i in range(len(schedule.transfers)):
        with pytest.raises(ScheduleError):
            verify(replace(schedule, transfers=schedule.transfers[:i] + schedule.transfers[i + 1 :]))


def test_encodings_of_a_chunk_are_counted() -> None:
    assert verify(algorithms.build("tree", "all_reduce", 4)).encodings == {(rank, 0): 1 for rank in range(4)}
    # Rank 1 gives its input away, takes rank 0's over, and encodes the sum that it makes of that as well.
    two_encodings = verify(
        parse("all_reduce ranks=3 chunks=1\nrank 0|.|c0=1|.|.\nrank 1|c0+2|.|.|c0=0,2\nrank 2|.|.|c0+1|.")
    )
    assert two_encodings.encodings == {(0, 0): 1, (1, 0): 2, (2, 0): 1}
    assert not two_encodings.encodes_once
    assert two_encodings.requantizations == 3
