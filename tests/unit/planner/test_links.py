"""Ranks are grouped by the rates of their links."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch

from dtcomm.codecs import codec
from dtcomm.planner import Table, explain, levels_of
from dtcomm.planner.links import LinkRates


def sites(*sizes: int, fast: float, slow: float) -> LinkRates:
    """Return the rates of ranks in sites, with fast links inside and slow ones between them."""
    site = [index for index, size in enumerate(sizes) for _ in range(size)]
    return LinkRates(gbit=[[fast if a == b else slow for b in site] for a in site])


@pytest.mark.parametrize(
    ("links", "groups"),
    [
        (sites(2, 2, fast=100, slow=1), ((0, 1), (2, 3))),
        (sites(1, 3, fast=10, slow=0.5), ((0,), (1, 2, 3))),
        (sites(2, 2, 2, fast=1000, slow=100), ((0, 1), (2, 3), (4, 5))),
        (sites(2, 2, fast=10, slow=6), ((0, 1, 2, 3),)),
        (sites(4, fast=1, slow=1), ((0, 1, 2, 3),)),
    ],
)
def test_links_whose_rates_differ_by_a_factor_of_two_divide_ranks(
    links: LinkRates, groups: tuple[tuple[int, ...], ...]
) -> None:
    assert links.groups() == groups


def test_one_slow_rank_is_a_group_of_its_own() -> None:
    gbit = [[10.0] * 4 for _ in range(4)]
    for other in range(4):
        gbit[other][2] = 0.5  # into rank 2 alone
    assert LinkRates(gbit=gbit).groups() == ((0, 1, 3), (2,))


def link(a: int, b: int, gbit: tuple[float, float], error: str = "") -> dict[str, Any]:
    return {"ranks": [a, b], "level": "", "gbit": list(gbit), "latency_us": 10.0 * (a + b), "error": error}


def test_the_rates_are_those_of_the_doctor() -> None:
    links = [link(0, 1, (50, 40)), link(2, 3, (60, 60)), link(0, 2, (2, 1)), link(1, 3, (3, 4))]
    hosts = {"name": "ranks", "details": {"hosts": ["a", "a", "b", "b"]}}
    report = {"ok": True, "checks": [hosts, {"name": "links", "details": {"links": links}}]}
    rates = LinkRates.from_doctor(report)
    assert rates.gbit[0][1] == 50 and rates.gbit[1][0] == 40
    assert (rates.gbit[0][3], rates.gbit[3][0]) == (2, 1), "not measured: the worst of its hosts"
    assert rates.latency_us is not None and rates.latency_us[0][3] == 40
    assert rates.groups() == ((0, 1), (2, 3))
    links[2] = link(0, 2, (0, 0), "PeerLost: gone")
    with pytest.raises(ValueError, match="report: the link between ranks 0 and 2 failed: PeerLost"):
        LinkRates.from_doctor(report)
    with pytest.raises(ValueError, match="report: contains no links"):
        LinkRates.from_doctor({"checks": []})


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"gbit": [[1, 2]]}, "gbit: expected one row and one column for each rank"),
        ({"gbit": []}, "gbit: expected one row"),
        ({"gbit": [[0, 1], [0, 0]]}, "gbit: from rank 1 to rank 0: 0; expected numbers above 0"),
        ({"gbit": [[0, 1], [math.inf, 0]]}, "gbit: from rank 1 to rank 0: inf"),
        ({"gbit": [[0, 1], [1, 0]], "latency_us": [[0]]}, "latency_us: expected one row"),
        (
            {"gbit": [[0, 1], [1, 0]], "latency_us": [[0, -1], [0, 0]]},
            "latency_us: from rank 0 to rank 1: -1; exp",
        ),
    ],
)
def test_wrong_rates_are_named(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        LinkRates(**arguments)


HOSTS = ((0,), (1,), (2,), (3,))


def test_auto_takes_the_groups_and_rates_of_a_file() -> None:
    links = sites(2, 2, fast=10, slow=0.5)
    text = json.dumps({"gbit": links.gbit, "latency_us": [[100.0] * 4] * 4})
    table = Table()
    groups, measured = levels_of(text, table, (0, 1, 2, 3), HOSTS)
    assert groups == ((0, 1), (2, 3))
    assert measured.inside.bandwidth == 10 * 1.25e8 and measured.inside.latency == pytest.approx(1e-4)
    assert measured.between.bandwidth == 0.25 * 1.25e8  # two ranks share the link
    assert measured.between.overhead == table.between.overhead and "DTCOMM_TOPOLOGY" in measured.source
    chosen = explain(
        "all_reduce", 1 << 22, torch.float32, codec("none"), 4, hosts=len(groups), table=measured
    )
    assert chosen.algorithm == "hierarchical"
    assert levels_of("", table, (0, 1, 2, 3), HOSTS) == (HOSTS, table)


def test_a_group_of_some_ranks_takes_their_links() -> None:
    text = json.dumps({"gbit": sites(2, 2, fast=10, slow=0.5).gbit})
    assert levels_of(text, Table(), (1, 2, 3), ((0,), (1,), (2,)))[0] == ((0,), (1, 2))
    groups, table = levels_of(text, Table(), (2, 3), ((0,), (1,)))
    assert groups == ((0,), (1,)) and table.between.bandwidth == 10 * 1.25e8
    assert table.between.latency == Table().between.latency  # the file has none


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "DTCOMM_TOPOLOGY"),
        ('{"rates": []}', "expected a report of dtcomm doctor"),
        ('{"gbit": [[0, 1], [1, 0]]}', "links of 2 ranks; the job has 3"),
        ('{"gbit": 3}', "damaged"),
        ('{"checks": [{"name": "links", "details": {"links": [{}]}}]}', "damaged"),
        ('{"checks": [3]}', "damaged"),
        (json.dumps({"gbit": sites(2, 2, fast=10, slow=0.5).gbit}), "links of 4 ranks; the job has 3"),
    ],
)
def test_a_wrong_file_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        levels_of(text, Table(), (0, 1, 2), ((0,), (1,), (2,)), 3)
