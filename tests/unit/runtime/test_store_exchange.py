"""Exchanges that end at a deadline: ranks that come at the last moment, and which ranks the error names."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch.distributed as dist

from dtcomm.errors import CollectiveMismatch, CollectiveTimeout
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


@contextmanager
def beside(action: Callable[[], None]) -> Iterator[None]:
    """Repeat something in another thread, until the end."""
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(5e-3):
            action()

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_the_error_names_the_rank_that_does_not_wait_for_others() -> None:
    store = dist.HashStore()
    first, connecting, _ = exchanges(store, TIMEOUT, LONG, LONG)
    with beside(connecting.check):
        with pytest.raises(CollectiveTimeout, match=r"^rank 12 did not come"):
            first.all_gather({})
    first.withdraw()
    connecting.withdraw()
    assert store.num_keys() == 0


def test_the_error_names_all_if_all_of_them_wait_for_others() -> None:
    first, one, other = exchanges(dist.HashStore(), TIMEOUT, LONG, LONG)
    with beside(one.check), beside(other.check):
        with pytest.raises(CollectiveTimeout, match=r"^ranks 11 and 12 did not come"):
            first.all_gather({})


def test_ranks_meet_after_one_has_asked_who_waits_and_leave_no_keys() -> None:
    store = dist.HashStore()
    first, late = exchanges(store, TIMEOUT, LONG)

    def come_late() -> None:
        while not store.check(["prefix/who_waits"]):
            time.sleep(5e-3)
        late.all_gather({})
        late.close()

    thread = threading.Thread(target=come_late)
    thread.start()
    assert first.all_gather({}) == [{}, {}]
    first.close()
    thread.join()
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
