"""The coordinator: it knows which members take part, and forms a new view when one is gone or wants to join.

``dtcomm coordinator`` is a process that has one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import signal
import socket
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from dtcomm import env
from dtcomm.arguments import require_int
from dtcomm.extensions.elastic import protocol
from dtcomm.extensions.elastic.protocol import COORDINATOR, MEMBER, PROTOCOL, Seal
from dtcomm.runtime.bootstrap.tcp import WRONG_SECRET, nonce, prove, secret, warn_of_caller
from dtcomm.system import printable

_log = logging.getLogger("dtcomm")

_FACTS_SECONDS = 2.0  # for a caller to say who it is
_MAX_STRANGERS = 64  # callers that have not said yet who they are
_CHECK_SECONDS = 0.25
_RETURN_SECONDS = 2.0  # for a member to connect again, where others wait for it
_MAX_REMOVED = 256  # members that are gone and may come back
_LATE_STORES = 2  # a member that is late may still read the store of the view before


class _Connection:
    """Sends messages to a member until the connection ends."""

    def __init__(self, writer: asyncio.StreamWriter, closer: Seal) -> None:
        self._writer, self._closer = writer, closer

    def write(self, message: dict[str, Any]) -> None:
        if not self._writer.is_closing():
            self._writer.write(self._closer.close(message))

    def close(self) -> None:
        self._writer.close()


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Where a member says that it is: the number of its view (0: none), and its answers since, of which ``last``."""

    number: int
    round: int
    last: dict[str, Any]
    view: dict[str, Any]

    @classmethod
    def parse(cls, hello: Mapping[str, Any]) -> _Place:
        """Return the place in a member's first message; ValueError, TypeError or LookupError if it is none."""
        view, last = dict(hello["view"]), dict(hello["last"])
        number = int(view["number"]) if view else 0
        if view and (not len(view["ids"]) == len(view["names"]) > 0 or hello["id"] not in view["ids"]):
            raise ValueError("its view does not contain it")
        return cls(number=number, round=int(hello["round"]), last=last, view=view)


@dataclass(eq=False)
class _Member:
    """A member, or a rank that waits to become one.

    Attributes:
        identity: What it is known by when it connects again.
        facts: What must be equal on all members.
        steps: The steps that its state has seen; -1: it has none.
        heard, lost_at: When it was last heard of, and when its connection ended.
        was_closed: Whether its connection was closed, as when a process ends, and was not cut.
        in_view: Whether it belongs to the present view.
        is_late: Whether the others went on without it.
        request: What it waits for: "vote", "reform" or "".
        ok: Its vote.
        view: The number of the view that it was told; 0: none.
        round: The answers that it was sent in this view; -1: not known, as it has not come back yet.
        last: The last answer that it was sent.
    """

    identity: str
    name: str
    facts: dict[str, str]
    steps: int = -1
    connection: _Connection | None = None
    heard: float = field(default_factory=time.monotonic)
    lost_at: float = field(default_factory=time.monotonic)
    was_closed: bool = False
    in_view: bool = False
    is_late: bool = False
    request: str = ""
    ok: bool = True
    view: int = 0
    round: int = 0
    last: dict[str, Any] = field(default_factory=dict)

    def answer(self, message: dict[str, Any]) -> None:
        """Answer the member's request: now, or when it has connected again if its connection has ended."""
        self.request, self.last = "", message
        if "number" in message:
            self.view, self.round = message["number"], 0
        else:
            self.round += 1
        if self.connection is not None:
            self.connection.write(message)

    def is_ready(self) -> bool:
        """Return whether it waits for a view."""
        asks = not self.view or self.request == "reform"
        return not self.in_view and self.connection is not None and asks


