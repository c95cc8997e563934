"""Exchanges that end at a deadline: ranks that come at the last moment, and which ranks the error names."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch.distributed as dist

from dtcomm.errors import CollectiveMismatch, CollectiveTimeout
from dtcomm.runtime import process_groups
from dtcomm.runtime.bootstrap import rendezvous
from dtcomm.runtime.bootstrap.rendezvous import Rendezvous, StoreExchange, places
from dtcomm.runtime.process_groups import Deadline
from tests.support.waiting import wait_for


class LateStore(dist.HashStore):  # type: ignore[misc, name-defined]
    """A store in which rank 1's key appears after the first look for all keys."""

    def check(self, keys: list[str]) -> bool:
        present: bool = super().check(keys)
        if len(keys) > 1:
            self.set("prefix/0/1", '{"value": 1}')
        return present


def test_a_rank_that_comes_at_the_deadline_is_not_late() -> None:
    exchange = StoreExchange(LateStore(), "prefix", 0, [4, 5], Deadline(timedelta(0)))
    assert exchange.all_gather({"value": 0}) == [{"value": 0}, {"value": 1}]


TIMEOUT = timedelta(seconds=0.6)
LONG = timedelta(seconds=20)


def exchanges(store: dist.Store, *timeouts: timedelta) -> list[StoreExchange]:
    """Return the exchanges of global ranks 10, 11 and so on, which wait for so long."""
    ranks = [10 + rank for rank in range(len(timeouts))]
    return [StoreExchange(store, "prefix", rank, ranks, Deadline(long)) for rank, long in enumerate(timeouts)]


class Clock:
    """A clock that stands still but for pauses, in which the other ranks act."""

    def __init__(self) -> None:
        self.now = 0.0
        self.in_pauses: list[Callable[[], None]] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for action in self.in_pauses:
            action()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(rendezvous, "time", clock)
    monkeypatch.setattr(process_groups, "time", clock)
    return clock


def test_the_error_names_the_rank_that_does_not_wait_for_others(clock: Clock) -> None:
    store = dist.HashStore()
    first, connecting, _ = exchanges(store, TIMEOUT, LONG, LONG)
    clock.in_pauses = [connecting.check]
    with pytest.raises(CollectiveTimeout, match=r"^rank 12 did not come"):
        first.all_gather({})
    first.withdraw()
    connecting.withdraw()
    assert store.num_keys() == 0


def test_the_error_names_all_if_all_of_them_wait_for_others(clock: Clock) -> None:
    first, one, other = exchanges(dist.HashStore(), TIMEOUT, LONG, LONG)
    clock.in_pauses = [one.check, other.check]
    with pytest.raises(CollectiveTimeout, match=r"^ranks 11 and 12 did not come"):
        first.all_gather({})


def test_ranks_meet_after_one_has_asked_who_waits_and_leave_no_keys(clock: Clock) -> None:
    store = dist.HashStore()
    first, late = exchanges(store, TIMEOUT, LONG)

    def come_late() -> None:
        if store.check(["prefix/who_waits"]):
            clock.in_pauses.clear()
            late.all_gather({})
            late.close()

    clock.in_pauses = [come_late]
    assert first.all_gather({}) == [{}, {}]
    first.close()
    assert store.num_keys() == 0


def test_ranks_with_two_versions_of_the_protocol_name_both_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    store, found = dist.HashStore(), []

    def meet(rank: int) -> None:
        with pytest.raises(CollectiveMismatch) as error:
            Rendezvous(store, "name", rank, [4, 5], Deadline(LONG)).run(
                lambda exchange: exchange.all_gather({})
            )
        found.append(str(error.value))

    first = threading.Thread(target=meet, args=[0])
    first.start()
    wait_for(lambda: bool(store.check(["dtcomm/version/name"])))
    monkeypatch.setattr(rendezvous, "PROTOCOL", own := rendezvous.PROTOCOL + 1)
    meet(1)
    first.join()
    expected = f"ranks disagree on the version of dtcomm: rank 4: protocol {own - 1}; rank 5: protocol {own}"
    assert found == [expected] * 2


BOOT = "3f8c/pid:[1]/0"


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        (("a", "rack/b"), "on 2 hosts"),
        ((BOOT, "77aa/pid:[1]/0"), "on 2 hosts"),
        ((BOOT, "3f8c/pid:[2]/0", "3f8c/pid:[2]/7"), "in 2 PID namespaces, such as containers, of one host"),
        ((BOOT, "3f8c/pid:[1]/7"), "of 2 user ids on one host"),
    ],
)
def test_what_is_known_of_where_ranks_are(ids: tuple[str, ...], text: str) -> None:
    assert places(ids) == text
