"""``parse`` is the inverse of ``str`` and names the place that it cannot read."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dtcomm.errors import ScheduleError
from dtcomm.schedule import Schedule, Transfer, parse


@st.composite
def any_schedule(draw: st.DrawFn) -> Schedule:
    # Whatever can be written down, sensible or not.
    ranks, chunks = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    collective = draw(st.sampled_from(["all_reduce", "broadcast"]))
    ops = ["reduce", "copy"] if collective == "all_reduce" else ["copy"]
    transfer = st.builds(
        Transfer,
        st.integers(0, 6),
        st.integers(0, ranks - 1),
        st.integers(0, ranks - 1),
        st.integers(0, chunks - 1),
        st.sampled_from(ops),
        st.integers(0, 2),
    ).filter(lambda t: t.src != t.dst)
    return Schedule(
        collective=collective,
        ranks=ranks,
        chunks=chunks,
        root=draw(st.integers(0, ranks - 1)) if collective == "broadcast" else 0,
        transfers=tuple(draw(st.lists(transfer, max_size=12))) if ranks > 1 else (),
    )


@given(any_schedule())
@settings(max_examples=300, deadline=None)
def test_round_trip(schedule: Schedule) -> None:
    assert parse(str(schedule)) == schedule


def test_parse_accepts_any_spacing() -> None:
    schedule = parse("\n  broadcast ranks=2 chunks=2 root=1  \n rank 0 |. \n rank 1|c0=0   c1=0@1\n")
    assert schedule == Schedule(
        collective="broadcast",
        ranks=2,
        chunks=2,
        root=1,
        transfers=(Transfer(0, 1, 0, 0, "copy"), Transfer(0, 1, 0, 1, "copy", 1)),
    )
    assert str(schedule) == "broadcast ranks=2 chunks=2 root=1\nrank 0 | .\nrank 1 | c0=0 c1=0@1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: expected 'collective ranks=N chunks=C"),
        ("all_reduce ranks=2", "line 1: expected .* got 'all_reduce ranks=2'"),
        ("all_reduce ranks=2 chunks=1\nrank 0 | .", "a row for each of 2 ranks, got 1 rows"),
        (
            "all_reduce ranks=2 chunks=1\nrank 0 | .\nrank 0 | .",
            r"line 3: expected 'rank 1 \| ...', got 'rank 0",
        ),
        (
            "all_reduce ranks=2 chunks=1\nrank 0 | . | c0*1\nrank 1 | .",
            r"rank 0 step 1: expected .* got 'c0\*1'",
        ),
        ("all_reduce ranks=2 chunks=1\nrank 0 | c0+7\nrank 1 | .", "step 0: rank 0 -> rank 7 chunk 0 reduce"),
    ],
)
def test_parse_errors_name_the_place(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        parse(text)
