"""Backends of ``dtcomm perf``: dtcomm's runtimes, and torch.distributed over Gloo and NCCL.

`BACKENDS` lists them by name. ``module:Class`` names a subclass of `Backend` from elsewhere.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from dtcomm import collectives
from dtcomm.cli.perf.backend import Backend, CollectiveCall, TransportUsed
from dtcomm.cli.perf.placement import CPU, CUDA, Placement
from dtcomm.work import COMPLETED, CompositeWork

THROUGH_HOST = "Gloo moves bytes through host memory, which a graph cannot capture"
# Part of a runtime's description if a backend queues its messages on a device's streams.
QUEUED = ", queued on streams of "


class Dtcomm(Backend):
    """dtcomm with the runtime of DTCOMM_RUNTIME, by default the one dtcomm chooses.

    The runtime is chosen when a communicator is created, so each backend has its own group.
    """

    supports_codecs = True
    runtime: ClassVar[str] = ""

    def __init__(self, timeout: float, place: Placement | None = None) -> None:
        super().__init__(timeout, place)
        with _environment("DTCOMM_RUNTIME", self.runtime):
            collectives.all_reduce(torch.zeros(1, device=self.place.device), group=self.group)
            self._info = self._info_now()

    def group_backend(self) -> str | None:
        if self.place.kind != CUDA:
            return None
        return "gloo" if why_no_nccl(self.place.shared_gpu) else "cpu:gloo,cuda:nccl"

    def bind(self, call: CollectiveCall, asynchronous: bool) -> Callable[[], Any]:
        options = {
            "codec": call.codec,
            "algorithm": call.algorithm,
            "group": self.group,
            "async_op": asynchronous,
        }
        if call.collective == "sendrecv":
            return self._sendrecv(call, asynchronous)
        return bind_collective(call.collective, call.output, call.input, call.op, call.root, options)

    def _sendrecv(self, call: CollectiveCall, asynchronous: bool) -> Callable[[], Any]:
        do: Any = collectives
        options = {"codec": call.codec, "group": self.group}

        def start(following: int, previous: int) -> list[Any]:
            sent = do.send(call.input, following, **options, async_op=True)
            return [sent, do.recv(call.output, previous, **options, async_op=True)]

        run = bind_ring_exchange(start, call, asynchronous)
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
        info: dict[str, Any] = collectives.info(self.group)
        device_info: dict[str, Any] = info.get("devices", {}).get(str(self.place.device), info)
        return device_info


def bind_collective(
    name: str, out: torch.Tensor, source: torch.Tensor, op: str, root: int, options: dict[str, Any]
) -> Callable[[], Any]:
    """Return a function that makes a call of dtcomm; the root of gather and scatter alone passes the whole tensor."""
    do: Any = collectives
    is_root = dist.get_rank() == root
    match name:
        case "all_reduce":
            return lambda: do.all_reduce(out, op, **options)
        case "reduce":
            return lambda: do.reduce(out, root, op, **options)
        case "reduce_scatter":
            return lambda: do.reduce_scatter(out, source, op, **options)
        case "gather":
            return lambda: do.gather(source, out if is_root else None, root, **options)
        case "scatter":
            return lambda: do.scatter(out, source if is_root else None, root, **options)
        case "broadcast":
            return lambda: do.broadcast(out, root, **options)
        case "all_gather":
            return lambda: do.all_gather(out, source, **options)
    return lambda: do.all_to_all(out, source, **options)


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


class TorchDistributed(Backend):
    """torch.distributed's collectives over the default group's backend."""

    averages: ClassVar[bool] = False  # Gloo has no average, so the sum is divided

    def bind(self, call: CollectiveCall, asynchronous: bool) -> Callable[[], Any]:
        out, group, root = call.output, self.group, call.root
        rank, ranks = dist.get_rank(), dist.get_world_size()
        match call.collective:
            case "broadcast":
                return lambda: dist.broadcast(out, root, group=group, async_op=asynchronous)
            case "all_gather":
                gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
                return lambda: gather(out, call.input, group=group, async_op=asynchronous)
            case "gather":
                outputs = list(out.chunk(ranks)) if rank == root and out.numel() else None
                outputs = [out] * ranks if rank == root and outputs is None else outputs
                return lambda: dist.gather(call.input, outputs, root, group=group, async_op=asynchronous)
            case "scatter":
                inputs = list(call.input.chunk(ranks)) if rank == root and out.numel() else None
                inputs = [call.input] * ranks if rank == root and inputs is None else inputs
                return lambda: dist.scatter(out, inputs, root, group=group, async_op=asynchronous)
            case "all_to_all":
                return lambda: dist.all_to_all_single(out, call.input, group=group, async_op=asynchronous)
            case "sendrecv":
                return self._sendrecv(call, asynchronous)
        divides = call.op == "avg" and not self.averages
        op = getattr(dist.ReduceOp, "SUM" if divides else call.op.upper())
        if call.collective == "all_reduce":
            run: Callable[[], Any] = lambda: dist.all_reduce(out, op, group=group, async_op=asynchronous)  # noqa: E731
        elif call.collective == "reduce":
            run = lambda: dist.reduce(out, root, op, group=group, async_op=asynchronous)  # noqa: E731
        else:
            scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
            run = lambda: scatter(out, call.input, op, group=group, async_op=asynchronous)  # noqa: E731
        return self._divided(run, out, asynchronous) if divides else run

    def _sendrecv(self, call: CollectiveCall, asynchronous: bool) -> Callable[[], Any]:
        def start(following: int, previous: int) -> list[Any]:
            sent = dist.isend(call.input, following, group=self.group)
            return [sent, dist.irecv(call.output, previous, group=self.group)]

        return bind_ring_exchange(start, call, asynchronous)

    def _divided(self, run: Callable[[], Any], out: torch.Tensor, asynchronous: bool) -> Callable[[], Any]:
        ranks = dist.get_world_size(self.group)

        def divided() -> Any:
            work = run()
            if not asynchronous:
                out.div_(ranks)
                return None
            return CompositeWork([work], [out], lambda: out.div_(ranks))

        return divided

    def why_no_cuda_graph(self) -> str:
        return THROUGH_HOST

    def describe(self) -> str:
        return f"torch.distributed {dist.get_backend(self.group)}, torch {torch.__version__}"


class Gloo(TorchDistributed):
    """torch.distributed over Gloo; CUDA tensors go through host memory."""

    def group_backend(self) -> str | None:
        return "gloo"


class Nccl(TorchDistributed):
    """torch.distributed over NCCL."""

    devices: ClassVar[tuple[str, ...]] = (CUDA,)
    averages: ClassVar[bool] = True

    def __init__(self, timeout: float, place: Placement | None = None) -> None:
        if reason := why_no_nccl(place.shared_gpu if place else ""):
            raise ValueError(f"--backend nccl: {reason}")
        super().__init__(timeout, place)

    def group_backend(self) -> str | None:
        return "nccl"

    def _sendrecv(self, call: CollectiveCall, asynchronous: bool) -> Callable[[], Any]:
        # Batched: a single send may block until its receive, which the peer queues behind its own send.
        rank, ranks = dist.get_rank(), dist.get_world_size()
        messages = [
            dist.P2POp(dist.isend, call.input, (rank + 1) % ranks, self.group),
            dist.P2POp(dist.irecv, call.output, (rank - 1) % ranks, self.group),
        ]
        return bind_ring_exchange(lambda *_: dist.batch_isend_irecv(messages), call, asynchronous)

    def why_no_cuda_graph(self) -> str:
        return ""

    def describe(self) -> str:
        version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        return f"torch.distributed nccl {version}, torch {torch.__version__}"


def why_no_nccl(shared_gpu: str) -> str:
    """Return why NCCL cannot be used, or an empty string; ``shared_gpu`` says which ranks share a GPU."""
    if not dist.is_nccl_available():
        return f"torch {torch.__version__} was built without NCCL"
    if shared_gpu:
        return f"{shared_gpu}, but NCCL needs one for each rank; valid: dtcomm, process_group, gloo"
    return ""


def wait(work: Any) -> None:
    """Wait for a work handle; None means that the operation is complete."""
    if work is not None:
        work.wait()


def bind_ring_exchange(
    start: Callable[[int, int], list[Any]], call: CollectiveCall, asynchronous: bool
) -> Callable[[], Any]:
    """Return a function in which every rank sends to the next rank and receives from the previous one.

    ``start(next, previous)`` starts both and returns their handles.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def run() -> Any:
        if ranks == 1:
            call.output.copy_(call.input)
            return COMPLETED if asynchronous else None
        work = CompositeWork(start((rank + 1) % ranks, (rank - 1) % ranks), [call.output])
        if asynchronous:
            return work
        work.wait()
        return None

    return run


BACKENDS: dict[str, type[Backend]] = {
    "dtcomm": Dtcomm,
    "native": Native,
    "peer": Peer,
    "process_group": ProcessGroup,
    "gloo": Gloo,
    "nccl": Nccl,
}
PEERS = ("gloo", "nccl")
BACKEND_HELP = (
    f"{', '.join(BACKENDS)}, or module:Class of your own; repeated or a,b compares in one table "
    "(native; dtcomm on GPUs)"
)


def backend_names(device: str) -> list[str]:
    """Return the names of the backends that support tensors on ``device``."""
    return [name for name, backend in BACKENDS.items() if device in backend.devices]


def find_backend(name: str) -> type[Backend]:
    """Return the backend class of a name or of ``module:Class``; ValueError lists the valid names."""
    if name in BACKENDS:
        return BACKENDS[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ValueError(f"--backend {name!r} is not one of {', '.join(BACKENDS)}, module:Class")
    try:
        backend = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"--backend {name!r}: {error}") from error
    if not (isinstance(backend, type) and issubclass(backend, Backend)):
        raise ValueError(f"--backend {name!r} is not a subclass of dtcomm.cli.perf.backend.Backend")
    return backend
