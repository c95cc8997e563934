"""The pages on schedules and custom algorithms show the current schedules."""

from pathlib import Path

import pytest

from dtcomm import algorithms
from dtcomm.codecs import codec
from dtcomm.errors import ScheduleError
from dtcomm.schedule import parse, verify

DOCS = Path(__file__).parents[3] / "docs"
TEXT = (DOCS / "how-it-works" / "schedules.md").read_text()
GUIDE = (DOCS / "guides" / "custom-algorithm.md").read_text()


def test_documented_schedule_is_printed() -> None:
    schedule = algorithms.build("halving", "all_reduce", 3)
    assert str(schedule) in TEXT
    assert (schedule.steps, schedule.requantizations()) == (4, 2)


def test_documented_example_and_error() -> None:
    example = parse(GUIDE.split('relay = """')[1].split('"""')[0])
    assert verify(example).encodes_once
    with pytest.raises(ScheduleError) as caught:
        verify(parse("all_reduce ranks=3 chunks=1\nrank 0 | c0+1 | .\nrank 1 | . | c0=0,2\nrank 2 | . | ."))
    assert str(caught.value) in GUIDE


@pytest.mark.parametrize("n", range(2, 34))
def test_documented_table_of_algorithms(n: int) -> None:
    up, down = (n - 1).bit_length(), n.bit_length() - 1
    table = {
        "one_shot": (1, 1, n - 1),
        "two_shot": (2, 2, 2 * (n - 1) / n),
        "ring": (2 * (n - 1), n, 2 * (n - 1) / n),
        "halving": (2 * up, up + 1, 2 * (n - 1) / n),
        "tree": (2 * up, up + 1, max(up, 2)),
        "double_tree": (2 * down, down + 1, 2),
    }
    numel = 2 * 1024 * n
    whole = codec("int8").wire_bytes(numel)
    for name, (steps, encodings, sent) in table.items():
        schedule = algorithms.build(name, "all_reduce", n)
        assert schedule.steps == steps, name
        if name in ("halving", "tree", "double_tree"):
            assert schedule.requantizations() <= encodings, name
        else:
            assert schedule.requantizations() == encodings, name
        most = max(schedule.bytes_on_wire(numel, codec("int8"))) / whole
        assert most <= sent + 1e-9 if name in ("tree", "double_tree") else most == pytest.approx(sent), name