class Coordinator:
    """Serves the members of one training run, in a thread of this process.

    It holds no weights. A member is gone when it was not heard of for ``timeout_s``. It is gone two seconds after its
    connection was closed, as when its process ends, or was cut while an average fails or a group forms. A member
    whose connection was cut comes back without effect on the others before that, and as a rank that waits to join
    after that. Callers with another DTCOMM_SECRET, version, model or options are refused, without effect on the
    members.

    A coordinator that is started again at the same address takes the group over from its members, who go on.

    Each view has a store of torch.distributed on a port of its own, which is not authenticated: let only the ranks'
    hosts reach this one's ports.

    Args:
        host: The address to listen on. Default "": all, of IPv4 and IPv6.
        port: The port; 0: one of ``ports``. Default 0.
        ranks: How many ranks the first view waits for. Default 1.
        min_members: How many ranks a view waits for that begins after all members have left. Default 1.
        timeout_s: Seconds after which a silent member counts as gone. Default 30.
        ports: The ports of the stores, two or more, and of the coordinator if ``port`` is 0. Default None: those of
            DTCOMM_PORTS, else the kernel chooses.

    Attributes:
        address: Where members reach it, such as ``"[::]:29400"``.

    Raises:
        OSError: The port is in use.
        ValueError: An argument is out of range.

    Example::

        with Coordinator(port=29400, ranks=2) as coordinator:
            coordinator.wait()
    """

    def __init__(
        self,
        host: str = "",
        port: int = 0,
        *,
        ranks: int = 1,
        min_members: int = 1,
        timeout_s: float = 30.0,
        ports: range | None = None,
    ) -> None:
        require_int("ranks", ranks, 1)
        require_int("min_members", min_members, 1)
        require_int("port", port, 0)
        if not timeout_s > 0:
            raise ValueError(f"timeout_s={timeout_s}: expected seconds above 0")
        self._ranks, self._min_members, self._timeout_s = ranks, min_members, timeout_s
        self._ports = env.ports() if ports is None else ports
        self._socket = _listen(host, [port] if port else self._ports)
        bound, own_port = self._socket.getsockname()[:2]
        self.address = f"[{bound}]:{own_port}" if ":" in bound else f"{bound}:{own_port}"
        self.port = own_port
        self._secret = secret()
        self._members: list[_Member] = []
        self._removed: dict[str, _Member] = {}  # they may come back
        self._stores: deque[Any] = deque()
        self._strangers: dict[asyncio.Task[Any], str] = {}  # they have not said who they are → address
        self._number = 0
        self._run_name = ""  # tells this training run from others; members know it from their view
        self._someone_left = False
        self._is_taken_over = False  # whether the view is that of an earlier coordinator
        self._is_forming = False  # whether members may still connect to each other through the view's store
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="dtcomm-coordinator", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Wait until the coordinator is closed."""
        self._thread.join()

    def members(self) -> list[str]:
        """Return the names of the members of the present view, by rank."""
        return [member.name for member in list(self._members) if member.in_view]

    def close(self) -> None:
        """Stop. Members raise `PeerLost` at an average if none is started in its place within their timeout.

        A second call does nothing.
        """
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # the loop has just ended
                self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()

    def __enter__(self) -> Coordinator:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()
            self._stores.clear()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._talk, sock=self._socket)
        tasks: set[asyncio.Task[Any]] = set()
        async with server:
            while not self._stop.is_set():
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._stop.wait(), _CHECK_SECONDS)
                self._remove_lost()
        tasks = {task for task in asyncio.all_tasks() if task is not asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection until it ends."""
        caller = str((writer.get_extra_info("peername") or ("?",))[0])
        member = connection = None
        was_closed = False
        try:
            task = self._make_room(caller)
            try:
                member, opener = await asyncio.wait_for(self._admit(reader, writer, caller), _FACTS_SECONDS)
            finally:
                self._strangers.pop(task, None)
            connection = None if member is None else member.connection
            while member is not None and member.connection is connection:
                self._obey(member, await _receive(reader, opener))
        except (
            *(OSError, EOFError, asyncio.TimeoutError),
            *(ValueError, TypeError, AttributeError, LookupError),  # a caller may send any JSON object
        ) as error:
            was_closed = isinstance(error, EOFError)
            if member is None:
                warn_of_caller(
                    caller, f"refused a caller from {caller}: {str(error) or type(error).__name__}"
                )
        except asyncio.CancelledError:
            pass  # the coordinator is closed, or another caller takes the place
        finally:
            if member is not None and member.connection is connection:
                member.connection, member.was_closed, member.lost_at = None, was_closed, time.monotonic()
            writer.close()

    def _make_room(self, caller: str) -> asyncio.Task[Any]:
        """Give this task a place for a caller that has not said who it is.

        If none is free, the oldest caller of the address with the most of them loses its place.
        """
        if len(self._strangers) >= _MAX_STRANGERS:
            (crowded, count), *_ = Counter(self._strangers.values()).most_common(1)
            oldest = next(task for task, address in self._strangers.items() if address == crowded)
            del self._strangers[oldest]
            oldest.cancel()
            text = f"{count} callers from {crowded} have not said who they are; the first is refused"
            warn_of_caller(crowded, text)
        task = asyncio.current_task()
        assert task is not None
        self._strangers[task] = caller
        return task

    async def _admit(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, caller: str
    ) -> tuple[_Member | None, Seal]:
        """Read who a caller is; None if it is refused."""
        own_nonce = nonce()
        greeting = {"dtcomm": "coordinator", "protocol": PROTOCOL, "nonce": own_nonce.hex()}
        writer.write(Seal(b"", COORDINATOR).close(greeting))
        try:
            hello = await _receive(reader, Seal(prove(self._secret, own_nonce), MEMBER))
        except PermissionError:
            writer.write(Seal(b"", COORDINATOR).close({"refused": WRONG_SECRET}))
            raise PermissionError(WRONG_SECRET) from None
        key = prove(self._secret, own_nonce, bytes.fromhex(hello["nonce"]))
        connection, opener = _Connection(writer, Seal(key, COORDINATOR)), Seal(key, MEMBER)
        facts = {printable(str(name)): printable(str(value)) for name, value in hello["facts"].items()}
        identity, steps, place = str(hello["id"]), int(hello["steps"]), _Place.parse(hello)
        name = printable(f"{hello['name']} ({caller})")
        if difference := self._difference(facts):
            _log.warning("dtcomm: refused %s: %s", name, difference)
            connection.write({"refused": difference})
            await writer.drain()
            return None, opener
        member = self._find(identity, place, facts)
        if member is None:
            member = _Member(identity, name, facts, view=place.number, round=place.round, last=place.last)
            member.is_late = bool(self._run_name) and place.view.get("run") == self._run_name
            self._members.append(member)
            _log.info("dtcomm: %s waits to join", name)
        else:
            _log.info("dtcomm: %s is back", member.name)
        self._number = max(self._number, place.number)
        if member.connection is not None:
            member.connection.close()  # the member knows already that it has ended
        member.connection, member.steps, member.heard = connection, steps, time.monotonic()
        if member.round < 0:
            member.view, member.round, member.last = place.number, place.round, place.last
        elif (member.view, member.round) != (place.number, place.round):
            connection.write(member.last)  # it was lost
        self._catch_up()
        self._settle()
        return member, opener

    def _find(self, identity: str, place: _Place, facts: dict[str, str]) -> _Member | None:
        """Return the member that a caller is; None if it is a new one."""
        if identity in self._removed:
            member = self._removed.pop(identity)
            self._members.append(member)
            return member
        newer = place.number > self._number and place.view.get("run") == self._run_name
        if place.number and (not self._run_name or (newer and self._is_taken_over)):
            self._take_over(place.view, facts)
        return next((member for member in self._members if member.identity == identity), None)

    def _take_over(self, view: Mapping[str, Any], facts: dict[str, str]) -> None:
        """Begin with the view of a member of an earlier coordinator; the other members have the timeout to come."""
        self._run_name, self._number, self._is_taken_over = str(view["run"]), int(view["number"]), True
        known = {member.identity: member for member in self._members}
        inside: list[_Member] = []
        for identity, name in zip(map(str, view["ids"]), map(str, view["names"]), strict=True):
            if identity in known:
                inside.append(known.pop(identity))
            else:
                inside.append(_Member(identity, name, facts, round=-1))
            inside[-1].in_view = True
        for member in known.values():
            member.is_late |= member.in_view
            member.in_view = False
        self._members = [*inside, *known.values()]
        names = ", ".join(member.name for member in inside)
        _log.warning("dtcomm: took over view %d of an earlier coordinator: %s", self._number, names)

    def _catch_up(self) -> None:
        """Give the members of a view that was taken over the answers that others of them have had already."""
        if not self._is_taken_over:
            return
        inside = [member for member in self._members if member.in_view and member.round >= 0]
        first = max(inside, key=lambda member: (member.view, member.round), default=None)
        for member in inside:
            if first is None or (member.view, member.round) == (first.view, first.round):
                continue
            if member.view == first.view:
                member.answer(first.last)
            elif "number" in first.last and member.identity in first.last["ids"]:
                member.answer({**first.last, "rank": first.last["ids"].index(member.identity)})

    def _difference(self, facts: dict[str, str]) -> str:
        """Return in what a caller differs from the members; empty if in nothing."""
        if not self._members:
            return ""
        expected = self._members[0].facts
        for name in sorted({*facts, *expected}):
            if facts.get(name) != expected.get(name):
                return f"{name}: {facts.get(name, 'none')}; the members have {expected.get(name, 'none')}"
        return ""

    def _obey(self, member: _Member, message: dict[str, Any]) -> None:
        member.heard = time.monotonic()
        request = message.get("request")
        if request == "leave":
            self._remove(member, "it has left")
            self._removed.pop(member.identity, None)
            raise EOFError
        if request in ("vote", "reform"):
            if (message["view"], message["round"]) != (member.view, member.round):
                return  # it was answered before the connection ended
            member.steps = int(message["steps"])
            if request == "vote" and not member.in_view:
                member.answer({"commit": False, "change": True})  # the others went on without it
                return
            member.request, member.ok = request, bool(message.get("ok", True))
            self._settle()
        elif request == "ping":  # a member gives up a coordinator that is silent
            if member.connection is not None:
                member.connection.write({"pong": True})
        else:
            raise ValueError(f"an unknown request: {request!r}")

    def _remove_lost(self) -> None:
        """Remove the members that were not heard of, and those without a connection for whom others wait."""
        now = time.monotonic()
        # An average that fails and a group that cannot form tell that the connection is not all that has ended.
        others_fail = self._is_forming or any(
            member.in_view and (member.request == "reform" or (member.request == "vote" and not member.ok))
            for member in self._members
        )
        for member in list(self._members):
            is_cut = member.connection is None and now > member.lost_at + _RETURN_SECONDS
            if is_cut and (member.was_closed or not member.in_view or others_fail):
                self._remove(member, "its connection has ended")
            elif now > member.heard + self._timeout_s:
                self._remove(member, f"it was not heard of for {self._timeout_s:g} s")

    def _remove(self, member: _Member, reason: str) -> None:
        if member not in self._members:
            return
        self._members.remove(member)
        self._someone_left |= member.in_view
        if member.in_view and self._is_forming and self._stores:
            self._stores.pop()  # the others would wait for it until their timeout; now they fail at once
            self._is_forming = False
        _log.warning("dtcomm: %s is gone: %s", member.name, reason)
        if member.connection is not None:
            member.connection.close()
        member.connection, member.is_late = None, member.is_late or member.in_view
        member.in_view, member.request = False, ""
        self._removed[member.identity] = member
        while len(self._removed) > _MAX_REMOVED:
            del self._removed[next(iter(self._removed))]
        self._settle()

    def _settle(self) -> None:
        """Answer the members, if all of them wait for an answer."""
        inside = [member for member in self._members if member.in_view]
        waiting = [member for member in self._members if member.is_ready()]
        requests = {member.request for member in inside}
        if not inside:
            if len(waiting) >= (self._min_members if self._number else self._ranks):
                self._form(waiting, anew=bool(self._number) and all(member.steps < 0 for member in waiting))
        elif requests == {"vote"}:
            self._is_forming = False
            commit = all(member.ok for member in inside)
            change = bool(waiting) or self._someone_left
            for member in inside if commit else ():
                member.is_late = False  # it has the state of the others now
            self._answer(inside, {"commit": commit, "change": change})
        elif requests == {"reform"}:
            # After a failed average the survivors repeat it first, without those that wait.
            admitted = waiting if all(member.ok for member in inside) else []
            self._form([*inside, *admitted])
        elif "" not in requests:
            text = "the members called different things: sync() and step() belong at the same place on all of them"
            _log.error("dtcomm: %s", text)
            self._answer(inside, {"error": text})

    def _answer(self, members: Iterable[_Member], message: dict[str, Any]) -> None:
        for member in members:
            member.answer(message)

    def _form(self, members: list[_Member], *, anew: bool = False) -> None:
        """Make a view of these members, and tell them."""
        self._number += 1
        self._run_name = self._run_name or nonce().hex()
        self._someone_left, self._is_forming, self._is_taken_over = False, True, False
        try:
            self._stores.append(store := _make_store(self._ports, self._timeout_s))
        except OSError as error:
            _log.error("dtcomm: %s", error)
            self._answer(members, {"error": str(error)})
            return
        while len(self._stores) > _LATE_STORES:
            self._stores.popleft()
        names = [member.name for member in members]
        _log.info("dtcomm: view %d%s: %s", self._number, " at step 0" if anew else "", ", ".join(names))
        # One that was left out gets the state again, with averages that it has not seen, also after equal steps.
        valid = [member for member in members if member.in_view and not member.is_late]
        valid = valid or [max(members, key=lambda member: member.steps)]
        steps = [-1 if member.is_late and member not in valid else member.steps for member in members]
        ids = [member.identity for member in members]
        view = {"number": self._number, "run": self._run_name, "names": names, "ids": ids, "steps": steps}
        view |= {"store_port": store.port, "anew": anew}
        for rank, member in enumerate(members):
            member.in_view = True
            member.answer({**view, "rank": rank})


