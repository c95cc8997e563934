"""The checks of the stress programs detect faults: each is given something that it must reject."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dtcomm.launch.ranks import RankOutcome
from tests.stress.bit_identity import compare
from tests.stress.campaign import judge
from tests.stress.campaign_cases import (
    ACTIONS,
    LIMIT_SECONDS,
    MARGIN_SECONDS,
    PHASES,
    TIMEOUT_SECONDS,
    TRANSPORTS,
    cases,
    make_case,
)
from tests.stress.campaign_ranks import SHARED_MEMORY, Seen, excess
from tests.stress.random_ops import COLLECTIVES, WHOLE, memberships, sequence
from tests.stress.soak import CYCLE, SETTLED, growth

KILLED = make_case("all_reduce", "kill", "memory", 3, 0, victim=1)
GOOD = Seen(error="PeerLost", message="rank 1 (pid 77) is gone", at=10.5, next_error="PeerLost")


def outcome(seen: Seen) -> RankOutcome:
    return RankOutcome(rank=0, ok=True, result=seen)


def test_a_right_report_has_no_complaints() -> None:
    assert judge(KILLED, outcome(GOOD), 10.0, 77) == []


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"error": "CollectiveTimeout"}, "instead of PeerLost"),
        ({"error": "", "message": ""}, "no error instead of PeerLost"),
        ({"message": "rank 2 (pid 77) is gone"}, "does not name rank 1"),
        ({"message": "rank 1 is gone"}, "does not name pid 77"),
        ({"message": "ranks 1 and 2 (pid 77) are gone"}, "does not name rank 1"),
        ({"at": 10.0 + LIMIT_SECONDS + 0.1}, "instead of 2"),
        ({"next_error": "no error"}, "the next call gave no error"),
        ({"next_seconds": 1.0}, "after 1.00 s"),
        ({"close_seconds": LIMIT_SECONDS + 0.1}, "released its communicators after"),
        ({"left": {"threads": ["dtcomm"]}}, "left behind"),
    ],
)
def test_each_flaw_is_named(change: dict[str, object], complaint: str) -> None:
    complaints = judge(KILLED, outcome(replace(GOOD, **change)), 10.0, 77)  # type: ignore[arg-type]
    assert any(complaint in text for text in complaints), complaints


def test_a_survivor_that_hangs_or_dies_is_a_complaint() -> None:
    assert "did not return" in judge(KILLED, RankOutcome(rank=0, timed_out=True, seconds=20), 10.0, 77)[0]
    assert "SIGSEGV" in judge(KILLED, RankOutcome(rank=0, exitcode=-11), 10.0, 77)[0]


def test_a_stopped_rank_is_reported_at_the_groups_timeout() -> None:
    stopped = replace(KILLED, action="stop")
    seen = Seen(error="CollectiveTimeout", message="rank 1", next_error="CollectiveTimeout")
    latest = TIMEOUT_SECONDS + MARGIN_SECONDS
    assert judge(stopped, outcome(replace(seen, at=latest - 0.1)), 0.0, 77) == []
    assert judge(stopped, outcome(replace(seen, at=latest + 0.1)), 0.0, 77) != []


def test_a_rank_of_which_nothing_is_known_may_be_late_and_others_may_not() -> None:
    unknown = make_case("publish", "kill", "sockets", 2, 0, known=False)
    assert unknown.errors == ("CollectiveTimeout",)
    assert replace(unknown, known=True).errors == ("PeerLost",)
    assert replace(unknown, phase="read").errors == ("PeerLost",)


def test_a_case_is_drawn_from_its_seed_alone() -> None:
    def drawn(repeat: int, seed: int) -> list[object]:
        return list(cases(list(PHASES), ["kill", "stop"], ["memory"], [2, 3], range(repeat), seed))

    assert drawn(4, 1) == drawn(4, 1) != drawn(4, 2)
    assert set(drawn(2, 1)) < set(drawn(4, 1))
    everything = [action for actions in ACTIONS.values() for action in actions]
    assert len(list(cases(list(PHASES), everything, list(TRANSPORTS), [2], [0], 0))) == 4 * len(everything)


def test_excess_names_what_is_new() -> None:
    before = {"threads": ["python", "gloo"], "descriptors": ["pipe"]}
    assert excess(before, {"threads": ["gloo", "python"], "descriptors": []}) == {}
    grown = excess(before, {"threads": ["python", "gloo", "gloo"], "descriptors": ["pipe"]})
    assert grown == {"threads": ["gloo"]}
    allowed = {"descriptors": 3}
    assert excess(before, {"threads": [], "descriptors": ["pipe", "socket", "pipe"]}, allowed) == {}
    kept = excess(before, {"threads": [], "descriptors": ["pipe", SHARED_MEMORY[0]]}, allowed)
    assert kept == {"descriptors": [SHARED_MEMORY[0]]}


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
