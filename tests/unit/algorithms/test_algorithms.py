"""Every algorithm against its golden text, and the registry's names and errors."""

from dataclasses import replace
from pathlib import Path

import pytest

from dtcomm import algorithms
from dtcomm.algorithms import hierarchical
from dtcomm.codecs import codec
from dtcomm.errors import ScheduleError
from dtcomm.schedule import lower, parse, verify
from dtcomm.schedule.ir import COLLECTIVES, ROOTED
from tests.unit.algorithms.every_algorithm import NAMES, build

GOLDEN = Path(__file__).parent / "golden"


def golden(collective: str, name: str) -> str:
    """Return the schedules for 1 to 5 ranks (the root is the last rank but one), separated by empty lines."""
    roots = {ranks: max(ranks - 2, 0) for ranks in range(1, 6)}
    return "\n\n".join(str(build(name, collective, ranks, root)) for ranks, root in roots.items()) + "\n"


@pytest.mark.parametrize(("collective", "name"), NAMES)
def test_schedules_equal_the_golden_text(collective: str, name: str) -> None:
    text = (GOLDEN / f"{collective}.{name}.txt").read_text()
    assert golden(collective, name) == text
    for block in text.split("\n\n"):
        schedule = parse(block)
        assert schedule == build(name, collective, schedule.ranks, schedule.root)
        verify(schedule)


def test_every_golden_file_belongs_to_an_algorithm() -> None:
    assert {path.name for path in GOLDEN.iterdir()} == {f"{c}.{name}.txt" for c, name in NAMES}


@pytest.mark.parametrize(("collective", "name"), NAMES)
@pytest.mark.parametrize("ranks", [*range(6, 18), 31])
def test_every_algorithm_verifies_for_any_number_of_ranks(collective: str, name: str, ranks: int) -> None:
    roots = range(0, ranks, 5) if collective in ROOTED else [0]
    for root in roots:
        assert verify(build(name, collective, ranks, root)).encodes_once


def test_contributions_may_pass_200_hops() -> None:
    # A contribution may have come through as many hops as there are ranks.
    ring = algorithms.build("ring", "all_reduce", 200)
    two_chunks = replace(ring, transfers=tuple(t for t in ring.transfers if t.chunk < 2))
    assert two_chunks.requantizations() == 200
    assert len(two_chunks.bytes_on_wire(1000, codec("none"))) == 200
    assert sum(lower(two_chunks, 0).payload_counts) == 2 * 398  # a version is sent once and has one payload
    with pytest.raises(
        ScheduleError, match=r"rank 0 step 397 chunk 2: .* lacks the contribution of ranks 1, 2, "
    ):
        verify(two_chunks)


def test_numbers_of_steps() -> None:
    def steps(name: str, collective: str, ranks: int) -> int:
        return algorithms.build(name, collective, ranks).steps

    for ranks in (1, 2, 3, 8, 9):
        assert steps("ring", "all_reduce", ranks) == 2 * (ranks - 1)
        assert steps("tree", "all_reduce", ranks) == 2 * (ranks - 1).bit_length()
        assert steps("tree", "broadcast", ranks) == (ranks - 1).bit_length()
        assert steps("one_shot", "all_gather", ranks) == (ranks > 1)
        assert steps("two_shot", "all_reduce", ranks) == 2 * (ranks > 1)


LEVELS = [
    (1,),
    (4,),
    (1, 1, 1, 1),
    (2, 2),
    (4, 4),
    (3, 1),
    (1, 2, 3),
    (5, 2, 4),
    ((0, 2), (1, 3)),
    ((4, 1), (0, 5, 3), (2,)),
]


@pytest.mark.parametrize("hosts", LEVELS)
@pytest.mark.parametrize("levels", ["", ":ring", ":tree/ring", ":halving/tree", ":/one_shot", ":/two_shot"])
def test_hierarchies_verify_and_mark_transfers_between_hosts(hosts: hierarchical.Hosts, levels: str) -> None:
    groups = hierarchical.ranks_by_host(hosts)
    host_of = {rank: host for host, group in enumerate(groups) for rank in group}
    name = f"hierarchical{levels}"
    for collective in algorithms.HIERARCHICAL:
        try:
            algorithms.require(name, collective)
        except ValueError as error:
            shots = {":/one_shot": {"all_reduce"}, ":/two_shot": {"reduce_scatter", "all_gather"}}
            assert collective in shots[levels], error  # noqa: PT017
            continue
        schedule = algorithms.build(name, collective, len(host_of), hosts=hosts)
        assert verify(schedule).encodes_once
        for t in schedule.transfers:
            assert t.level == (host_of[t.src] != host_of[t.dst]), t
        if collective == "all_gather":  # a shard enters each host once
            entered = [(t.chunk, host_of[t.dst]) for t in schedule.transfers if t.level]
            assert len(set(entered)) == len(entered)


