"""The coordinator and its members, without ranks: views, votes, refusals, silent members, IPv6 and ports."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from dtcomm import env
from dtcomm.errors import DtcommError, JoinRefused
from dtcomm.extensions.elastic import member as member_module
from dtcomm.extensions.elastic.coordinator import Coordinator
from dtcomm.extensions.elastic.member import Member
from dtcomm.extensions.elastic.protocol import MEMBER, PROTOCOL, Seal, Verdict, parse_address, split_head
from dtcomm.runtime.bootstrap.tcp import prove
from tests.support.waiting import wait_for

pytestmark = pytest.mark.usefixtures("secret")
FACTS = {"model": "a", "codec": "int4"}


def join(coordinator: Coordinator, threads: ThreadPoolExecutor, count: int) -> list[Member]:
    members = [Member(_reachable(coordinator), FACTS, name=f"m{index}") for index in range(count)]
    views = list(threads.map(Member.join, members))
    assert [view.rank for view in views] == list(range(count))
    return members


def _reachable(coordinator: Coordinator) -> str:
    return f"localhost:{coordinator.port}"


def vote(threads: ThreadPoolExecutor, members: list[Member], oks: list[bool]) -> list[Verdict]:
    return list(threads.map(lambda pair: pair[0].vote(pair[1], 0), zip(members, oks, strict=True)))


def test_an_average_counts_only_if_it_succeeded_on_all(threads: ThreadPoolExecutor) -> None:
    with Coordinator(ranks=2) as coordinator:
        members = join(coordinator, threads, 2)
        assert vote(threads, members, [True, True]) == [Verdict(commit=True, change=False)] * 2
        assert vote(threads, members, [True, False]) == [Verdict(commit=False, change=False)] * 2
        for member in members:
            member.close()


def test_a_rank_that_begins_anew_alone_is_warned(
    threads: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    with Coordinator(ranks=2, min_members=2) as coordinator:
        for member in join(coordinator, threads, 2):
            member.close()
        assert "begins at step 0" not in caplog.text
        wait_for(lambda: not coordinator._members)
        late = Member(_reachable(coordinator), FACTS, name="late")
        joined = threads.submit(late.join)
        wait_for(lambda: len(coordinator._members) == 1)
        assert not joined.done()
        other = Member(_reachable(coordinator), FACTS, name="other")
        assert other.join().number == joined.result(10).number == 2
        assert "late begins at step 0: all earlier members have left" in caplog.text
        for member in (late, other):
            member.close()


def test_members_that_are_gone_or_wait_change_the_view(threads: ThreadPoolExecutor) -> None:
    with Coordinator(ranks=3) as coordinator:
        members = join(coordinator, threads, 3)
        newcomer = Member(_reachable(coordinator), FACTS, name="new")
        first_view = threads.submit(newcomer.join)
        wait_for(lambda: len(coordinator._members) == 4)
        members.pop().close()
        assert vote(threads, members, [True, True]) == [Verdict(commit=True, change=True)] * 2
        # After a failed average those that wait go on waiting.
        views = list(threads.map(lambda member: member.reform(admit=False, steps=8), members))
        assert [len(view.names) for view in views] == [2, 2] and not first_view.done()
        assert vote(threads, members, [True, True])[0].change
        views = list(threads.map(lambda member: member.reform(admit=True, steps=8), members))
        assert views[0].steps == first_view.result(10).steps == (8, 8, -1)
        assert first_view.result(10).rank == 2 and views[0].number == 3
        for member in (*members, newcomer):
            member.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", ""])
def test_addresses_of_both_families(host: str, threads: ThreadPoolExecutor) -> None:
    if host == "::1" and not _has_ipv6():
        pytest.skip("no IPv6 here")
    with Coordinator(host) as coordinator:
        address = f"[::1]:{coordinator.port}" if host == "::1" else f"127.0.0.1:{coordinator.port}"
        assert host not in ("127.0.0.1", "::1") or coordinator.address == address
        member = Member(address, FACTS)
        assert member.join().rank == 0
        member.close()


def _has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


def test_ports_are_those_of_the_range(threads: ThreadPoolExecutor) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        first = taken.getsockname()[1]
        if first > 65530:
            pytest.skip("at the end of the ports")
        try:
            with Coordinator("127.0.0.1", ports=range(first, first + 5)) as coordinator:
                member = Member(coordinator.address, FACTS)
                ports = {coordinator.port, member.join().store_port}
                assert len(ports) == 2 and ports <= set(range(first + 1, first + 5))
                member.close()
        except OSError as error:
            assert "listen" in str(error)  # another program has them
    with pytest.raises(OSError, match="cannot listen"), socket.create_server(("127.0.0.1", 0)) as taken:
        Coordinator("127.0.0.1", taken.getsockname()[1])


def test_another_secret_is_refused_without_effect(
    threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with Coordinator(ranks=1) as coordinator:
        members = join(coordinator, threads, 1)
        for wrong in ("another secret", ""):
            monkeypatch.setenv("DTCOMM_SECRET", wrong)
            with pytest.raises(JoinRefused, match="DTCOMM_SECRET"):
                Member(_reachable(coordinator), FACTS).join()
        assert [r.message.count("refused a caller from") for r in caplog.records] == [
            1
        ]  # one line for an address
        assert "another secret" not in caplog.text and "a secret" not in caplog.text
        assert vote(threads, members, [True]) == [Verdict(commit=True, change=False)]
        members[0].close()


def test_a_coordinator_with_another_secret_is_not_believed(
    threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A false coordinator that does not check the member's proof cannot make one of its own."""

    def serve(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(
                Seal(b"", b"coordinator").close(
                    {"dtcomm": "coordinator", "protocol": PROTOCOL, "nonce": "00"}
                )
            )
            length, _ = split_head(connection.recv(36, socket.MSG_WAITALL))
            connection.recv(length, socket.MSG_WAITALL)
            connection.sendall(Seal(b"guessed", b"coordinator").close({"commit": True}))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        served = threads.submit(serve, listener)
        member = Member(f"127.0.0.1:{listener.getsockname()[1]}", FACTS)
        with pytest.raises(JoinRefused, match="DTCOMM_SECRET"):
            member.join()
        served.result(10)
        member.close()


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({"model": "b", "codec": "int4"}, "model: b; the members have a"),
        ({"model": "a", "codec": "int8"}, "codec: int8; the members have int4"),
        ({"model": "a"}, "codec: none; the members have int4"),
    ],
)
def test_a_caller_that_differs_is_refused_and_told_why(
    facts: dict[str, str], text: str, threads: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    with Coordinator() as coordinator:
        members = join(coordinator, threads, 1)
        other = Member(_reachable(coordinator), facts, name="other")
        with pytest.raises(JoinRefused, match=text):
            other.join()
        other.close()
        wait_for(lambda: text in caplog.text)
        assert coordinator.members() == [name for name in coordinator.members() if name.startswith("m0")]
        assert vote(threads, members, [True]) == [Verdict(commit=True, change=False)]
        members[0].close()


def test_strangers_do_not_disturb_the_members(
    threads: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    with Coordinator() as coordinator:
        members = join(coordinator, threads, 1)
        address = ("127.0.0.1", coordinator.port)
        strangers = [socket.create_connection(address) for _ in range(300)]  # more than are served at once
        members += [Member(_reachable(coordinator), FACTS)]  # an idle stranger makes room
        wait_for(lambda: len(coordinator._members) == 2)
        members.pop().close()
        wait_for(lambda: len(coordinator._members) == 1)
        assert 1 <= caplog.text.count("callers from") <= 2 and len(coordinator._strangers) <= 64
        strangers[0].sendall(b"GET / HTTP/1.1\r\n\r\n" * 20)
        strangers[1].sendall(b"\xff" * 100)
        assert vote(threads, members, [True]) == [Verdict(commit=True, change=False)]
        for stranger in strangers:
            stranger.close()
        wait_for(lambda: not coordinator._strangers)
        members += [Member(_reachable(coordinator), FACTS)]
        wait_for(lambda: len(coordinator._members) == 2)
        assert vote(threads, members[:1], [True])[0].change
        for member in members:
            member.close()


@pytest.mark.parametrize(
    "hello",
    [{}, {"nonce": 1}, {"nonce": "00", "facts": [], "steps": 0, "name": ""}, {"nonce": "00", "facts": {}}],
)
def test_a_caller_that_knows_the_secret_but_not_the_protocol_is_refused(
    hello: dict[str, Any], threads: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    with Coordinator() as coordinator:
        members = join(coordinator, threads, 1)
        with socket.create_connection(("127.0.0.1", coordinator.port)) as caller:
            length, _ = split_head(caller.recv(36, socket.MSG_WAITALL))
            greeting = json.loads(caller.recv(length, socket.MSG_WAITALL))
            key = prove(b"a secret", bytes.fromhex(greeting["nonce"]))
            caller.sendall(Seal(key, MEMBER).close(hello))
            caller.settimeout(10)
            assert caller.recv(1) == b""
        wait_for(lambda: "refused a caller from" in caplog.text)
        assert vote(threads, members, [True]) == [Verdict(commit=True, change=False)]
        members[0].close()


def test_a_silent_member_is_removed(
    threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(member_module, "_PING_SECONDS", 0.1)
    with Coordinator(ranks=2, timeout_s=0.8) as coordinator:
        members = join(coordinator, threads, 2)
        with members[1]._changed:  # its pings end, as if its host had stopped
            assert members[0].vote(False, 0) == Verdict(commit=False, change=True)
        assert "not heard of" in caplog.text
        assert members[1].vote(True, 0) == Verdict(commit=False, change=True), "the others went on without it"
        for member in members:
            member.close()


def test_members_that_call_different_things_are_told(threads: ThreadPoolExecutor) -> None:
    with Coordinator(ranks=2) as coordinator:
        members = join(coordinator, threads, 2)
        calls: list[Callable[[], Any]] = [
            lambda: members[0].vote(True, 0),
            lambda: members[1].reform(admit=True, steps=0),
        ]
        for future in [threads.submit(call) for call in calls]:
            with pytest.raises(DtcommError, match="different things"):
                future.result(10)
        for member in members:
            member.close()


def test_a_message_cannot_be_repeated_or_changed() -> None:
    closer, opener = Seal(b"key", MEMBER), Seal(b"key", MEMBER)
    sealed = closer.close({"request": "vote"})
    length, proof = split_head(sealed[:36])
    assert opener.open(proof, sealed[36 : 36 + length]) == {"request": "vote"}
    with pytest.raises(PermissionError):
        opener.open(proof, sealed[36:])
    changed = sealed[36:].replace(b"vote", b"veto")
    with pytest.raises(PermissionError):
        Seal(b"key", MEMBER).open(proof, changed)
    with pytest.raises(ValueError, match="are allowed"):
        split_head(b"\xff" * 36)


@pytest.mark.parametrize(
    ("text", "address"), [("host:1", ("host", 1)), ("[fe80::1]:29400", ("fe80::1", 29400))]
)
def test_addresses(text: str, address: tuple[str, int]) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize("text", ["host", "::1:29400", "host:port", "host:70000", ""])
def test_wrong_addresses(text: str) -> None:
    with pytest.raises(ValueError, match=r"coordinator: .*expected host:port"):
        parse_address(text)


def test_nothing_is_left_behind(threads: ThreadPoolExecutor) -> None:
    before = threading.active_count()
    with Coordinator() as coordinator:
        for member in join(coordinator, threads, 1):
            member.close()
            member.close()
        coordinator.close()
    assert threading.active_count() <= before + 1  # a thread of the pool
    assert env.printable("DTCOMM_SECRET", "x") == "(set)"
    with pytest.raises(ValueError, match="ranks"):
        Coordinator(ranks=0)
    with pytest.raises(ValueError, match="timeout_s"):
        Coordinator(timeout_s=0)
