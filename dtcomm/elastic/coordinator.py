"""The coordinator: it knows which members take part, and forms a new view when one is gone or wants to join."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any

import torch.distributed as dist

from dtcomm import env
from dtcomm.arguments import require_int
from dtcomm.elastic.protocol import COORDINATOR, HEAD, MEMBER, PROTOCOL, Seal, split_head
from dtcomm.runtime.bootstrap.authentication import WRONG_SECRET, nonce, prove, secret

_log = logging.getLogger("dtcomm")

_FACTS_SECONDS = 10.0  # for a caller to say who it is
_MAX_STRANGERS = 64  # callers that have not said yet who they are
_CHECK_SECONDS = 0.25
_LATE_STORES = 2  # a member that is late may still read the store of the view before


@dataclass(eq=False)
class _Member:
    """A member, or a rank that waits to become one.

    Attributes:
        name: What logs and errors call it.
        facts: What must be equal on all members.
        steps: The steps that its state has seen; -1: it has none.
        write: Sends it a message.
        close: Closes its connection.
        in_view: Whether it belongs to the present view.
        request: What it waits for: "vote", "reform" or "".
        ok: Its vote.
        heard: When it was last heard of.
    """

    name: str
    facts: dict[str, str]
    steps: int
    write: Callable[[dict[str, Any]], None]
    close: Callable[[], None]
    in_view: bool = False
    request: str = ""
    ok: bool = True
    heard: float = 0.0


class Coordinator:
    """Serves the members of one training run, in a thread of this process.

    It holds no weights. A member is gone when its connection closes or when it was not heard of for ``timeout_s``.
    Callers with another DTCOMM_SECRET, version, model or options are refused, without effect on the members.

    Each view has a store of torch.distributed on a port of its own, which is not authenticated: let only the ranks'
    hosts reach this one's ports.

    Args:
        host: The address to listen on. Default "": all, of IPv4 and IPv6.
        port: The port; 0: one of ``ports``. Default 0.
        ranks: How many ranks the first view waits for. Default 1.
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
        timeout_s: float = 30.0,
        ports: range | None = None,
    ) -> None:
        require_int("ranks", ranks, 1)
        require_int("port", port, 0)
        if not timeout_s > 0:
            raise ValueError(f"timeout_s={timeout_s}: expected seconds above 0")
        self._ranks, self._timeout_s = ranks, timeout_s
        self._ports = env.ports() if ports is None else ports
        self._socket = _listen(host, [port] if port else self._ports)
        bound, own_port = self._socket.getsockname()[:2]
        self.address = f"[{bound}]:{own_port}" if ":" in bound else f"{bound}:{own_port}"
        self.port = own_port
        self._secret = secret()
        self._members: list[_Member] = []
        self._stores: deque[Any] = deque()
        self._strangers = self._number = 0
        self._someone_left = False
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
        """Stop; members raise `PeerLost` at their next average. A second call does nothing."""
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # the loop has just ended
                self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()

    def __enter__(self) -> Coordinator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
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
                self._remove_silent()
        tasks = {task for task in asyncio.all_tasks() if task is not asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection until it ends."""
        caller = str((writer.get_extra_info("peername") or ("?",))[0])
        member = None
        try:
            if self._strangers >= _MAX_STRANGERS:
                _log.warning(
                    "dtcomm: refused %s: %d callers have not said who they are", caller, _MAX_STRANGERS
                )
                return
            self._strangers += 1
            try:
                member, opener = await asyncio.wait_for(self._admit(reader, writer, caller), _FACTS_SECONDS)
            finally:
                self._strangers -= 1
            while member is not None:
                await self._obey(member, await _receive(reader, opener))
        except (
            *(OSError, EOFError, asyncio.TimeoutError),
            *(ValueError, TypeError, AttributeError, LookupError),  # a caller may send any JSON object
        ) as error:
            if member is None:
                _log.warning("dtcomm: refused a caller from %s: %s", caller, error or type(error).__name__)
        except asyncio.CancelledError:
            pass  # the coordinator is closed
        finally:
            if member is not None:
                self._remove(member, "its connection has ended")
            writer.close()

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
        closer, opener = Seal(key, COORDINATOR), Seal(key, MEMBER)

        def write(message: dict[str, Any]) -> None:
            if not writer.is_closing():
                writer.write(closer.close(message))

        facts = {str(name): str(value) for name, value in hello["facts"].items()}
        name = f"{hello['name']} ({caller})"
        if difference := self._difference(facts):
            _log.warning("dtcomm: refused %s: %s", name, difference)
            write({"refused": difference})
            await writer.drain()
            return None, opener
        member = _Member(name, facts, int(hello["steps"]), write, writer.close, heard=time.monotonic())
        self._members.append(member)
        _log.info("dtcomm: %s waits to join", name)
        self._settle()
        return member, opener

    def _difference(self, facts: dict[str, str]) -> str:
        """Return in what a caller differs from the members; empty if in nothing."""
        if not self._members:
            return ""
        expected = self._members[0].facts
        for name in sorted({*facts, *expected}):
            if facts.get(name) != expected.get(name):
                return f"{name}: {facts.get(name, 'none')}; the members have {expected.get(name, 'none')}"
        return ""

    async def _obey(self, member: _Member, message: dict[str, Any]) -> None:
        member.heard = time.monotonic()
        request = message.get("request")
        if request == "leave":
            raise EOFError
        if request in ("vote", "reform"):
            member.request, member.ok = request, bool(message.get("ok", True))
            member.steps = int(message["steps"])
            self._settle()
        elif request != "ping":
            raise ValueError(f"an unknown request: {request!r}")

    def _remove_silent(self) -> None:
        limit = time.monotonic() - self._timeout_s
        for member in [member for member in self._members if member.heard < limit]:
            self._remove(member, f"it was not heard of for {self._timeout_s:g} s")
            member.close()

    def _remove(self, member: _Member, reason: str) -> None:
        if member not in self._members:
            return
        self._members.remove(member)
        self._someone_left |= member.in_view
        if member.in_view and self._is_forming and self._stores:
            self._stores.pop()  # the others would wait for it until their timeout; now they fail at once
            self._is_forming = False
        _log.warning("dtcomm: %s is gone: %s", member.name, reason)
        self._settle()

    def _settle(self) -> None:
        """Answer the members, if all of them wait for an answer."""
        inside = [member for member in self._members if member.in_view]
        waiting = [member for member in self._members if not member.in_view]
        requests = {member.request for member in inside}
        if not inside:
            if len(waiting) >= (1 if self._number else self._ranks):
                self._form(waiting)
        elif requests == {"vote"}:
            self._is_forming = False
            commit = all(member.ok for member in inside)
            change = bool(waiting) or self._someone_left
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
            member.request = ""
            member.write(message)

    def _form(self, members: list[_Member]) -> None:
        """Make a view of these members, and tell them."""
        self._number += 1
        self._someone_left, self._is_forming = False, True
        try:
            self._stores.append(store := _make_store(self._ports, self._timeout_s))
        except OSError as error:
            _log.error("dtcomm: %s", error)
            self._answer(members, {"error": str(error)})
            return
        while len(self._stores) > _LATE_STORES:
            self._stores.popleft()
        names = [member.name for member in members]
        _log.info("dtcomm: view %d: %s", self._number, ", ".join(names))
        view = {"number": self._number, "names": names, "steps": [member.steps for member in members]}
        for rank, member in enumerate(members):
            member.in_view = True
            self._answer([member], {**view, "rank": rank, "store_port": store.port})


async def _receive(reader: asyncio.StreamReader, opener: Seal) -> dict[str, Any]:
    length, proof = split_head(await reader.readexactly(HEAD.size))
    return opener.open(proof, await reader.readexactly(length))


def _listen(host: str, ports: Iterable[int]) -> socket.socket:
    """A listening socket at the first free port."""
    ipv6 = ":" in host or (not host and socket.has_dualstack_ipv6())
    reason: OSError | None = None
    for port in ports:
        try:
            return socket.create_server(
                (host, port),
                family=socket.AF_INET6 if ipv6 else socket.AF_INET,
                backlog=1024,
                dualstack_ipv6=ipv6 and not host,
            )
        except OSError as error:
            reason = error
    raise OSError(f"the coordinator cannot listen at {host or 'any address'}: {reason}")


def _make_store(ports: Iterable[int], timeout_s: float) -> Any:
    """The store of a view, at the first free port."""
    reason: Exception | None = None
    for port in ports:
        try:
            return dist.TCPStore(  # type: ignore[attr-defined]
                "localhost",
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=timeout_s),
            )
        except RuntimeError as error:
            reason = error
    raise OSError(f"no port is free for the store of a view: {reason}")
