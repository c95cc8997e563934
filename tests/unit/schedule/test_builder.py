"""`Builder` gives the schedules of the algorithms that are written with `Transfer`."""

from dataclasses import replace

import pytest

from dtcomm import algorithms
from dtcomm.errors import ScheduleError
from dtcomm.schedule import Builder, Schedule, Transfer, parse, verify

RANKS = [1, 2, 3, 4, 5, 8, 13]


def without_steps(schedule: Schedule) -> Schedule:
    """Return the same transfers, all in step 0."""
    return replace(schedule, transfers=tuple(replace(t, step=0) for t in schedule.transfers))


def build_ring(ranks: int) -> Schedule:
    builder = Builder("all_reduce", ranks, chunks=ranks)
    for c in range(ranks):
        way = [(c + hop) % ranks for hop in range(1, ranks + 1)]  # ends at rank c
        chunk = builder.chunk(c).at(way[0])
        for rank in way[1:]:
            chunk = chunk.reduce_to(rank)
        for rank in way[:-1]:
            chunk = chunk.copy_to(rank)
    return builder.build()


def build_tree(ranks: int, one_send_a_step: bool) -> Schedule:
    builder = Builder("all_reduce", ranks, chunks=1)
    reaches = [1 << power for power in range((ranks - 1).bit_length())]
    step = 0
    for reach in reaches:
        for rank in range(0, ranks - reach, 2 * reach):
            builder.chunk(0).at(rank + reach, step).reduce_to(rank)
        step += one_send_a_step
    for reach in reversed(reaches):
        for rank in range(0, ranks - reach, 2 * reach):
            builder.chunk(0).at(rank, step).copy_to(rank + reach)
        step += one_send_a_step
    return builder.build()


def build_one_shot(ranks: int) -> Schedule:
    builder = Builder("all_reduce", ranks, chunks=1)
    inputs = [builder.chunk(0).at(rank) for rank in range(ranks)]  # before anything has arrived
    for rank, chunk in enumerate(inputs):
        if others := [other for other in range(ranks) if other != rank]:
            chunk.reduce_to(*others)
    return builder.build()


def build_chain(ranks: int) -> Schedule:
    builder = Builder("broadcast", ranks, chunks=ranks, root=ranks - 1)
    for c in range(ranks):
        chunk = builder.chunk(c).at(ranks - 1, step=c)  # one chunk behind the other
        for rank in range(ranks - 1):
            chunk = chunk.copy_to(rank)
    return builder.build()


@pytest.mark.parametrize("ranks", RANKS)
def test_a_builder_gives_the_schedules_of_the_algorithms(ranks: int) -> None:
    assert build_ring(ranks) == algorithms.build("ring", "all_reduce", ranks)
    assert build_one_shot(ranks) == algorithms.build("one_shot", "all_reduce", ranks)
    assert build_chain(ranks) == algorithms.build("ring", "broadcast", ranks, root=ranks - 1)


@pytest.mark.parametrize("ranks", RANKS)
def test_a_tree_sends_a_step_earlier_unless_it_is_told_when(ranks: int) -> None:
    # In the algorithm a rank sends to its children one after the other, and one without children waits for the others.
    expected = algorithms.build("tree", "all_reduce", ranks)
    assert build_tree(ranks, one_send_a_step=True) == expected
    earliest = build_tree(ranks, one_send_a_step=False)
    verify(earliest)
    assert without_steps(earliest) == without_steps(expected)
    assert earliest.steps <= expected.steps


def test_a_chain_of_the_documentation() -> None:
    builder = Builder("all_reduce", ranks=4, chunks=1)
    builder.chunk(0).at(1).reduce_to(2).reduce_to(3).reduce_to(0).copy_to(1, 2, 3)
    chain = [Transfer(0, 1, 2, 0, "reduce"), Transfer(1, 2, 3, 0, "reduce"), Transfer(2, 3, 0, 0, "reduce")]
    copies = [Transfer(3, 0, rank, 0, "copy") for rank in (1, 2, 3)]
    expected = Schedule(collective="all_reduce", ranks=4, chunks=1, transfers=(*chain, *copies))
    assert builder.build() == expected
    assert hash(builder.build()) == hash(expected)
    verify(builder.build())


def test_a_version_is_sent_before_it_is_overwritten() -> None:
    builder = Builder("broadcast", ranks=3, chunks=1)
    builder.chunk(0).at(0).copy_to(1).copy_to(2)
    builder.chunk(0).at(0).copy_to(1)  # waits until rank 1 has sent what it holds
    assert str(builder.build()) == str(
        parse("broadcast ranks=3 chunks=1\nrank 0 | c0=1 | c0=1\nrank 1 | . | c0=2\nrank 2 | . | .")
    )


def test_levels_are_kept() -> None:
    builder = Builder("reduce", ranks=2, chunks=1)
    builder.chunk(0).at(1).reduce_to(0, level=1)
    assert builder.build().transfers == (Transfer(0, 1, 0, 0, "reduce", 1),)


def test_errors_name_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="collective: 'all_sum' is not one of all_reduce, "):
        Builder("all_sum", ranks=2, chunks=1)
    builder = Builder("all_reduce", ranks=3, chunks=2)
    with pytest.raises(ScheduleError, match=r"rank 0 -> rank 3 chunk 1 reduce: ranks are 0\.\.2"):
        builder.chunk(1).at(0).reduce_to(3)
    with pytest.raises(ScheduleError, match=r"chunk 2 copy: chunks are 0\.\.1"):
        builder.chunk(2).at(0).copy_to(1)
    with pytest.raises(ValueError, match=r"chunk 1: say at which rank it is, such as chunk\(1\)\.at\(0\)"):
        builder.chunk(1).copy_to(1)
    with pytest.raises(ValueError, match="ranks: expected at least one rank"):
        builder.chunk(1).at(0).copy_to()
    own = builder.chunk(0).at(2)
    builder.chunk(0).at(0).reduce_to(2)
    builder.chunk(0).at(0).reduce_to(1).reduce_to(0)
    with pytest.raises(ScheduleError, match="rank 2 -> rank 0 chunk 0 reduce: by then rank 2 holds another"):
        own.reduce_to(0)
    assert len(builder.build().transfers) == 3
