"""One rank of a case of the fault campaign: it takes part, has or observes the fault, and reports.

Phases are hit at the seams of dtcomm's modules: the victim wraps a function, and the fault happens when it is called.
Times are ``time.monotonic()``, which all processes of a machine share.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import dtcomm
from dtcomm.launch.ranks import send_to_parent
from dtcomm.runtime.bootstrap.cpu import CpuBootstrap
from dtcomm.runtime.bootstrap.rendezvous import StoreExchange
from dtcomm.runtime.bootstrap.tcp import Listener
from dtcomm.runtime.native import NativeRuntime
from dtcomm.runtime.torchdist.runtime import TorchDistRuntime
from tests.stress.campaign_cases import (
    CHILDREN,
    CLOSE,
    LIMIT_SECONDS,
    MISMATCHES,
    RENDEZVOUS,
    STARVED,
    TIMEOUT_SECONDS,
    Case,
)

SMALL, LARGE = 16 << 10, 2 << 20  # floats: 64 KB and 8 MB
IN_FLIGHT = 3  # asynchronous operations at once
FEW_OPERATIONS = {SMALL: 60, LARGE: 6}  # of a case in which all must succeed
SILENT_SECONDS = 15.0  # in which an error must have come
STRIKE = "strike"  # a rank asks the campaign to let the fault happen to it, at a moment when it is not in the store
CHILD_SECONDS = 10.0  # in which a forked child must have ended; a normal exit takes most of a second
GLOO_CONNECT_SECONDS = 11.0
# What torch and dtcomm keep for the lifetime of the process, some of it from the first asynchronous operation on.
# Mapped stay the page that a process shares with its peers, and those of up to three peers.
KEPT = {"descriptors": 3, "threads": 8, "children": 0, "mappings": 4}
# Never kept: what communicators and tensors share.
SHARED_MEMORY = ("/memfd:dtcomm-region (deleted)", "/memfd:dtcomm-tensor (deleted)")
# UCX opens pipes and event descriptors when it first needs each of them, once in a process, and keeps them.
KEPT_WITH_UCX = KEPT | {"descriptors": KEPT["descriptors"] + 6}


@dataclass(kw_only=True)
class Seen:
    """What a rank observed: the error and its call, the next call's error, and what was left behind."""

    error: str = ""
    message: str = ""
    began: float = 0.0
    at: float = 0.0
    next_error: str = ""
    next_seconds: float = 0.0
    close_seconds: float = 0.0
    left: dict[str, list[str]] = field(default_factory=dict)


# What this process had after its first case or, since UCX keeps descriptors, after its first one over UCX.
_settled: dict[str, list[str]] = {}
_has_used_ucx = False


def take_part(rank: int, world_size: int, case: Case, path: str) -> Seen:
    """Run one rank of a case. The store is the file at ``path``, so no rank's death ends it."""
    seen = Seen()
    store = open_store(path)
    _await_count(store, "started", world_size)  # a new process comes later than one that is used again
    dist.init_process_group(
        "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=TIMEOUT_SECONDS),
    )
    if case.phase in RENDEZVOUS:
        _rendezvous(rank, case, seen, store)
    elif case.phase in CLOSE:
        _close(rank, case, seen, store)
    elif case.phase == "call":
        _call(rank, case, seen, store)
    else:
        _operate(rank, case, seen, store)
    if rank == case.victim and case.action == "absent":  # it stays until the others have reported
        _await_count(store, "reported", world_size)
    store.add("reported", 1)
    start = time.monotonic()
    dtcomm.release()
    seen.close_seconds = max(seen.close_seconds, time.monotonic() - start)
    dist.destroy_process_group()
    del store
    seen.left = _left_behind(case)
    send_to_parent("seen")
    return seen


def open_store(path: str) -> Any:
    """Return the store of a case. A TCPStore would ask for the names of addresses, which may take seconds."""
    return dist.FileStore(path, -1)  # type: ignore[attr-defined]


def _await_count(store: Any, key: str, count: int) -> None:
    """Add one to a number of the store, and wait until all ranks have."""
    store.add(key, 1)
    deadline = time.monotonic() + SILENT_SECONDS
    while store.add(key, 0) < count and time.monotonic() < deadline:
        time.sleep(2e-3)


