from __future__ import annotations

import pytest

from dtcomm.cli import format_size, parse_size, series


@pytest.mark.parametrize(
    ("text", "size"),
    [
        *[("0", 0), ("4096", 4096), ("1K", 1024), ("64m", 64 * 2**20), ("1.5G", 3 * 2**29), ("2T", 2**41)],
        *[("8KB", 8192), ("8KiB", 8192), (" 16 B ", 16)],
    ],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "K", "-1", "1Q", "1 K 2", "1e6", "1,5G"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)


@pytest.mark.parametrize("size", [0, 1, 1023, 1024, 1536, 2**20, 3 * 2**30, 2**40])
def test_written_sizes_are_read_back(size: int) -> None:
    assert parse_size(format_size(size)) == size
    assert format_size(64 * 2**20) == "64M"


def test_series_step_by_factor_or_by_addition() -> None:
    assert series(1, 100, 7, 4) == [1, 4, 16, 64]
    assert series(10, 31, 10, 0) == [10, 20, 30]
    assert series(5, 5, 0, 2) == [5]
    with pytest.raises(ValueError, match="do not grow"):
        series(1, 2, 0, 0)
    with pytest.raises(ValueError, match="do not grow"):
        series(0, 8, 1, 2)