def test_a_hierarchy_sends_little_between_hosts() -> None:
    def between(name: str) -> int:
        schedule = algorithms.build(name, "all_reduce", 16, hosts=(8, 8))
        share = 1 / schedule.chunks
        return sum(share for t in schedule.transfers if t.src // 8 != t.dst // 8)

    # Each host's tensor crosses once each way, cut over the pairs of deputies; two shots send every chunk anew.
    assert between("hierarchical") == pytest.approx(2)
    assert between("two_shot") == pytest.approx(16)


@pytest.mark.parametrize("ranks", range(1, 34))
def test_properties_of_double_tree(ranks: int) -> None:
    schedule = algorithms.build("double_tree", "all_reduce", ranks)
    assert schedule.requantizations() <= ranks.bit_length()
    assert schedule.steps == 2 * (ranks.bit_length() - 1)
    inner: dict[int, set[int]] = {}
    for t in schedule.transfers:
        if t.op == "copy":
            inner.setdefault(t.src, set()).add(t.chunk)
    assert all(len(chunks) == 1 for chunks in inner.values())  # nobody has children in both trees
    # All children of a node arrive together: one sum each.
    sums = {(t.dst, t.chunk, t.step) for t in schedule.transfers if t.op == "reduce"}
    assert len(sums) == len({(dst, chunk) for dst, chunk, _ in sums})
    # Nobody sends more than twice the tensor, of which half are its own contributions on the way up.
    assert max(schedule.bytes_on_wire(2 * 1024, codec("none")), default=0) <= 2 * 8192


@pytest.mark.parametrize("ranks", range(1, 34))
def test_properties_of_halving(ranks: int) -> None:
    schedule = algorithms.build("halving", "all_reduce", ranks)
    rounds = (ranks - 1).bit_length()
    assert schedule.steps == 2 * rounds
    assert schedule.requantizations() <= rounds + (ranks > 1)
    if ranks & (ranks - 1) == 0:
        assert schedule.requantizations() == rounds + (ranks > 1)
    numel = 1024 * ranks
    ring = algorithms.build("ring", "all_reduce", ranks)
    assert schedule.bytes_on_wire(numel, codec("int8")) == ring.bytes_on_wire(numel, codec("int8"))
    for step in range(schedule.steps):
        peers = {(t.src, t.dst) for t in schedule.transfers if t.step == step}
        assert len({src for src, _ in peers}) == len({dst for _, dst in peers}) == len(peers)


def test_all_to_all_along_trees_takes_few_steps() -> None:
    for ranks in (2, 3, 8, 13):
        schedule = algorithms.build("tree", "all_to_all", ranks)
        assert schedule.steps == (ranks - 1).bit_length()
        peers = {(t.step, t.src, t.dst) for t in schedule.transfers}
        assert len(peers) == ranks * schedule.steps  # one partner a step


def test_tree_has_a_different_root_for_each_chunk() -> None:
    schedule = algorithms.build("tree", "all_reduce", 4, chunks=6)
    last = max(t.step for t in schedule.transfers if t.op == "reduce")
    roots = {t.chunk: t.dst for t in schedule.transfers if t.step == last}
    assert roots == {chunk: chunk % 4 for chunk in range(6)}


def test_available_algorithms_of_each_collective() -> None:
    assert algorithms.collectives() == COLLECTIVES
    assert algorithms.available("all_reduce") == (
        "ring",
        "tree",
        "double_tree",
        "halving",
        "one_shot",
        "two_shot",
        "hierarchical",
    )
    assert algorithms.available("all_gather") == ("ring", "tree", "halving", "one_shot", "hierarchical")
    assert algorithms.available("all_to_all") == ("tree", "one_shot")
    with pytest.raises(
        ValueError, match="'allreduce' is not one of all_reduce, reduce_scatter, all_gather, broadcast"
    ):
        algorithms.available("allreduce")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("rings", "all_reduce", 2),
            "algorithm: 'rings' is not one of ring, tree, double_tree, halving, one_shot, two_shot, hier",
        ),
        (
            ("two_shot", "all_gather", 2),
            "'two_shot' is not one of ring, tree, halving, one_shot, hierarchical, which all_gather has",
        ),
        (("ring", "all_sum", 2), "collective: 'all_sum' is not one of"),
        (("ring", "all_reduce", 0), "ranks: must be at least 1, got 0"),
        (("ring", "all_reduce", 2, 1), "root: all_reduce has none, got 1"),
        (("ring", "broadcast", 2, 2), r"root: 2 is not a rank of 0\.\.1"),
        (("ring", "all_reduce", 2, 0, 4), "chunks: ring cuts all_reduce into one chunk a rank, got chunks=4"),
        (("tree", "all_reduce", 2, 0, 0), "ranks and chunks must be at least 1"),
        (("hierarchical", "all_reduce", 2, 0, 2), "chunks: hierarchical makes as many as its levels need"),
        (("hierarchical", "all_reduce", 2, 0, None, (2, 1)), r"hosts: \(2, 1\) have 3 ranks, expected 2"),
        (("hierarchical", "all_reduce", 2, 0, None, (2, 0)), "hosts: expected sizes of at least 1"),
        (("hierarchical", "all_reduce", 2, 0, None, ((0, 1), (1,))), "or every rank on one host, got"),
        (
            ("hierarchical:two_shot", "all_reduce", 2),
            "'two_shot' in .* is not one of ring, tree, halving, one_",
        ),
        (
            ("hierarchical:/one_shot", "all_reduce", 2),
            "'one_shot' in .* ring, tree, double_tree, halving, two_s",
        ),
        (("hierarchical:/rings", "all_reduce", 2), "'rings' in .* like hierarchical:ring/tree"),
        (("ring:tree", "all_reduce", 2), "algorithm: 'ring:tree' is not one of"),
        (("hierarchical", "gather", 2), "'hierarchical' is not one of tree, one_shot, which gather has"),
    ],
)
def test_invalid_arguments_are_refused(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        algorithms.build(*arguments)  # type: ignore[arg-type]


if __name__ == "__main__":  # rewrite the golden files: read the difference before committing it
    for collective, name in NAMES:
        (GOLDEN / f"{collective}.{name}.txt").write_text(golden(collective, name))