# --- phases ---------------------------------------------------------------------------------------------------


def _rendezvous(rank: int, case: Case, seen: Seen, store: Any) -> None:
    if case.known:
        dtcomm.all_reduce(torch.ones(8))
        dtcomm.release()
    _await_count(store, "ready", case.world_size)
    if rank == case.victim and case.action == "raise":
        send_to_parent(("struck", time.monotonic()))
        return
    with _fault_in_rendezvous(case) if rank == case.victim else contextlib.nullcontext():
        _watch(seen, lambda: _sum_ones(rank, case))
    dies = case.action in ("kill", "stop and kill") and not case.unheard_of
    if rank != case.victim and dies and seen.error and case.transport != "gloo":
        _call_again(seen, lambda: dtcomm.all_reduce(torch.ones(8)))


@contextlib.contextmanager
def _fault_in_rendezvous(case: Case) -> Iterator[None]:
    if case.action in STARVED:
        send_to_parent(("struck", time.monotonic()))
        with _starved(case):
            yield
        return
    connect: dict[str, tuple[Any, str]] = {
        "memory": (NativeRuntime, "attach"),
        "sockets": (Listener, "_accept"),  # it has connected to lower ranks
        "ucx": (CpuBootstrap, "_connect_ucx"),
        "gloo": (CpuBootstrap, "_private_backend"),
    }
    seams: dict[str, tuple[Any, str]] = {
        "publish": (StoreExchange, "all_gather"),
        "read": (StoreExchange, "_wait"),
        "connect": connect[case.transport],
        "agree": (CpuBootstrap, "_agree"),
    }
    # Not one that stops: it might hold the lock of the store's file, for which the others would wait.
    soon = case.at_random_moment and case.action != "stop"
    striker = threading.Timer(case.delay / 20, send_to_parent, (STRIKE,))
    with _at_call(*seams[case.phase], striker.start if soon else lambda: _strike(case)):
        yield
    if soon and case.action == "pause":
        striker.join()


def _operate(rank: int, case: Case, seen: Seen, store: Any) -> None:
    operation = case.phase if case.phase in ("all_to_all", "broadcast", "send_recv") else "all_reduce"
    numel = LARGE if case.large else SMALL
    calls = Calls(rank, case, numel, operation)
    calls.make()  # makes the communicators
    _await_count(store, "ready", case.world_size)
    victim = rank == case.victim
    striker = None
    child = _fork(case) if victim and case.phase == "fork" else 0
    if victim and case.phase != "before" and case.action not in CHILDREN:
        striker = threading.Timer(case.delay, _strike, (case,))
        striker.start()
    last = 2 + case.repetition % 5  # the operation before which the victim of "before" is struck

    def repeat() -> None:
        deadline, count = time.monotonic() + SILENT_SECONDS, 0
        while time.monotonic() < deadline and ("" not in case.errors or count < FEW_OPERATIONS[numel]):
            count += 1
            if victim and case.phase == "before" and count == last:
                _strike(case)
            seen.began = time.monotonic()
            calls.make()

    _watch(seen, repeat)
    if striker is not None:
        striker.join()
    if victim and case.action in CHILDREN:
        _require_end(child, case)
    if not victim and case.errors != ("",):
        failed = calls.works
        _call_again(seen, calls.make)
        calls.works += failed
        calls.drain()


def _close(rank: int, case: Case, seen: Seen, store: Any) -> None:
    dtcomm.all_reduce(torch.ones(8))
    _await_count(store, "ready", case.world_size)
    if rank == case.victim:
        if case.phase == "before_close":
            _strike(case)
            dtcomm.release()
            return
        runtime = TorchDistRuntime if case.transport == "gloo" else NativeRuntime
        with _at_call(runtime, "close", lambda: _strike(case), after=case.large):
            dtcomm.release()
        return
    if not case.asynchronous:
        start = time.monotonic()
        _watch(seen, dtcomm.release)
        seen.close_seconds = time.monotonic() - start
        return
    _watch(seen, lambda: dtcomm.all_reduce(torch.ones(8)))


