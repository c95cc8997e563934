"""The ranks of the fault campaign: repeat a collective, cause the fault, and report what they observed.

Times are ``time.monotonic()``, which all processes of a machine share.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

import dtcomm
from dtcomm.errors import DtcommError
from dtcomm.launch.ranks import send_to_parent

SILENT_SECONDS = 60.0  # longer than any group timeout of the campaign
ABSENT_SECONDS = 6.0


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault: rank ``victim`` does ``kind`` while all ranks repeat an all_reduce of ``numel`` floats."""

    kind: str
    victim: int
    numel: int
    after: float = 0.1
    fork: bool = False


@dataclass(kw_only=True)
class Seen:
    """What a rank observed: the error that ended its loop, the next call's error, and what was left behind."""

    error: str = ""
    message: str = ""
    at: float = 0.0
    next_error: str = ""
    next_seconds: float = 0.0
    left: dict[str, list[str]] = field(default_factory=dict)
    calls: int = 0


def survive(rank: int, world_size: int, fault: Fault) -> Seen:
    """Run one rank of the campaign; return when the communicator has failed, unless this rank dies."""
    # What torch and the first communicator keep for the lifetime of the process is not a leak.
    dtcomm.all_reduce(torch.ones(8))
    dtcomm.release()
    before = process_resources()
    tensor = torch.zeros(fault.numel)  # zeros, so that sums of it stay the same
    dtcomm.all_reduce(tensor)
    send_to_parent(("running", os.getpid()))
    seen = Seen()
    if rank == fault.victim:
        _arm(fault)
    try:
        _loop(rank, fault, tensor, seen)
    except DtcommError as error:
        seen.error, seen.message, seen.at = type(error).__name__, str(error), time.monotonic()
    start = time.monotonic()
    try:
        dtcomm.all_reduce(torch.ones(8))
        seen.next_error = "no error"
    except DtcommError as error:
        seen.next_error = type(error).__name__
    seen.next_seconds = time.monotonic() - start
    dtcomm.release()
    seen.left = excess(before, process_resources())
    return seen


def _arm(fault: Fault) -> None:
    """Start the fault of the victim; deadly faults happen in a thread, so that they hit an operation in progress."""
    if fault.fork:
        child = os.fork()
        if child == 0:
            time.sleep(SILENT_SECONDS)
            os._exit(0)
        send_to_parent(("child", child))
    if fault.kind.startswith("exit"):

        def leave() -> None:
            send_to_parent(("struck", time.monotonic()))
            os._exit(int(fault.kind[-2]))  # exit(0), exit(1)

        threading.Timer(fault.after, leave).start()


def _loop(rank: int, fault: Fault, tensor: torch.Tensor, seen: Seen) -> None:
    """Repeat the call until it raises; the victim of a milder fault makes its wrong call in between."""
    # Which call is wrong must not depend on clocks, so that a failure can be reproduced.
    wrong_call = max(2, int(fault.after * 20))
    deadline = time.monotonic() + SILENT_SECONDS
    while time.monotonic() < deadline:
        seen.calls += 1
        # Calls differ in size, so that a skipped one is noticed at the next call and not at the end.
        numel = fault.numel - 1024 * (seen.calls % 2)
        if rank == fault.victim and seen.calls == wrong_call and not _ends_the_process(fault.kind):
            send_to_parent(("struck", time.monotonic()))
            if fault.kind == "absent":
                time.sleep(ABSENT_SECONDS)
                raise DtcommError("the victim stays away, as intended")
            if fault.kind != "skipped call":
                make_wrong_call(fault.kind, tensor[:numel])
            continue
        dtcomm.all_reduce(tensor[:numel])
    raise RuntimeError("no error was raised")


def _ends_the_process(kind: str) -> bool:
    return kind.startswith(("SIG", "exit"))


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


def process_resources() -> dict[str, list[str]]:
    """Return the threads, descriptors, children and shared mappings of this process, by name."""
    descriptors = []
    for entry in os.scandir("/proc/self/fd"):
        try:
            descriptors.append(os.readlink(entry.path).split(":")[0])
        except FileNotFoundError:  # the descriptor of the scan itself
            continue
    children = []
    threads = []
    for task in os.listdir("/proc/self/task"):
        with open(f"/proc/self/task/{task}/children", encoding="ascii") as file:
            children += file.read().split()
        with open(f"/proc/self/task/{task}/comm", encoding="utf-8", errors="replace") as file:
            threads.append(file.read().strip())
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
        mappings = [line.split()[-1] for line in file if "memfd:" in line or "/dev/shm/" in line]
    return {"descriptors": descriptors, "threads": threads, "children": children, "mappings": mappings}


def excess(before: dict[str, list[str]], after: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return what ``after`` has in addition to ``before``, by kind; empty if nothing is left."""
    additional = {}
    for kind, names in after.items():
        unmatched = list(names)
        for name in before[kind]:
            if name in unmatched:
                unmatched.remove(name)
        if len(names) > len(before[kind]):
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
