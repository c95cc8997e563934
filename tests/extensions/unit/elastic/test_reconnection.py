"""Members whose connection to the coordinator is cut come back, also to a coordinator that was started again."""

from __future__ import annotations

import fcntl
import re
import resource
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from dtcomm.errors import JoinRefused, PeerLost
from dtcomm.extensions.elastic import member as member_module
from dtcomm.extensions.elastic.coordinator import Coordinator
from dtcomm.extensions.elastic.member import Member
from dtcomm.extensions.elastic.protocol import Verdict
from tests.support.relay import Relay
from tests.support.waiting import wait_for

pytestmark = pytest.mark.usefixtures("secret")
FACTS = {"model": "a", "codec": "int4"}
YES = Verdict(commit=True, change=False)


class Group:
    """A coordinator with two members, the first of which reaches it through a relay; the first view has number 1."""

    def __init__(
        self, threads: ThreadPoolExecutor, timeout_s: float = 30.0, patience_s: float = 20.0
    ) -> None:
        self.coordinator = Coordinator("127.0.0.1", ranks=2, timeout_s=timeout_s)
        self.relay = Relay(self.coordinator.port)
        self._threads = threads
        self.members = [
            Member(address, FACTS, name=f"m{index}", timeout_s=patience_s)
            for index, address in enumerate((self.relay.address, self.coordinator.address))
        ]
        assert [view.number for view in threads.map(Member.join, self.members)] == [1, 1]

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *details: object) -> None:
        for member in self.members:
            member.close()
        self.relay.close()
        self.coordinator.close()

    def vote(self) -> list[Verdict]:
        return list(self._threads.map(lambda member: member.vote(True, 8), self.members))

    def reform(self) -> list[tuple[int, tuple[int, ...]]]:
        views = self._threads.map(lambda member: member.reform(admit=True, steps=8), self.members)
        return [(view.number, view.steps) for view in views]

    def restart(self) -> None:
        port = self.coordinator.port
        self.coordinator.close()
        self.coordinator = Coordinator("127.0.0.1", port, ranks=2)

    def count_connected(self) -> int:
        return sum(member.connection is not None for member in self.coordinator._members)

    def requests(self) -> list[str]:
        return [member.request for member in self.coordinator._members]


def test_a_cut_connection_does_not_lose_the_member(threads: ThreadPoolExecutor) -> None:
    with Group(threads) as group:
        group.relay.cut()
        wait_for(lambda: group.count_connected() == 1)
        verdicts = threads.submit(group.vote)
        time.sleep(0.3)
        assert not verdicts.done()
        group.relay.restore()
        assert verdicts.result(20) == [YES, YES]
        assert group.vote() == [YES, YES] and group.coordinator._number == 1


def test_an_answer_that_was_lost_with_the_connection_is_repeated(threads: ThreadPoolExecutor) -> None:
    with Group(threads) as group:
        first = threads.submit(group.members[0].vote, True, 8)
        wait_for(lambda: "vote" in group.requests())
        group.relay.cut()
        wait_for(lambda: group.count_connected() == 1)
        assert group.members[1].vote(True, 8) == YES
        assert not first.done()
        group.relay.restore()
        assert first.result(20) == YES
        assert group.vote() == [YES, YES] and group.coordinator._number == 1


def test_a_request_that_arrived_before_the_cut_counts_once(threads: ThreadPoolExecutor) -> None:
    with Group(threads) as group:
        first = threads.submit(group.members[0].vote, True, 8)
        wait_for(lambda: "vote" in group.requests())
        for _ in range(2):
            group.relay.cut()
            wait_for(lambda: group.count_connected() == 1)
            group.relay.restore()
            wait_for(lambda: group.count_connected() == 2)
        assert group.members[1].vote(False, 8) == Verdict(commit=False, change=False)
        assert first.result(20) == Verdict(commit=False, change=False)
        assert group.reform() == [(2, (8, 8))] * 2


def test_a_member_that_was_removed_comes_back_and_gets_the_state_again(threads: ThreadPoolExecutor) -> None:
    with Group(threads, timeout_s=1.0) as group:
        first, second = group.members
        group.relay.cut()
        assert second.vote(True, 8) == Verdict(commit=True, change=True)
        assert second.reform(admit=True, steps=8).names[0].startswith("m1")
        group.relay.restore()
        assert first.vote(True, 8) == Verdict(commit=False, change=True)
        back = threads.submit(first.reform, admit=False, steps=8)
        wait_for(lambda: "reform" in group.requests())
        assert second.vote(True, 8) == Verdict(commit=True, change=True)
        assert second.reform(admit=True, steps=8).steps == (8, -1)
        assert back.result(20).steps == (8, -1)