def _call(rank: int, case: Case, seen: Seen, store: Any) -> None:
    numel = LARGE if case.large else SMALL
    tensor = torch.zeros(numel)  # zeros, so that sums of it stay the same
    dtcomm.all_reduce(tensor)
    _await_count(store, "ready", case.world_size)
    wrong_call = 2 + case.repetition % 5

    def repeat() -> None:
        deadline, count = time.monotonic() + SILENT_SECONDS, 0
        while time.monotonic() < deadline:
            count += 1
            # Calls differ in size, so that a skipped one is noticed at the next call and not at the end.
            part = tensor[: numel - 1024 * (count % 2)]
            seen.began = time.monotonic()
            if rank == case.victim and count == wrong_call:
                send_to_parent(("struck", seen.began))
                if case.action == "absent":
                    return
                if case.action != "skipped call":
                    make_wrong_call(case.action, part)
                continue
            dtcomm.all_reduce(part)

    _watch(seen, repeat)
    if rank != case.victim or case.action in MISMATCHES:
        _call_again(seen, lambda: dtcomm.all_reduce(torch.ones(8)))


def make_wrong_call(kind: str, tensor: torch.Tensor) -> None:
    """Make the victim's call while the others all_reduce ``tensor`` with op sum and codec none."""
    calls: dict[str, Any] = {
        "other shape": lambda: dtcomm.all_reduce(tensor[:-16]),
        "other dtype": lambda: dtcomm.all_reduce(tensor.to(torch.int32)),
        "other op": lambda: dtcomm.all_reduce(tensor, "max"),
        "other codec": lambda: dtcomm.all_reduce(tensor, codec="int8"),
        "other collective": lambda: dtcomm.broadcast(tensor, 0),
    }
    calls[kind]()


# --- calls ----------------------------------------------------------------------------------------------------


def _sum_ones(rank: int, case: Case) -> None:
    tensor = torch.full((SMALL,), 1.0 + rank)
    dtcomm.all_reduce(tensor)
    _require_equal(tensor, sum(range(1, case.world_size + 1)))


class Calls:
    """The calls of one operation: in turn, or several at once; each result is compared with the right one."""

    def __init__(self, rank: int, case: Case, numel: int, operation: str) -> None:
        self._rank = rank
        self._case = case
        self._ranks = case.world_size
        self._count = 0
        self.works: list[Any] = []
        self._make = {
            "all_reduce": self._all_reduce,
            "all_to_all": self._all_to_all,
            "broadcast": self._broadcast,
            "send_recv": self._send_recv,
        }[operation]
        numel -= numel % self._ranks
        empty = dtcomm.empty if case.shared else torch.empty
        at_once = IN_FLIGHT if case.asynchronous else 1
        peers = self._ranks if operation == "send_recv" else 1
        self._tensors = [[(empty(numel), empty(numel)) for _ in range(peers)] for _ in range(at_once)]

    def make(self) -> None:
        """Make the calls and check what they return."""
        checks, works = [], []
        for tensors in self._tensors:
            work, check = self._make(tensors)
            works += work
            checks += check
        self.works = [work for work in works if work is not None]
        for work in self.works:
            work.wait()
        for tensor, value in checks:
            _require_equal(tensor, value)

    def drain(self) -> None:
        """Wait for what was started beside a call that failed: a handle that is not waited for keeps its tensors."""
        for work in self.works:
            with contextlib.suppress(RuntimeError):
                work.wait()

    def _all_reduce(self, tensors: list[Any]) -> Any:
        tensor = tensors[0][0].fill_(1.0 + self._rank)
        work = dtcomm.all_reduce(tensor, async_op=self._case.asynchronous)
        return [work], [(tensor, sum(range(1, self._ranks + 1)))]

    def _all_to_all(self, tensors: list[Any]) -> Any:
        output, input = tensors[0]
        work = dtcomm.all_to_all(output, input.fill_(self._rank), async_op=self._case.asynchronous)
        return [work], list(zip(output.chunk(self._ranks), range(self._ranks), strict=True))

    def _broadcast(self, tensors: list[Any]) -> Any:
        self._count += 1
        source = self._count % self._ranks
        tensor = tensors[0][0].fill_(self._rank)
        work = dtcomm.broadcast(tensor, source, async_op=self._case.asynchronous)
        return [work], [(tensor, source)]

    def _send_recv(self, tensors: list[Any]) -> Any:
        """Exchange messages between the victim and every other rank: all depend on the victim itself."""
        victim, works, checks = self._case.victim, [], []
        peers = [victim] if self._rank != victim else [rank for rank in range(self._ranks) if rank != victim]
        for peer in peers:
            output, input = tensors[peer]
            send = lambda p=peer, t=input: dtcomm.send(t, p, async_op=self._case.asynchronous)  # noqa: E731
            receive = lambda p=peer, t=output: dtcomm.recv(t, p, async_op=self._case.asynchronous)  # noqa: E731
            input.fill_(self._rank)
            works += [send(), receive()] if self._rank != victim else [receive(), send()]
            checks.append((output, peer))
        return works, checks