async def _receive(reader: asyncio.StreamReader, opener: Seal) -> dict[str, Any]:
    length, proof = protocol.split_head(await reader.readexactly(protocol.HEAD.size))
    return opener.open(proof, await reader.readexactly(length))


def _listen(host: str, ports: Iterable[int]) -> socket.socket:
    """Return a listening socket at the first free port."""
    ipv6 = ":" in host or (not host and socket.has_dualstack_ipv6())
    family, both = socket.AF_INET6 if ipv6 else socket.AF_INET, ipv6 and not host
    reason: OSError | None = None
    for port in ports:
        try:
            return socket.create_server((host, port), family=family, backlog=1024, dualstack_ipv6=both)
        except OSError as error:
            reason = error
    raise OSError(f"the coordinator cannot listen at {host or 'any address'}: {reason}")


def _make_store(ports: Iterable[int], timeout_s: float) -> Any:
    """Return the store of a view, at the first free port."""
    options: dict[str, Any] = {"wait_for_workers": False, "timeout": timedelta(seconds=timeout_s)}
    reason: Exception | None = None
    for port in ports:
        try:
            return dist.TCPStore("localhost", port, is_master=True, **options)  # type: ignore[attr-defined]
        except RuntimeError as error:
            reason = error
    raise OSError(f"no port is free for the store of a view: {reason}")


