"""Schedules as values: validation, geometry, bytes on the wire, requantizations."""

import pickle

import pytest

from dtcomm import algorithms
from dtcomm.errors import ScheduleError
from dtcomm.schedule import Schedule, Transfer


class Int8LikeCodec:
    """One byte an element and a 2-byte scale for each block of 4, granules of 8."""

    granularity = 8

    def wire_bytes(self, numel: int, dtype: object = None) -> int:
        return numel * (2 if dtype == "wide" else 1) + 2 * -(-numel // 4)


def test_transfers_are_sorted() -> None:
    transfers = (Transfer(1, 0, 1, 0, "copy"), Transfer(0, 1, 0, 0, "reduce"))
    schedule = Schedule(collective="all_reduce", ranks=2, chunks=1, transfers=transfers)
    schedule_reversed = Schedule(collective="all_reduce", ranks=2, chunks=1, transfers=transfers[::-1])
    assert schedule == schedule_reversed and hash(schedule) == hash(schedule_reversed)
    assert [t.step for t in schedule.transfers] == [0, 1]
    assert pickle.loads(pickle.dumps(schedule)) == schedule


@pytest.mark.parametrize(
    ("transfer", "message"),
    [
        (Transfer(0, 0, 3, 0, "reduce"), r"step 0: rank 0 -> rank 3 chunk 0 reduce: ranks are 0\.\.2"),
        (Transfer(0, -1, 2, 0, "reduce"), r"rank -1 .* ranks are 0\.\.2"),
        (Transfer(2, 0, 1, 5, "reduce"), r"step 2: rank 0 -> rank 1 chunk 5 reduce: chunks are 0\.\.1"),
        (Transfer(0, 1, 1, 0, "copy"), "does not send to itself"),
        (Transfer(0, 0, 1, 0, "add"), "op is reduce or copy"),  # type: ignore[arg-type]
        (Transfer(-1, 0, 1, 0, "copy"), "count from 0"),
    ],
)
def test_invalid_transfers_are_refused(transfer: Transfer, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        Schedule(collective="all_reduce", ranks=3, chunks=2, transfers=(transfer,))


def test_reductions_in_gathers_are_refused() -> None:
    with pytest.raises(ScheduleError, match="all_gather does not reduce"):
        Schedule(collective="all_gather", ranks=2, chunks=2, transfers=(Transfer(0, 0, 1, 0, "reduce"),))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"collective": "allreduce", "ranks": 2, "chunks": 1}, "'allreduce' is not one of all_reduce, "),
        ({"collective": "all_reduce", "ranks": 0, "chunks": 1}, "at least 1, got ranks=0"),
        ({"collective": "all_reduce", "ranks": 2, "chunks": 0}, "at least 1, got ranks=2 chunks=0"),
        ({"collective": "broadcast", "ranks": 2, "chunks": 1, "root": 2}, r"root: 2 is not a rank of 0\.\.1"),
        ({"collective": "all_reduce", "ranks": 2, "chunks": 1, "root": 1}, "root: all_reduce has none"),
        ({"collective": "all_gather", "ranks": 2, "chunks": 1}, "all_gather over 2 ranks has 2, got 1"),
        ({"collective": "all_to_all", "ranks": 3, "chunks": 3}, "all_to_all over 3 ranks has 9, got 3"),
    ],
)
def test_invalid_arguments_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Schedule(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("numel", [0, 1, 7, 8, 9, 100, 1000])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_chunks_cover_the_tensor_and_are_cut_at_granules(ranks: int, numel: int) -> None:
    schedule = algorithms.build("ring", "all_reduce", ranks)
    sizes = [schedule.chunk_numel(chunk, numel, 8) for chunk in range(ranks)]
    assert sum(sizes) == numel
    at = 0
    for size in sizes:
        assert at % 8 == 0 or at == numel
        at += size


def test_bytes_on_wire() -> None:
    codec = Int8LikeCodec()
    whole, half = codec.wire_bytes(64), codec.wire_bytes(32)
    assert algorithms.build("one_shot", "all_reduce", 2).bytes_on_wire(64, codec) == (whole, whole)
    assert algorithms.build("two_shot", "all_reduce", 2).bytes_on_wire(64, codec) == (2 * half, 2 * half)
    assert algorithms.build("tree", "all_reduce", 4).bytes_on_wire(64, codec) == (
        2 * whole,
        whole,
        2 * whole,
        whole,
    )
    assert (
        algorithms.build("one_shot", "all_gather", 4).bytes_on_wire(64, codec)
        == (3 * codec.wire_bytes(16),) * 4
    )
    assert (
        algorithms.build("ring", "reduce_scatter", 4).bytes_on_wire(64, codec)
        == (3 * codec.wire_bytes(16),) * 4
    )
    assert algorithms.build("one_shot", "broadcast", 3, root=1).bytes_on_wire(64, codec) == (0, 2 * whole, 0)
    assert algorithms.build("two_shot", "all_reduce", 2).bytes_on_wire(64, codec, "wide") == (160, 160)
    with pytest.raises(ValueError, match="numel: 65 does not divide into 4 shards"):
        algorithms.build("ring", "all_gather", 4).bytes_on_wire(65, codec)


def test_bytes_on_wire_of_two_levels() -> None:
    class WideCodec(Int8LikeCodec):
        def wire_bytes(self, numel: int, dtype: object = None) -> int:
            return 4 * numel

    # The bytes that crossed level 1 are passed on as they are, whatever level they cross then.
    schedule = Schedule(
        collective="broadcast",
        ranks=4,
        chunks=1,
        transfers=(
            Transfer(0, 0, 2, 0, "copy", 1),
            Transfer(1, 2, 3, 0, "copy"),
            Transfer(1, 0, 1, 0, "copy"),
        ),
    )
    assert schedule.bytes_on_wire(8, [Int8LikeCodec(), WideCodec()]) == (64, 0, 32, 0)


@pytest.mark.parametrize("ranks", range(1, 18))
def test_number_of_requantizations(ranks: int) -> None:
    def count(name: str, collective: str = "all_reduce") -> int:
        return algorithms.build(name, collective, ranks).requantizations()

    if ranks == 1:
        assert {count(name) for name in algorithms.available("all_reduce")} == {0}
        return
    depth = max(rank.bit_count() for rank in range(ranks))  # hops from the deepest leaf to the root
    assert count("ring") == ranks
    assert count("tree") == depth + 1
    assert count("one_shot") == 1
    assert count("two_shot") == 2
    assert count("ring", "reduce_scatter") == ranks - 1
    assert count("tree", "reduce_scatter") == depth
    assert count("one_shot", "reduce_scatter") == 1
    for collective in ("all_gather", "broadcast"):
        assert {count(name, collective) for name in algorithms.available(collective)} == {1}
