"""The chunk layout of the native core is the one that the Python executor computes."""

from __future__ import annotations

import pytest

from dtcomm import _C

WHOLE, SCATTER, GATHER, EXCHANGE = range(4)


def ranges(*args: object, **kwargs: object) -> list[list[list[tuple[int, int, int, int]]]]:
    return _C.chunk_layout(*args, **kwargs)  # type: ignore[arg-type]


def test_whole_tensors_are_cut_at_granules() -> None:
    assert ranges(WHOLE, [(2500, 1024)], 2, 2) == [[[(0, 0, 0, 1024)]], [[(0, 1024, 1024, 1476)]]]


def test_pieces_take_whole_granules_of_every_segment() -> None:
    (pieces,) = ranges(WHOLE, [(100, 32), (100, 64)], 1, 1, elements=70)
    assert pieces == [[(0, 0, 0, 96)], [(0, 96, 96, 4), (1, 0, 0, 100)]]


@pytest.mark.parametrize(("geometry", "expected"), [(SCATTER, (0, 20, 0, 10)), (GATHER, (0, 0, 20, 10))])
def test_shards(geometry: int, expected: tuple[int, int, int, int]) -> None:
    assert ranges(geometry, [(10, 4)], 3, 3)[2] == [[expected]]


def test_exchange_of_unequal_shards() -> None:
    splits = [1, 2, 3, 0]
    assert ranges(EXCHANGE, [(3, 1)], 4, 2, splits) == [
        [[(0, 0, 0, 1)]],
        [[(0, 1, 0, 2)]],
        [[(0, 0, 1, 3)]],
        [],
    ]


@pytest.mark.parametrize(
    "arguments",
    [(4, [(1, 1)], 1, 1), (WHOLE, [(1, 0)], 1, 1), (EXCHANGE, [(1, 1)], 3, 2), (WHOLE, [(1, 1)], 0, 1)],
)
def test_wrong_arguments(arguments: tuple[object, ...]) -> None:
    with pytest.raises(ValueError, match=r"geometry|segments|chunks"):
        ranges(*arguments)
