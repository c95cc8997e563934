"""The checks of the stress programs detect faults: each is given something that it must reject."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dtcomm.launch.ranks import RankOutcome
from tests.stress.bit_identity import compare
from tests.stress.fault_ranks import Fault, Seen, excess
from tests.stress.faults import GROUP_TIMEOUT, LIMIT_SECONDS, judge
from tests.stress.random_ops import COLLECTIVES, WHOLE, memberships, sequence
from tests.stress.soak import CYCLE, SETTLED, growth

FAULT = Fault(kind="SIGKILL", victim=1, numel=16)
GOOD = Seen(error="PeerLost", message="rank 1 (pid 77) is gone", at=10.5, next_error="PeerLost")


def outcome(seen: Seen) -> RankOutcome:
    return RankOutcome(rank=0, ok=True, result=seen)


def test_a_right_report_has_no_complaints() -> None:
    assert judge(FAULT, outcome(GOOD), 10.0, 77) == []


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"error": "CollectiveTimeout"}, "instead of PeerLost"),
        ({"error": "", "message": ""}, "no error instead of PeerLost"),
        ({"message": "rank 2 (pid 77) is gone"}, "does not name rank 1"),
        ({"message": "rank 1 is gone"}, "does not name pid 77"),
        ({"at": 10.0 + LIMIT_SECONDS + 0.1}, "instead of 2"),
        ({"next_error": "no error"}, "the next call gave no error"),
        ({"next_seconds": 1.0}, "after 1.00 s"),
        ({"left": {"threads": ["dtcomm"]}}, "left behind"),
    ],
)
def test_each_flaw_is_named(change: dict[str, object], complaint: str) -> None:
    complaints = judge(FAULT, outcome(replace(GOOD, **change)), 10.0, 77)  # type: ignore[arg-type]
    assert any(complaint in text for text in complaints), complaints


def test_a_survivor_that_hangs_or_dies_is_a_complaint() -> None:
    assert "did not return" in judge(FAULT, RankOutcome(rank=0, timed_out=True, seconds=20), 10.0, 77)[0]
    assert "SIGSEGV" in judge(FAULT, RankOutcome(rank=0, exitcode=-11), 10.0, 77)[0]


def test_a_stopped_rank_is_reported_at_the_groups_timeout() -> None:
    stopped = replace(FAULT, kind="SIGSTOP")
    seen = Seen(error="CollectiveTimeout", message="rank 1", next_error="CollectiveTimeout")
    in_time = replace(seen, at=GROUP_TIMEOUT + LIMIT_SECONDS - 0.1)
    assert judge(stopped, outcome(in_time), 0.0, 77) == []
    assert judge(stopped, outcome(replace(seen, at=GROUP_TIMEOUT + LIMIT_SECONDS + 0.1)), 0.0, 77) != []


def test_excess_names_what_is_new() -> None:
    before = {"threads": ["python", "gloo"], "descriptors": ["pipe"]}
    assert excess(before, {"threads": ["gloo", "python"], "descriptors": []}) == {}
    grown = excess(before, {"threads": ["python", "gloo", "gloo"], "descriptors": ["pipe"]})
    assert grown == {"threads": ["gloo"]}


def test_one_differing_digest_is_found() -> None:
    compared, unequal = compare([({1: 5, 2: 6}, []), ({1: 5, 2: 7}, []), ({1: 5}, [])])
    assert (compared, unequal) == (2, [2])


def test_operations_are_the_same_for_every_rank_and_cover_everything() -> None:
    assert sequence(3, 4, 50) == sequence(3, 4, 50)
    operations = sequence(3, 4, 2000)
    assert {o.collective for o in operations} == set(COLLECTIVES)
    assert {o.group for o in operations} == set(range(-1, len(memberships(4))))
    assert {o.overlap for o in operations} == {True, False}
    assert any(o.numel == 0 for o in operations) and any(o.numel > 100_000 for o in operations)
    assert any(o.exact for o in operations) and not all(o.exact for o in operations)


def test_two_ranks_have_no_subgroups() -> None:
    assert {o.group for o in sequence(0, 2, 100)} == {WHOLE}


def test_growth_is_distinguished_from_rounds_with_different_usage() -> None:
    def rounds(count: int, leak: float) -> list[dict[str, float]]:
        # One round of a cycle uses more than the others.
        usage = [40 + 4 * (at % CYCLE == 3) + leak * at for at in range(count)]
        return [{"rss_kib": amount, "descriptors": amount, "threads": 3} for amount in usage]

    enough = SETTLED + 2 * CYCLE
    assert growth(rounds(enough - 1, 0)) is None
    for more in range(CYCLE):
        assert growth(rounds(enough + more, 0)) == {"rss_kib": 0, "descriptors": 0, "threads": 0}
    leaking = growth(rounds(enough, 0.5))
    assert leaking is not None and leaking["descriptors"] >= 0.5 * CYCLE
