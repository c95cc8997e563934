"""Every algorithm against its golden text, and the registry's answers."""

from dataclasses import replace
from pathlib import Path

import pytest

from dtcomm import algorithms
from dtcomm.codecs import codec
from dtcomm.errors import ScheduleError
from dtcomm.schedule import lower, parse, verify

GOLDEN = Path(__file__).parent / "golden"
NAMES = [(c, name) for c in algorithms.collectives() for name in algorithms.available(c)]


def golden(collective: str, name: str) -> str:
    """Schedules for 1 to 5 ranks (a broadcast's from the last but one), an empty line between them."""
    roots = {ranks: max(ranks - 2, 0) if collective == "broadcast" else 0 for ranks in range(1, 6)}
    return (
        "\n\n".join(str(algorithms.build(name, collective, ranks, root)) for ranks, root in roots.items())
        + "\n"
    )


@pytest.mark.parametrize(("collective", "name"), NAMES)
def test_golden(collective: str, name: str) -> None:
    text = (GOLDEN / f"{collective}.{name}.txt").read_text()
    assert golden(collective, name) == text
    for block in text.split("\n\n"):
        schedule = parse(block)
        assert schedule == algorithms.build(name, collective, schedule.ranks, schedule.root)
        verify(schedule)


def test_no_golden_is_left_over() -> None:
    assert {path.name for path in GOLDEN.iterdir()} == {f"{c}.{name}.txt" for c, name in NAMES}


@pytest.mark.parametrize(("collective", "name"), NAMES)
@pytest.mark.parametrize("ranks", [6, 8, 13, 16, 31])
def test_any_number_of_ranks(collective: str, name: str, ranks: int) -> None:
    roots = range(0, ranks, 5) if collective == "broadcast" else [0]
    for root in roots:
        assert verify(algorithms.build(name, collective, ranks, root)).encodes_once


def test_many_ranks() -> None:
    # A contribution may have come through as many hops as there are ranks.
    ring = algorithms.build("ring", "all_reduce", 200)
    few = replace(ring, transfers=tuple(t for t in ring.transfers if t.chunk < 2))
    assert few.requantizations() == 200
    assert len(few.bytes_on_wire(1000, codec("none"))) == 200
    assert sum(lower(few, 0).boxes) == 2 * 398  # a version is sent once and has one box
    with pytest.raises(ScheduleError, match=r"rank 0 step 397 chunk 2: .* lacks what ranks 1, 2, "):
        verify(few)


def test_steps() -> None:
    def steps(name: str, collective: str, ranks: int) -> int:
        return algorithms.build(name, collective, ranks).steps

    for ranks in (1, 2, 3, 8, 9):
        assert steps("ring", "all_reduce", ranks) == 2 * (ranks - 1)
        assert steps("tree", "all_reduce", ranks) == 2 * (ranks - 1).bit_length()
        assert steps("tree", "broadcast", ranks) == (ranks - 1).bit_length()
        assert steps("one_shot", "all_gather", ranks) == (ranks > 1)
        assert steps("two_shot", "all_reduce", ranks) == 2 * (ranks > 1)


def test_tree_spreads_its_roots_over_the_chunks() -> None:
    schedule = algorithms.build("tree", "all_reduce", 4, chunks=6)
    last = max(t.step for t in schedule.transfers if t.op == "reduce")
    roots = {t.chunk: t.dst for t in schedule.transfers if t.step == last}
    assert roots == {chunk: chunk % 4 for chunk in range(6)}


def test_available() -> None:
    assert algorithms.available("all_reduce") == ("ring", "tree", "one_shot", "two_shot")
    assert algorithms.available("all_gather") == ("ring", "tree", "one_shot")
    with pytest.raises(
        ValueError, match="'allreduce' is not one of all_reduce, reduce_scatter, all_gather, broadcast"
    ):
        algorithms.available("allreduce")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("rings", "all_reduce", 2),
            "algorithm: 'rings' is not one of ring, tree, one_shot, two_shot, which all_red",
        ),
        (
            ("two_shot", "all_gather", 2),
            "'two_shot' is not one of ring, tree, one_shot, which all_gather has",
        ),
        (("ring", "all_sum", 2), "collective: 'all_sum' is not one of"),
        (("ring", "all_reduce", 0), "ranks: must be at least 1, got 0"),
        (("ring", "all_reduce", 2, 1), "root: all_reduce has none, got 1"),
        (("ring", "broadcast", 2, 2), r"root: 2 is not a rank of 0\.\.1"),
        (("ring", "all_reduce", 2, 0, 4), "chunks: ring cuts all_reduce into one chunk a rank, got chunks=4"),
        (("tree", "all_reduce", 2, 0, 0), "ranks and chunks must be at least 1"),
    ],
)
def test_arguments_that_cannot_be(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        algorithms.build(*arguments)  # type: ignore[arg-type]


if __name__ == "__main__":  # rewrite the golden files: read the difference before committing it
    for collective, name in NAMES:
        (GOLDEN / f"{collective}.{name}.txt").write_text(golden(collective, name))
