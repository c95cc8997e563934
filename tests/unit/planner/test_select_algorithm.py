"""The algorithms that ``auto`` and ``direct`` choose, and their predicted cost."""

import json
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from dtcomm import algorithms
from dtcomm.codecs import Codec, codec
from dtcomm.planner import Measured, Table, Topology, explain, parse, predict, select
from dtcomm.schedule import Transfer
from dtcomm.schedule.simulate import ComputeCost, LinkCost

SIZES = [0, 1, 1000, 10**5, 10**7]


def test_lossless_all_reduce_takes_one_shot_while_small() -> None:
    none, table = codec("none"), Table(one_shot_bytes=64 * 1024)
    names = {
        n: select("all_reduce", n, torch.float32, none, 2, table=table) for n in (1, 16384, 16385, 10**6)
    }
    assert names == {1: "one_shot", 16384: "one_shot", 16385: "two_shot", 10**6: "two_shot"}
    assert select("all_reduce", 16384, torch.float32, none, 3, table=table) == "two_shot"
    assert select("all_reduce", 16385, torch.bfloat16, none, 2, table=table) == "one_shot"
    assert select("all_reduce", 32768, torch.float16, codec("fp16"), 2, table=table) == "one_shot"


def test_the_default_between_hosts_sends_less_than_a_flat_sum() -> None:
    """A bucket of 25 MiB on 8 hosts of 8 ranks: what `ddp.compress` sends with its default algorithm, and flat."""
    numel, hosts = 25 * 2**20 // 4, tuple(tuple(range(8 * host, 8 * host + 8)) for host in range(8))
    left = {
        name: max(
            algorithms.build(name, "all_reduce", 64, hosts=hosts).bytes_leaving(hosts, numel, codec("int8"))
        )
        for name in ("hierarchical", "two_shot")
    }
    assert left["hierarchical"] <= 13e6 < 90e6 < left["two_shot"]


@pytest.mark.parametrize("spec", ["int8", "fp16", "bf16"])
@pytest.mark.parametrize(("algorithm", "hosts"), [("auto", 1), ("direct", 1), ("direct", 2)])
def test_lossy_all_reduce_does_not_depend_on_size(spec: str, algorithm: str, hosts: int) -> None:
    chosen = {
        select("all_reduce", n, torch.float32, codec(spec), 4, hosts, algorithm=algorithm) for n in SIZES
    }
    assert chosen == {"two_shot"}


def test_a_lossy_sum_crosses_hosts_once_where_that_is_much_faster() -> None:
    chosen = {numel: select("all_reduce", numel, torch.float32, codec("int8"), 8, 2) for numel in (1, 10**7)}
    assert chosen == {1: "two_shot", 10**7: "hierarchical"}
    # One rank on each host crosses hosts itself anyway.
    assert select("all_reduce", 10**7, torch.float32, codec("int8"), 2, 2) == "two_shot"


@pytest.mark.parametrize("collective", algorithms.collectives()[1:])
@pytest.mark.parametrize("spec", ["none", "int8"])
def test_other_collectives_take_one_shot_inside_a_host(collective: str, spec: str) -> None:
    assert {select(collective, 4 * n, torch.float32, codec(spec), 4) for n in SIZES} == {"one_shot"}


def test_between_hosts_the_cheapest_wins() -> None:
    none = codec("none")

    def chosen(numel: int, **link: float) -> str:
        table = Table(between=LinkCost(**link))
        return select("all_reduce", numel, torch.float32, none, 16, 16, table)

    assert chosen(100, latency=1e-4, bandwidth=1e9) == "one_shot"
    assert chosen(10**8, latency=1e-6, bandwidth=1e9) == "two_shot"
    # With a price on every message, fewer messages: along a tree, or round a ring.
    assert chosen(1, latency=1e-7, bandwidth=1e10, overhead=1e-3) in ("tree", "double_tree")
    for numel in SIZES:
        shards = 16 * numel
        name = select("all_gather", shards, torch.float32, none, 16, 4)
        assert name in algorithms.available("all_gather")
        topology, costs = Topology.even(16, 4), {}
        for algorithm in algorithms.available("all_gather"):
            schedule = algorithms.build(algorithm, "all_gather", 16, hosts=(4, 4, 4, 4))
            costs[algorithm] = predict(schedule, shards, torch.float32, none, topology, Table())
        assert costs[name] <= 1.5 * min(costs.values())


@pytest.mark.parametrize("hosts", [1, 2])
@pytest.mark.parametrize("ranks", [2, 5])
@pytest.mark.parametrize("collective", algorithms.collectives())
def test_every_chosen_algorithm_can_be_built(collective: str, ranks: int, hosts: int) -> None:
    for spec in ("none", "int8"):
        name = select(collective, 20, torch.float32, codec(spec), ranks, hosts)
        assert algorithms.build(name, collective, ranks).ranks == ranks


def test_explicit_algorithms_are_used_or_refused() -> None:
    assert select("all_reduce", 5, torch.float32, codec("none"), 2, algorithm="ring") == "ring"
    for collective, algorithm, message in (
        ("all_reduce", "rings", "'rings' is not one of auto, direct, ring, tree, double_tree, halving, o"),
        ("all_gather", "two_shot", "'two_shot' is not one of auto, direct, ring, tree, halving, one_shot, h"),
        ("sum", "auto", "collective: 'sum' is not one of"),
    ):
        with pytest.raises(ValueError, match=message):
            select(collective, 5, torch.float32, codec("none"), 2, algorithm=algorithm)


