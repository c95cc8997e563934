"""`dtcomm doctor` under torchrun: which pairs it measures, and what it names."""

from __future__ import annotations

import itertools
import json

import pytest

from dtcomm.cli import doctor as doctor_command
from dtcomm.cli.doctor import network
from dtcomm.cli.doctor.checks import Check
from dtcomm.cli.doctor.network import LinkResult, diagnose
from dtcomm.runtime import emulated_link


def links(hosts: list[str], slow: dict[tuple[int, int], tuple[float, float]]) -> list[LinkResult]:
    """Results of all pairs: 10 Gbit/s and 20 µs, but for those given as (Gbit/s, µs); 0 Gbit/s: failed."""
    results = []
    for pair in (pair for pairs in network.schedule(hosts) for pair in pairs):
        level = "inside" if hosts[pair[0]] == hosts[pair[1]] else "between"
        gbit, latency = slow.get(pair, (10.0, 20.0))
        if gbit == 0:
            results.append(LinkResult(ranks=pair, level=level, error="PeerLost: it has ended"))
        else:
            results.append(LinkResult(ranks=pair, level=level, gbit=(gbit, 11.0), latency_us=latency))
    return results


@pytest.mark.parametrize(
    "hosts", [["a"], ["a", "a"], list("abc"), list("aabb"), list("aaabbc"), list("abab" * 4)]
)
def test_every_pair_inside_hosts_and_every_pair_of_hosts_is_measured(hosts: list[str]) -> None:
    rounds = network.schedule(hosts)
    pairs = [pair for chosen in rounds for pair in chosen]
    assert len(set(pairs)) == len(pairs) and all(a < b for a, b in pairs)
    inside = {
        pair for pair in itertools.combinations(range(len(hosts)), 2) if hosts[pair[0]] == hosts[pair[1]]
    }
    assert inside == {pair for pair in pairs if hosts[pair[0]] == hosts[pair[1]]}
    between = {frozenset((hosts[a], hosts[b])) for a, b in set(pairs) - inside}
    assert between == set(map(frozenset, itertools.combinations(set(hosts), 2)))
    for rank, host in enumerate(hosts):  # every rank has a link to every other host
        for other in set(hosts) - {host}:
            assert any(rank in pair and other in (hosts[pair[0]], hosts[pair[1]]) for pair in pairs)
    for chosen in rounds:  # a host takes part in one pair of a round
        busy = [host for a, b in chosen for host in {hosts[a], hosts[b]}]
        assert len(busy) == len(set(busy))


def test_equal_links_have_no_diagnosis() -> None:
    for hosts in (["a"], list("ab"), list("aabb"), list("aaaa")):
        assert diagnose(links(hosts, {}), hosts) == network.Diagnosis()
    # Links between hosts are slower than memory inside of one, as everywhere.
    hosts = list("aab")
    between = {(0, 2): (1.0, 60.0), (1, 2): (1.0, 60.0)}
    assert diagnose(links(hosts, between), hosts) == network.Diagnosis()


def test_a_rank_is_named_whose_links_are_all_slow() -> None:
    hosts = list("abc")
    (line,) = diagnose(links(hosts, {(0, 1): (2.0, 20.0), (1, 2): (1.0, 20.0)}), hosts).slow
    assert line.startswith("rank 1 (host b): all 2 links are slow; the worst: 1 Gbit/s")
    (line,) = diagnose(links(hosts, {(0, 2): (10.0, 99.0), (1, 2): (10.0, 99.0)}), hosts).slow
    assert line.startswith("rank 2 (host c)") and "99 µs, the best link has 10 Gbit/s, 20 µs" in line


def test_a_single_slow_link_is_named() -> None:
    hosts = list("aaaa")
    assert diagnose(links(hosts, {(1, 3): (4.0, 20.0)}), hosts).slow == [
        "ranks 1 and 3: 4 Gbit/s, 20 µs, the best link has 10 Gbit/s, 20 µs"
    ]
    assert not diagnose(links(hosts, {(1, 3): (6.0, 45.0)}), hosts).slow


def test_a_host_is_named_whose_ranks_are_all_slow() -> None:
    hosts = list("aabbcc")
    slow = dict.fromkeys([(0, 4), (1, 5), (2, 4), (3, 5)], (1.0, 20.0))
    (line,) = diagnose(links(hosts, slow), hosts).slow
    assert line.startswith("host c (ranks 4, 5): all 4 links are slow")


def test_failed_links_are_failures_and_name_the_rank() -> None:
    hosts = list("abc")
    (line,) = diagnose(links(hosts, {(0, 1): (0, 0), (1, 2): (0, 0)}), hosts).failures
    assert line == "rank 1 (host b): all 2 links failed; the worst: failed: PeerLost: it has ended"
    (line,) = diagnose(links(list("ab"), {(0, 1): (0, 0)}), list("ab")).failures
    assert line == "ranks 0 and 1: failed: PeerLost: it has ended"


def test_links_that_miss_what_is_expected_are_failures() -> None:
    hosts = list("aab")
    between = links(hosts, {(0, 2): (1.0, 60.0), (1, 2): (9.0, 60.0)})
    limits = emulated_link.parse("between=8gbit,100us", "--expect")
    assert diagnose(between, hosts, limits).failures == [
        "ranks 0 and 2: 1 Gbit/s, 60 µs, expected 8 Gbit/s and 100 µs"
    ]
    assert len(diagnose(between, hosts, emulated_link.parse("between=0.5gbit,50us")).failures) == 2
    assert not diagnose(between, hosts, emulated_link.parse("inside=9gbit")).failures
    one_host = links(list("aa"), {})
    assert "no link between hosts" in diagnose(one_host, list("aa"), limits).failures[0]
    assert not diagnose(one_host, list("aa"), emulated_link.parse("9gbit")).failures
    assert diagnose([], ["a"], emulated_link.parse("9gbit")).failures
    check = network.links_check(between, hosts, limits)
    assert check.status == "FAIL" and check.summary.startswith("ranks 0 and 2")
    assert (
        "1 links inside hosts: 10 to 10 Gbit/s" in check.summary
        and "2 links between hosts: 1 to 9" in check.summary
    )
    json.dumps(check.as_dict())


def test_the_table_has_both_directions() -> None:
    check = network.links_check(links(list("ab"), {}), list("ab"), emulated_link.Links())
    assert network.table(check) == [
        "    Gbit/s    to 0    to 1",
        "    from 0              10",
        "    from 1      11        ",
    ]
    assert network.table(Check(name="links", summary="")) == []


def test_hosts_of_one_name_are_told_apart() -> None:
    descriptions = [{"name": name, "host": host} for name, host in ("n1", "n2", "n1", "m3")]
    assert network._host_names(descriptions) == ["n #1", "n #2", "n #1", "m"]


def test_a_wrong_expectation_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for value, says in (
        ("fast", "--expect='fast': 'fast' is not a rate such as 10gbit"),
        ("9gbit", "start it with torchrun"),
    ):
        with pytest.raises(SystemExit):
            doctor_command.main(["--expect", value])
        assert says in capsys.readouterr().err
