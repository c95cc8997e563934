# ruff: noqa: E501 - a refusal a line reads as a table
"""Algorithms that a user registers: where their names are valid, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dtcomm import algorithms
from dtcomm.codecs import codec
from dtcomm.errors import ScheduleError
from dtcomm.planner import Measured, Table, select
from dtcomm.schedule import Builder, Schedule, verify


@pytest.fixture(autouse=True)
def no_registration_remains(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(algorithms, "REGISTERED", {})
    yield
    algorithms.build.cache_clear()
    algorithms.build_single_level.cache_clear()


def star(ranks: int) -> Schedule:
    builder = Builder("all_reduce", ranks, chunks=1)
    for rank in range(1, ranks):
        builder.chunk(0).at(rank).reduce_to(0)
    for rank in range(1, ranks):
        builder.chunk(0).at(0).copy_to(rank)
    return builder.build()


def star_reduce(ranks: int, root: int, chunks: int = 1) -> Schedule:
    builder = Builder("reduce", ranks, chunks, root)
    for chunk in range(chunks):
        for rank in range(ranks):
            if rank != root:
                builder.chunk(chunk).at(rank).reduce_to(root)
    return builder.build()


def without_rank_1(ranks: int) -> Schedule:
    builder = Builder("all_reduce", ranks, chunks=1)
    for rank in range(2, ranks):
        builder.chunk(0).at(rank).reduce_to(0)
    for rank in range(1, ranks):
        builder.chunk(0).at(0).copy_to(rank)
    return builder.build()


def encodes_twice(ranks: int) -> Schedule:
    """Rank 1 sends its input to rank 2, then takes rank 0's and sums the others up to send the result."""
    builder = Builder("all_reduce", ranks, chunks=1)
    chunk = builder.chunk(0)
    chunk.at(1).reduce_to(2)
    chunk.at(0).copy_to(1)
    for rank in range(2, ranks):
        chunk.at(rank).reduce_to(1)
    chunk.at(1).copy_to(*(rank for rank in range(ranks) if rank != 1))
    return builder.build()


def test_a_registered_name_is_valid_where_a_name_is() -> None:
    algorithms.register("star", "all_reduce", star)
    algorithms.register("star", "reduce", star_reduce)
    assert "star" in algorithms.available("all_reduce")
    assert "star" not in algorithms.available("all_gather")
    assert algorithms.is_registered("star") and algorithms.is_registered("hierarchical:ring/star")
    for ranks in (1, 2, 5):
        schedule = algorithms.build("star", "all_reduce", ranks)
        assert schedule == star(ranks) and schedule.steps == 2 * (ranks > 1)
    reduce = algorithms.build("star", "reduce", 4, root=2, chunks=3)
    assert reduce == star_reduce(4, 2, 3)
    assert select("all_reduce", 10, torch.float32, codec("none"), 4, algorithm="star") == "star"
    algorithms.register("star", "all_reduce", star)  # the same again
    with pytest.raises(ValueError, match="chunks: star cuts all_reduce into one chunk a rank, got chunks=2"):
        algorithms.build("star", "all_reduce", 4, chunks=2)


def test_a_registered_algorithm_is_a_level_of_hierarchical() -> None:
    algorithms.register("star", "all_reduce", star)
    algorithms.register("star", "reduce", star_reduce)
    for name, collective in [("hierarchical:ring/star", "all_reduce"), ("hierarchical:star/star", "reduce")]:
        verify(algorithms.build(name, collective, 6, hosts=(3, 2, 1)))
    with pytest.raises(
        ValueError, match="algorithm: 'star' in 'hierarchical:star/ring' is not one of ring, "
    ):
        algorithms.build("hierarchical:star/ring", "all_reduce", 4)

    def one_shot(ranks: int) -> Schedule:
        return algorithms.build("one_shot", "all_reduce", ranks)

    # Hosts would end with sums that each has encoded itself.
    algorithms.register("exchange", "all_reduce", one_shot)
    with pytest.raises(ScheduleError, match="algorithm 'hierarchical:ring/exchange', 4 ranks: rank"):
        algorithms.build("hierarchical:ring/exchange", "all_reduce", 4, hosts=(2, 2))


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ((3, "all_reduce", star), TypeError, "name: expected a str, got int"),
        (("my ring", "all_reduce", star), ValueError, "name: expected a letter, .* got 'my ring'"),
        (("a/b", "all_reduce", star), ValueError, "name: expected a letter, then letters, digits and under"),
        (("ring", "all_reduce", star), ValueError, "name: 'ring' is taken; taken are ring, tree, double_tree"),
        (("auto", "all_reduce", star), ValueError, "name: 'auto' is taken; taken are .*auto, direct, hierarch"),
        (("star", "all_sum", star), ValueError, "collective: 'all_sum' is not one of all_reduce, reduce_scat"),
        (("star", "all_reduce", star(2)), TypeError, "builder: expected a function of the number of ranks, got S"),
    ],
)  # fmt: skip
def test_wrong_registrations_are_refused(arguments: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        algorithms.register(*arguments)
    assert not algorithms.REGISTERED


def test_another_builder_of_the_same_name_is_refused() -> None:
    algorithms.register("star", "all_reduce", star)
    with pytest.raises(ValueError, match="name: 'star' is registered for all_reduce already, with another"):
        algorithms.register("star", "all_reduce", without_rank_1)


@pytest.mark.parametrize(
    ("builder", "kind", "message"),
    [
        (without_rank_1, ScheduleError, "algorithm 'mine', 3 ranks: rank 0 step 0 chunk 0: the output lacks .* rank 1"),
        (lambda ranks: str(star(ranks)), TypeError, "algorithm: the builder of 'mine' returned str, expected a Schedule"),
        (lambda ranks: star(2), ValueError, "the builder of 'mine' returned a schedule of all_reduce, ranks=2, root=0; expected all_reduce, ranks=3, root=0"),
        (lambda ranks: star_reduce(ranks, 1), ValueError, "returned a schedule of reduce, ranks=3, root=1; expected all_reduce"),
    ],
)  # fmt: skip
def test_what_a_builder_returns_is_checked(builder: Any, kind: type[Exception], message: str) -> None:
    algorithms.register("mine", "all_reduce", builder)
    for _ in range(2):
        with pytest.raises(kind, match=message):
            algorithms.build("mine", "all_reduce", 3)


def measured(name: str, seconds: float, hosts: int) -> Measured:
    return Measured(
        collective="all_reduce", algorithm=name, codec="none", ranks=4, hosts=hosts, points=((1024, seconds),)
    )


@pytest.mark.parametrize("hosts", [1, 2])
def test_auto_takes_a_registered_algorithm_only_where_it_was_measured(hosts: int) -> None:
    def chosen(*rows: Measured) -> str:
        table = Table(source="a test", measured=rows)
        return select("all_reduce", 256, torch.float32, codec("none"), 4, hosts, table)

    without = chosen()
    unknown = chosen(measured("star", 1e-6, hosts), measured("ring", 1e-5, hosts))
    assert unknown == "ring"  # of what is registered here
    algorithms.register("star", "all_reduce", star)
    assert chosen() == without != "star"
    assert chosen(measured("star", 1e-6, hosts), measured("ring", 1e-5, hosts)) == "star"
    algorithms.register("twice", "all_reduce", encodes_twice)
    assert not verify(algorithms.build("twice", "all_reduce", 4)).encodes_once  # so no residual could be kept
    assert chosen(measured("twice", 1e-6, hosts), measured("ring", 1e-5, hosts)) == "ring"