def main(argv: list[str]) -> int:
    """Run ``dtcomm coordinator`` until SIGINT or SIGTERM; return 2 if an argument is wrong or the port is in use."""
    parser = argparse.ArgumentParser(
        prog="dtcomm coordinator",
        description="Serve the ranks of one training run with ElasticLocalSGD. It holds no weights. Ranks that do not"
        " know DTCOMM_SECRET are refused; the stores of its views listen on the ports of DTCOMM_PORTS.",
    )
    add = parser.add_argument
    add("--listen", default="[::]:29400",
        help="address and port, host:port or [IPv6 address]:port (default: %(default)s, all addresses)")  # fmt: skip
    add("--ranks", type=int, default=1, help="how many ranks the first group waits for (default: 1)")
    add("--min-members", type=int, default=1,
        help="how many ranks a group waits for that begins at step 0 after all have left (default: 1)")  # fmt: skip
    add("--timeout", type=float, default=30.0, dest="timeout_s", metavar="TIMEOUT",
        help="seconds after which a silent rank counts as gone (default: 30)")  # fmt: skip
    options = parser.parse_args(argv)
    listen = vars(options).pop("listen")
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO)
    try:
        host, port = protocol.parse_address(listen, "--listen")
        host = "" if host == "::" else host
        coordinator = Coordinator(host, port, **vars(options))
    except (OSError, ValueError) as error:
        print(f"dtcomm coordinator: {error}", file=sys.stderr)
        return 2

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    secured = "with" if env.get("DTCOMM_SECRET") else "without"
    print(f"dtcomm coordinator at {coordinator.address}, {secured} DTCOMM_SECRET", flush=True)
    try:
        coordinator.wait()
    except KeyboardInterrupt:
        coordinator.close()
    return 0
