"""Backends of dtcomm: with the runtime that dtcomm chooses, or with a given one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from dtcomm.cli.perf.backends.base import Backend, CollectiveCall, TransportUsed
from dtcomm.cli.perf.backends.torch_backend import THROUGH_HOST, bind_ring_exchange, wait, why_no_nccl
from dtcomm.cli.perf.collectives import COLLECTIVES
from dtcomm.cli.perf.placement import CPU, CUDA, Placement

# Part of a runtime's description if a backend queues its messages on a device's streams.
QUEUED = ", queued on streams of "


class Dtcomm(Backend):
    """dtcomm with the runtime of DTCOMM_RUNTIME, by default the one dtcomm chooses.

    The runtime is chosen when a communicator is created, so each backend has its own group.
    """

    supports_codecs = True
    runtime: ClassVar[str] = ""

    def __init__(self, timeout: float, place: Placement | None = None) -> None:
        from dtcomm import collectives

        super().__init__(timeout, place)
        self._collectives = collectives
        with _environment("DTCOMM_RUNTIME", self.runtime):
            collectives.all_reduce(torch.zeros(1, device=self.place.device), group=self.group)
            self._info = self._info_now()

    def group_backend(self) -> str | None:
        if self.place.kind != CUDA:
            return None
        return "gloo" if why_no_nccl(self.place.shared_gpu) else "cpu:gloo,cuda:nccl"

    def bind(self, call: CollectiveCall, asynchronous: bool) -> Callable[[], Any]:
        do: Any = self._collectives
        out, source = call.output, call.input
        options = {
            "codec": call.codec,
            "algorithm": call.algorithm,
            "group": self.group,
            "async_op": asynchronous,
        }
        is_root = dist.get_rank() == call.root
        if call.schedule is not None:
            return self._bind_schedule(call, options)
        match call.collective:
            case "all_reduce":
                return lambda: do.all_reduce(out, call.op, **options)
            case "reduce":
                return lambda: do.reduce(out, call.root, call.op, **options)
            case "reduce_scatter":
                return lambda: do.reduce_scatter(out, source, call.op, **options)
            case "all_gather":
                return lambda: do.all_gather(out, source, **options)
            case "gather":
                return lambda: do.gather(source, out if is_root else None, call.root, **options)
            case "scatter":
                return lambda: do.scatter(out, source if is_root else None, call.root, **options)
            case "all_to_all":
                return lambda: do.all_to_all(out, source, **options)
            case "sendrecv":
                return self._sendrecv(call, asynchronous)
            case _:
                return lambda: do.broadcast(out, call.root, **options)

    def _bind_schedule(self, call: CollectiveCall, options: dict[str, Any]) -> Callable[[], Any]:
        do: Any = self._collectives
        schedule, op = call.schedule, call.op if COLLECTIVES[call.collective].reduces else "sum"
        options = {name: value for name, value in options.items() if name != "algorithm"}
        out: torch.Tensor | None = call.output
        source: torch.Tensor | None = None if COLLECTIVES[call.collective].in_place_api else call.input
        if dist.get_rank() != call.root:  # only the root has an output or an input of all shards
            out = None if call.collective == "gather" else out
            source = None if call.collective == "scatter" else source
        return lambda: do.run(schedule, out, source, op, **options)

    def _sendrecv(self, call: CollectiveCall, asynchronous: bool) -> Callable[[], Any]:
        do: Any = self._collectives
        options = {"codec": call.codec, "group": self.group}
        run = bind_ring_exchange(
            lambda peer: do.send(call.input, peer, **options, async_op=True),
            lambda peer: do.recv(call.output, peer, **options, async_op=True),
            call.output,
            call.input,
            asynchronous,
        )
        with _environment("DTCOMM_RUNTIME", self.runtime):
            wait(run())  # a pair of ranks connects at its first message
        rank, ranks = dist.get_rank(), dist.get_world_size()
        if asynchronous or ranks == 1:
            return run
        following, previous = (rank + 1) % ranks, (rank - 1) % ranks
        return lambda: do.sendrecv(call.input, following, call.output, previous, **options)

    def settled(self) -> bool:
        return all(choice["settled"] for choice in self._info_now().get("choices", []))

    def transport_snapshot(self) -> Any:
        return self._info_now()

    def transport_used(self, before: Any) -> TransportUsed:
        after = self._info_now()
        if after.get("operations", 0) == before.get("operations", 0) and after["runtime"] != "none":
            # Point-to-point messages use communicators of two ranks, which have no fused kernels.
            messages = self.group_backend() or after["runtime"]
            return TransportUsed("nccl" if "nccl" in messages else messages)
        return transport_between(before, after)

    def why_no_cuda_graph(self) -> str:
        over_gloo = self._info["runtime"] == "process_group" and QUEUED not in self._info["transport"]
        return THROUGH_HOST if over_gloo else ""

    def describe(self) -> str:
        fields = {key: self._info[key] for key in ("runtime", "kernels", "reason") if self._info.get(key)}
        return ", ".join(f"{key} {value}" for key, value in fields.items())

    def _info_now(self) -> dict[str, Any]:
        """Return dtcomm.info of the communicator for tensors on this placement's device."""
        info: dict[str, Any] = self._collectives.info(self.group)
        device_info: dict[str, Any] = info.get("devices", {}).get(str(self.place.device), info)
        return device_info


class Native(Dtcomm):
    """dtcomm's engine over shared memory."""

    runtime = "native"
    devices: ClassVar[tuple[str, ...]] = (CPU,)


class Peer(Dtcomm):
    """dtcomm's fused kernels over peer memory; a call without a fused kernel is an error."""

    runtime = "peer"
    devices: ClassVar[tuple[str, ...]] = (CUDA,)


class ProcessGroup(Dtcomm):
    """dtcomm's schedules and codecs over torch.distributed's NCCL or point-to-point messages."""

    runtime = "process_group"


def transport_between(before: dict[str, Any], after: dict[str, Any]) -> TransportUsed:
    """Return what moved the bytes of the calls between two results of ``dtcomm.info``."""
    if after["runtime"] == "none":
        return TransportUsed("none", after["reason"])
    if after["runtime"] != "peer":
        return TransportUsed(_transport_name(after["runtime"], after["transport"]))
    for reason, count in after["elsewhere"].items():
        if count > before["elsewhere"].get(reason, 0):
            return TransportUsed(_transport_name("process_group", after["elsewhere transport"]), reason)
    return TransportUsed("fused")


def _transport_name(runtime: str, transport: str) -> str:
    """Return the name of the transport; for a process group, the backend that queues on streams, else Gloo."""
    if runtime != "process_group":
        return runtime
    name, _, queued = transport.partition(QUEUED)
    return name if queued else "gloo"


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Set an environment variable in the block; an empty value leaves it unchanged."""
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