def _require_equal(tensor: torch.Tensor, value: float) -> None:
    if not bool((tensor == value).all()):
        raise AssertionError(f"a result is {tensor[tensor != value][0].item()} instead of {value}")


def _watch(seen: Seen, call: Callable[[], object]) -> None:
    """Make a call; note its error."""
    seen.began = time.monotonic()
    try:
        call()
    except Exception as error:  # judged by its name
        seen.error, seen.message = type(error).__name__, str(error)
    seen.at = time.monotonic()


def _call_again(seen: Seen, call: Callable[[], object]) -> None:
    start = time.monotonic()
    try:
        call()
        seen.next_error = "no error"
    except Exception as error:
        seen.next_error = type(error).__name__
    seen.next_seconds = time.monotonic() - start


# --- faults ---------------------------------------------------------------------------------------------------


def _strike(case: Case) -> None:
    """Let the fault happen to this process. The campaign continues or kills one that stops."""
    send_to_parent(("struck", time.monotonic()))
    if case.action == "exit":
        os._exit(1)
    os.kill(os.getpid(), signal.SIGKILL if case.action == "kill" else signal.SIGSTOP)


@contextlib.contextmanager
def _at_call(owner: Any, name: str, fault: Callable[[], None], after: bool = False) -> Iterator[None]:
    """Let ``fault`` happen at the first call of ``owner.name``, before or after what it does."""
    original = getattr(owner, name)
    pending = [fault]

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if pending and not after:
            pending.pop()()
        result = original(*args, **kwargs)
        if pending and after:
            pending.pop()()
        return result

    setattr(owner, name, wrapper)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextlib.contextmanager
def _starved(case: Case) -> Iterator[None]:
    """Let whatever opens sockets or makes shared memory do so without descriptors or memory; the store has its own."""
    with contextlib.ExitStack() as stack:
        for owner, name in (
            (NativeRuntime, "__init__"),
            (NativeRuntime, "attach"),
            (Listener, "__init__"),
            (Listener, "connect"),
            (CpuBootstrap, "_private_backend"),
        ):
            stack.enter_context(_around_calls(owner, name, lambda: _limited(case)))
        yield


@contextlib.contextmanager
def _around_calls(owner: Any, name: str, context: Callable[[], Any]) -> Iterator[None]:
    original = getattr(owner, name)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with context():
            return original(*args, **kwargs)

    setattr(owner, name, wrapper)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextlib.contextmanager
