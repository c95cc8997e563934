"""dtcomm as a backend: on the runtime that it chooses, or on a given one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from dtcomm.cli.perf.backends.base import Backend, Call, Moved
from dtcomm.cli.perf.backends.torch_backend import THROUGH_HOST, why_no_nccl
from dtcomm.cli.perf.backends.works import ring, wait
from dtcomm.cli.perf.collectives import COLLECTIVES
from dtcomm.cli.perf.placement import CPU, CUDA, Place

QUEUED = (
    ", queued on streams of "  # what runtimes say of a backend's messages that follow each other on a device
)


class Dtcomm(Backend):
    """dtcomm as it is called: what DTCOMM_RUNTIME says, by default what it takes for the best.

    The runtime is chosen when a communicator is made, so each backend has a group of its own.
    """

    plain = False
    runtime: ClassVar[str] = ""

    def __init__(self, timeout: float, place: Place | None = None) -> None:
        from dtcomm import collectives

        super().__init__(timeout, place)
        self._collectives = collectives
        with _environment("DTCOMM_RUNTIME", self.runtime):
            collectives.all_reduce(torch.zeros(1, device=self.place.device), group=self.group)
            self._info = self._told()

    def moves_with(self) -> str | None:
        if self.place.kind != CUDA:
            return None
        return "gloo" if why_no_nccl(self.place.shared) else "cpu:gloo,cuda:nccl"

    def start(self, call: Call, asynchronous: bool) -> Callable[[], Any]:
        do: Any = self._collectives
        out, source = call.output, call.input
        given = {
            "codec": call.codec,
            "algorithm": call.algorithm,
            "group": self.group,
            "async_op": asynchronous,
        }
        is_root = dist.get_rank() == call.root
        if call.schedule is not None:
            return self._own(call, given)
        match call.collective:
            case "all_reduce":
                return lambda: do.all_reduce(out, call.op, **given)
            case "reduce":
                return lambda: do.reduce(out, call.root, call.op, **given)
            case "reduce_scatter":
                return lambda: do.reduce_scatter(out, source, call.op, **given)
            case "all_gather":
                return lambda: do.all_gather(out, source, **given)
            case "gather":
                return lambda: do.gather(source, out if is_root else None, call.root, **given)
            case "scatter":
                return lambda: do.scatter(out, source if is_root else None, call.root, **given)
            case "all_to_all":
                return lambda: do.all_to_all(out, source, **given)
            case "sendrecv":
                return self._sendrecv(call, asynchronous)
            case _:
                return lambda: do.broadcast(out, call.root, **given)

    def _own(self, call: Call, given: dict[str, Any]) -> Callable[[], Any]:
        do: Any = self._collectives
        schedule, op = call.schedule, call.op if COLLECTIVES[call.collective].reduces else "sum"
        given = {name: value for name, value in given.items() if name != "algorithm"}
        out: torch.Tensor | None = call.output
        source: torch.Tensor | None = None if COLLECTIVES[call.collective].whole_in_place else call.input
        if dist.get_rank() != call.root:  # only the root has these
            out = None if call.collective == "gather" else out
            source = None if call.collective == "scatter" else source
        return lambda: do.run(schedule, out, source, op, **given)

    def _sendrecv(self, call: Call, asynchronous: bool) -> Callable[[], Any]:
        do: Any = self._collectives
        run = ring(
            lambda peer: do.send(call.input, peer, codec=call.codec, group=self.group, async_op=True),
            lambda peer: do.recv(call.output, peer, codec=call.codec, group=self.group, async_op=True),
            call.output,
            call.input,
            asynchronous,
        )
        with _environment("DTCOMM_RUNTIME", self.runtime):
            wait(run())  # pairs are made when two ranks first talk
        return run

    def tally(self) -> Any:
        return self._told()

    def moved(self, before: Any) -> Moved:
        after = self._told()
        if after.get("operations", 0) == before.get("operations", 0) and after["runtime"] != "none":
            # Messages, which go by communicators of two ranks: these have no fused kernels.
            messages = self.moves_with() or after["runtime"]
            return Moved("nccl" if "nccl" in messages else messages)
        return moved(before, after)

    def why_no_graph(self) -> str:
        over_gloo = self._info["runtime"] == "process_group" and QUEUED not in self._info["transport"]
        return THROUGH_HOST if over_gloo else ""

    def describe(self) -> str:
        told = {key: self._info[key] for key in ("runtime", "kernels", "why") if self._info.get(key)}
        return ", ".join(f"{key} {value}" for key, value in told.items())

    def _told(self) -> dict[str, Any]:
        """What dtcomm says of the communicator for tensors that are where ours are."""
        info: dict[str, Any] = self._collectives.info(self.group)
        found: dict[str, Any] = info.get("devices", {}).get(str(self.place.device), info)
        return found


class Native(Dtcomm):
    """dtcomm's engine over shared memory."""

    runtime = "native"
    devices: ClassVar[tuple[str, ...]] = (CPU,)


class Peer(Dtcomm):
    """dtcomm's fused kernels over memory that the GPUs reach; what has none is an error."""

    runtime = "peer"
    devices: ClassVar[tuple[str, ...]] = (CUDA,)


class ProcessGroup(Dtcomm):
    """dtcomm's schedules and codecs over the group's own NCCL, or point-to-point messages."""

    runtime = "process_group"


def moved(before: dict[str, Any], after: dict[str, Any]) -> Moved:
    """What moved the bytes of the calls between two reports of ``dtcomm.info``."""
    if after["runtime"] == "none":
        return Moved("none", after["why"])
    if after["runtime"] != "peer":
        return Moved(_short(after["runtime"], after["transport"]))
    for reason, count in after["elsewhere"].items():
        if count > before["elsewhere"].get(reason, 0):
            return Moved(_short("process_group", after["elsewhere transport"]), reason)
    return Moved("fused")


def _short(runtime: str, transport: str) -> str:
    """The group's backend that moves a process group's bytes: the one that queues on streams, else Gloo."""
    if runtime != "process_group":
        return runtime
    name, _, queued = transport.partition(QUEUED)
    return name if queued else "gloo"


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Within the block the variable has the value; an empty one leaves it as it is."""
    before = os.environ.get(name)
    if value:
        os.environ[name] = value
    try:
        yield
    finally:
        if value and before is None:
            del os.environ[name]
        elif value and before is not None:
            os.environ[name] = before