def test_a_member_that_comes_back_proves_that_it_knows_the_secret(
    threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Group(threads, timeout_s=4.0) as group:
        group.relay.cut()
        monkeypatch.setenv("DTCOMM_SECRET", "another secret")
        group.relay.restore()
        with pytest.raises(JoinRefused, match="DTCOMM_SECRET"):
            group.members[0].vote(True, 8)
        assert group.members[1].vote(True, 8) == Verdict(commit=True, change=True)


def test_a_coordinator_that_is_started_again_is_rejoined(threads: ThreadPoolExecutor) -> None:
    with Group(threads) as group:
        by_rank = group.coordinator.members()  # either member may have joined first
        assert sorted(by_rank) == ["m0 (127.0.0.1)", "m1 (127.0.0.1)"]
        first = threads.submit(group.members[0].vote, True, 8)
        wait_for(lambda: "vote" in group.requests())
        group.restart()
        assert group.members[1].vote(True, 8) == YES and first.result(20) == YES
        assert group.coordinator.members() == by_rank
        assert group.vote() == [YES, YES]
        assert group.reform() == [(2, (8, 8))] * 2


@pytest.mark.parametrize("request_name", ["vote", "reform"])
def test_an_answer_that_only_one_member_had_before_the_restart_counts(
    request_name: str, threads: ThreadPoolExecutor
) -> None:
    with Group(threads) as group:
        ask: dict[str, Callable[[Member], object]] = {
            "vote": lambda member: member.vote(False, 8),
            "reform": lambda member: member.reform(admit=True, steps=8).number,
        }
        first = threads.submit(ask[request_name], group.members[0])
        wait_for(lambda: request_name in group.requests())
        group.relay.cut()
        wait_for(lambda: group.count_connected() == 1)
        expected = ask[request_name](group.members[1])
        group.restart()
        wait_for(lambda: group.count_connected() == 1)
        group.relay.restore()
        assert first.result(20) == expected
        assert group.vote() == [YES, YES]


def test_a_member_that_does_not_come_back_to_the_new_coordinator_is_gone(threads: ThreadPoolExecutor) -> None:
    with Group(threads) as group:
        group.relay.cut()
        group.restart()
        wait_for(lambda: group.count_connected() == 1)
        (silent,) = (member for member in group.coordinator._members if member.connection is None)
        silent.heard -= 30.0  # the coordinator's timeout
        second = group.members[1]
        assert second.vote(True, 8) == Verdict(commit=True, change=True)
        assert second.reform(admit=True, steps=8).number == 2
        group.relay.restore()
        assert group.members[0].vote(True, 8) == Verdict(commit=False, change=True)


def test_members_that_come_back_after_new_ones_have_begun_keep_their_state(
    threads: ThreadPoolExecutor,
) -> None:
    with Group(threads) as group:
        group.relay.cut()
        group.members.pop().close()
        group.restart()
        new = [Member(group.coordinator.address, FACTS, name="new") for _ in range(2)]
        assert [view.number for view in threads.map(Member.join, new)] == [1, 1]
        group.relay.restore()
        (old,) = group.members
        assert old.vote(True, 100) == Verdict(commit=False, change=True)
        back = threads.submit(old.reform, admit=False, steps=100)
        wait_for(lambda: len(group.coordinator._members) == 3 and "reform" in group.requests())
        assert all(verdict.change for verdict in threads.map(lambda member: member.vote(True, 3), new))
        views = list(threads.map(lambda member: member.reform(admit=True, steps=3), new))
        assert views[0].steps == (3, 3, 100) and back.result(20).rank == 2
        group.members += new


def test_a_coordinator_that_does_not_come_back_is_named(threads: ThreadPoolExecutor) -> None:
    with Group(threads, patience_s=0.6) as group:
        group.coordinator.close()
        start = time.monotonic()
        with pytest.raises(PeerLost, match=rf"{group.coordinator.address} is gone for more than 0.6 s"):
            group.members[1].vote(True, 8)
        assert 0.3 < time.monotonic() - start < 10


def test_a_coordinator_that_is_stopped_with_its_connections_open_is_given_up(
    threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_PING_SECONDS", "_RECONNECT_SECONDS"):
        monkeypatch.setattr(member_module, name, 0.1)
    with Group(threads, patience_s=1.0) as group:
        goes_on = threading.Event()
        group.coordinator._loop.call_soon_threadsafe(goes_on.wait)
        try:
            with pytest.raises(PeerLost, match=re.escape(group.members[1]._address)):
                group.members[1].vote(True, 8)
        finally:
            goes_on.set()


def test_descriptors_above_those_of_select_are_waited_for() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (2048, limits[1]))
    near, far = socket.socketpair()
    try:
        with socket.socket(fileno=fcntl.fcntl(near, fcntl.F_DUPFD, 1100)) as high:
            assert member_module.wait_readable([high], 0) == []
            far.send(b"x")
            assert member_module.wait_readable([high], 10) == [high]
    finally:
        near.close()
        far.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