def _limited(case: Case) -> Iterator[None]:
    """Let this process open only a few more descriptors, or make no file of more than a page, memory included."""
    if case.action == "no memory":
        kind, most, holes = resource.RLIMIT_FSIZE, 4096, []
    else:
        end = 1 + max(int(name) for name in os.listdir("/proc/self/fd"))
        kind, most, holes = resource.RLIMIT_NOFILE, end + case.spare, _fill_holes(end)
    limits = resource.getrlimit(kind)
    resource.setrlimit(kind, (most, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, limits)
        for descriptor in holes:
            os.close(descriptor)


def _fill_holes(end: int) -> list[int]:
    """Open descriptors until all numbers below ``end`` are in use."""
    opened = []
    while not opened or opened[-1] < end - 1:
        opened.append(os.open("/dev/null", os.O_RDONLY))
    return opened


def _fork(case: Case) -> int:
    """Fork a child and let it have its fault; where the rank itself has the fault, the child outlives the rank."""
    child = os.fork()
    if child == 0:
        if case.action == "child exits":
            # The handlers of the interpreter's exit, dtcomm's among them, and no destructors: those of torch's Gloo
            # groups wait in a forked child for threads that it does not have, also without dtcomm.
            atexit._run_exitfuncs()
            os._exit(0)
        if case.action == "child releases":
            dtcomm.release()
            os._exit(0)
        time.sleep(SILENT_SECONDS)
        os._exit(0)
    if case.action in CHILDREN:
        send_to_parent(("struck", time.monotonic()))
        if case.action == "child is killed":
            os.kill(child, signal.SIGKILL)
    return child


def _require_end(child: int, case: Case) -> None:
    """Wait until the forked child has ended, with the right status."""
    expected = -signal.SIGKILL if case.action == "child is killed" else 0
    deadline = time.monotonic() + CHILD_SECONDS
    while time.monotonic() < deadline:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid and os.waitstatus_to_exitcode(status) == expected:
            return
        if pid:
            raise AssertionError(f"the child ended with status {os.waitstatus_to_exitcode(status)}")
        time.sleep(5e-3)
    raise AssertionError(f"the child did not end within {CHILD_SECONDS:g} s")


# --- what is left behind --------------------------------------------------------------------------------------


def _left_behind(case: Case) -> dict[str, list[str]]:
    """Return what this process has in addition to after its first case, once threads had time to end."""
    global _settled, _has_used_ucx
    # A thread may wait in Gloo until the timeout, or connect for 10 s.
    waits = GLOO_CONNECT_SECONDS if case.transport == "gloo" else 0.0
    deadline = time.monotonic() + LIMIT_SECONDS + waits
    if not _settled or (case.transport == "ucx" and not _has_used_ucx):
        gc.collect()
        _settled, _has_used_ucx = process_resources(), case.transport == "ucx"
        return {}
    while True:
        gc.collect()  # errors and their frames refer to each other
        left = excess(_settled, process_resources(), KEPT_WITH_UCX if _has_used_ucx else KEPT)
        if not left or time.monotonic() >= deadline:
            return left
        time.sleep(0.05)


def process_resources() -> dict[str, list[str]]:
    """Return the threads, descriptors, children and shared mappings of this process, by name."""
    descriptors = []
    for entry in os.scandir("/proc/self/fd"):
        try:
            target = os.readlink(entry.path)
            descriptors.append(target if target in SHARED_MEMORY else target.split(":")[0])
        except FileNotFoundError:  # the descriptor of the scan itself
            continue
    children = []
    threads = []
    names = {thread.native_id: thread.name for thread in threading.enumerate()}
    for task in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
            with open(f"/proc/self/task/{task}/children", encoding="ascii") as file:
                children += file.read().split()
            with open(f"/proc/self/task/{task}/comm", encoding="utf-8", errors="replace") as file:
                threads.append(names.get(int(task), file.read().strip()))
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
        mappings = [line.split()[5] for line in file if "memfd:" in line or "/dev/shm/" in line]
    return {"descriptors": descriptors, "threads": threads, "children": children, "mappings": mappings}


def excess(
    before: dict[str, list[str]], after: dict[str, list[str]], allowed: dict[str, int] | None = None
) -> dict[str, list[str]]:
    """Return what ``after`` has in addition to ``before``, by kind, where that is more than is allowed."""
    additional = {}
    for kind, names in after.items():
        unmatched = list(names)
        for name in before[kind]:
            if name in unmatched:
                unmatched.remove(name)
        too_many = len(names) > len(before[kind]) + (allowed or {}).get(kind, 0)
        if too_many or any(name in SHARED_MEMORY for name in unmatched):
            additional[kind] = unmatched
    return additional


def rounds(rank: int, world_size: int, count: int) -> dict[str, list[str]]:
    """Create, use and destroy ``count`` communicators; return what the process has in addition to after ten."""
    before: dict[str, list[str]] = {}
    for i in range(count):
        if i == 10:
            before = process_resources()
        tensor = torch.full((100 + i,), 1.0)
        dtcomm.all_reduce(tensor)
        assert float(tensor.sum()) == world_size * (100 + i)
        dtcomm.release()
    dist.barrier()
    return excess(before, process_resources())