def times(algorithm: str, points: Iterable[tuple[int, float]], spec: str = "none") -> Measured:
    kind: dict[str, Any] = {"collective": "all_reduce", "ranks": 4, "hosts": 1}
    return Measured(**kind, algorithm=algorithm, codec=spec, points=tuple(points))


def table_of_times(**points: list[tuple[int, float]]) -> Table:
    measured = (times(name, pairs, spec) for spec in ("none", "int8") for name, pairs in points.items())
    return Table(source="a test", measured=tuple(measured))


def test_measurements_override_the_model() -> None:
    none, int8 = codec("none"), codec("int8")
    table = table_of_times(
        one_shot=[(1024, 5e-6), (2**20, 4e-4)],
        two_shot=[(1024, 9e-6), (2**20, 2e-4)],
        ring=[(1024, 8e-6), (2**20, 1e-4)],
    )

    def chosen(nbytes: int, spec: Codec = none, ranks: int = 4) -> str:
        return select("all_reduce", nbytes // 4, torch.float32, spec, ranks, table=table)

    assert chosen(1024) == "one_shot"
    assert chosen(2**20) == "ring"
    # A lossy sum is not encoded once more for its speed: a ring of four would encode four times.
    assert chosen(2**20, int8) == "two_shot"
    # Times of a group of another size are not used.
    assert chosen(2**20, ranks=3) == "two_shot"
    assert select("all_reduce", 2**18, torch.float32, none, 4, table=table, algorithm="direct") == "two_shot"
    decision = explain("all_reduce", 2**18, torch.float32, none, 4, table=table)
    assert str(decision) == "ring: measured 100 us (a test)"
    assert dict(decision.seconds)["one_shot"] == pytest.approx(4e-4)


def test_the_default_wins_near_ties() -> None:
    table = table_of_times(one_shot=[(1024, 5.0e-6)], ring=[(1024, 4.9e-6)])
    decision = explain("all_reduce", 256, torch.float32, codec("none"), 4, table=table)
    assert str(decision) == "one_shot: measured 5 us, within 3% of ring (a test)"


def test_times_outside_and_between_two_measured_sizes() -> None:
    (measured, *_) = table_of_times(ring=[(100, 1e-6), (10_000, 1e-4)]).measured
    assert measured.seconds(1) == 1e-6
    assert measured.seconds(1000) == pytest.approx(1e-5)
    assert measured.seconds(20_000) == pytest.approx(2e-4)
    with pytest.raises(ValueError, match="ascending sizes"):
        times("ring", ((2, 1.0), (2, 1.0)))


def test_tables_round_trip_through_json() -> None:
    table = table_of_times(ring=[(1024, 5e-6)])
    assert parse(json.dumps(table.as_dict())).as_dict() == table.as_dict()
    assert parse("") == Table()
    for text, message in (
        ("{", "Expecting"),
        ("[]", "list indices"),
        ('{"version": 0}', "version 0"),
        ('{"version": 2}', "no "),
    ):
        source = r"the table of `dtcomm tune` \(DTCOMM_TUNE\)"
        with pytest.raises(ValueError, match=f"{source} cannot be read.*{message}"):
            parse(text)


def test_topology_groups_ranks_by_host() -> None:
    topology = Topology.of(["a", "b", "a", "c"])
    assert topology == Topology((0, 1, 0, 2))
    assert (topology.ranks, topology.hosts) == (4, 3)
    assert topology.groups == ((0, 2), (1,), (3,))
    assert topology.level(Transfer(0, 0, 2, 0, "copy")) == 0
    assert topology.level(Transfer(0, 0, 1, 0, "copy")) == 1
    assert Topology.even(5, 2).host_of == (0, 0, 0, 1, 1)
    with pytest.raises(ValueError, match=r"hosts: must be 1\.\.2 for 2 ranks, got 3"):
        Topology.even(2, 3)
    with pytest.raises(ValueError, match="rank 1 is on host 2, but only 1"):
        Topology((0, 2))


def test_predicted_cost_equals_the_one_computed_by_hand() -> None:
    table = Table(
        inside=LinkCost(latency=1e-6, bandwidth=1e10),
        between=LinkCost(latency=1e-5, bandwidth=1e9, overhead=1e-6),
        compute=ComputeCost(),
    )
    schedule, none = algorithms.build("one_shot", "all_reduce", 4), codec("none")

    def cost(hosts: int) -> float:
        return predict(schedule, 1024, torch.float32, none, Topology.even(4, hosts), table)

    assert cost(1) == pytest.approx(1e-6 + 3 * 4096e-10)
    # Two of three peers are on the other host; the one on this host is waited for meanwhile.
    assert cost(2) == pytest.approx(1e-5 + 2 * (1e-6 + 4096e-9))
    with pytest.raises(ValueError, match="topology: has 2 ranks, the schedule 4"):
        predict(schedule, 1024, torch.float32, none, Topology.even(2), table)


def test_times_between_measured_sizes() -> None:
    # Small messages take a constant and a time per byte; beyond the size of a cache the time per byte grows.
    sizes = [1024 << at for at in range(0, 17, 4)]
    for law in (lambda size: 5e-6 + size / 1e10, lambda size: 1e-12 * size**1.2):
        measured = times("ring", ((size, law(size)) for size in sizes))
        for size in (1500, 5000, 100_000, 3_000_000):
            assert measured.seconds(size) == pytest.approx(law(size), rel=1e-6)
        assert measured.seconds(10) == law(sizes[0])
        assert measured.seconds(2 * sizes[-1]) == pytest.approx(2 * law(sizes[-1]))
