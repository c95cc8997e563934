"""Backends of torch: torch.distributed over Gloo and NCCL, and all-reduce over symmetric memory."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from dtcomm import torch_compat
from dtcomm.cli.perf.backends.base import Backend, CollectiveCall, TransportUsed, first_error_of_any_rank
from dtcomm.cli.perf.placement import CUDA, Placement
from dtcomm.work import COMPLETED, CompositeWork

THROUGH_HOST = "Gloo moves bytes through host memory, which a graph cannot capture"
OVERLAPPING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


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
        return bind_ring_exchange(
            lambda peer: dist.isend(call.input, peer, group=self.group),
            lambda peer: dist.irecv(call.output, peer, group=self.group),
            call.output,
            call.input,
            asynchronous,
        )

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

        def run() -> Any:
            if ranks == 1:
                call.output.copy_(call.input)
                return COMPLETED if asynchronous else None
            work = CompositeWork(dist.batch_isend_irecv(messages), [call.output])
            if asynchronous:
                return work
            work.wait()
            return None

        return run

    def why_no_cuda_graph(self) -> str:
        return ""

    def describe(self) -> str:
        version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        return f"torch.distributed nccl {version}, torch {torch.__version__}"


class _Symmetric(Backend):
    """torch's all-reduce kernels over symmetric memory, on tensors allocated there."""

    devices: ClassVar[tuple[str, ...]] = (CUDA,)
    name: ClassVar[str]

    def __init__(self, timeout: float, place: Placement | None = None) -> None:
        super().__init__(timeout, place)
        hosts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(hosts, platform.node())
        reason = why_no_symmetric(len(hosts), len(set(hosts)), self.place.shared_gpu)
        if reason:
            raise ValueError(f"--backend {self.name}: {reason}")
        error_text = ""
        try:
            self.empty(4, torch.float32)
        except (RuntimeError, ImportError) as error:
            error_text = (str(error).splitlines() or [repr(error)])[0]
        if error_text := first_error_of_any_rank(error_text):
            raise ValueError(f"--backend {self.name}: torch cannot allocate symmetric memory: {error_text}")

    @classmethod
    def why_unsupported(cls, collective: str, datatype: str, op: str) -> str | None:
        """Return why a call is not supported: the kernels sum float and bfloat16."""
        if collective != "all_reduce":
            return f"--backend {cls.name}: torch has all_reduce over symmetric memory, not {collective}"
        if op != "sum":
            return f"-o {op}: {cls.name} takes sum"
        if datatype not in ("float", "bfloat16"):
            return f"-d {datatype}: {cls.name} takes float, bfloat16"
        return None

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        memory = torch_compat.symmetric_memory()

        tensor: torch.Tensor = memory.empty(numel, dtype=dtype, device=self.place.device)
        if memory.rendezvous(tensor, self.group.group_name) is None:
            raise RuntimeError("the ranks cannot map each other's memory")
        return tensor

    def transport_used(self, before: Any) -> TransportUsed:
        return TransportUsed("symm_mem")

    def describe(self) -> str:
        return f"torch.ops.symm_mem, torch {torch.__version__}"


class SymmetricOneShot(_Symmetric):
    """``one_shot_all_reduce_out``: every rank reads all inputs, so it cannot work in place."""

    name = "symm_one_shot"
    supports_in_place: ClassVar[bool] = False

    def bind(self, call: CollectiveCall, asynchronous: bool) -> Callable[[], Any]:
        do = torch.ops.symm_mem.one_shot_all_reduce_out
        group = self.group.group_name
        return lambda: _done(do(call.input, "sum", group, call.output), asynchronous)

    def bind_with_copy(self, call: CollectiveCall, asynchronous: bool = False) -> Callable[[], Any]:
        """Return `bind`'s function; input and output are two tensors, so no copy is needed."""
        return self.bind(call, asynchronous)


class SymmetricTwoShot(_Symmetric):
    """``two_shot_all_reduce_``: every rank sums a chunk and writes it to all ranks, in place."""

    name = "symm_two_shot"

    def bind(self, call: CollectiveCall, asynchronous: bool) -> Callable[[], Any]:
        do = torch.ops.symm_mem.two_shot_all_reduce_
        group = self.group.group_name
        return lambda: _done(do(call.output, "sum", group), asynchronous)


def _done(result: Any, asynchronous: bool) -> Any:
    """Return a handle for work queued on the current stream, which needs no wait."""
    return COMPLETED if asynchronous else None


def why_no_nccl(shared_gpu: str) -> str:
    """Return why NCCL cannot be used, or an empty string; ``shared_gpu`` says which ranks share a GPU."""
    if not dist.is_nccl_available():
        return f"torch {torch.__version__} was built without NCCL"
    if shared_gpu:
        return f"{shared_gpu}, but NCCL needs one for each rank; valid: dtcomm, process_group, gloo"
    return ""


def why_no_symmetric(ranks: int, hosts: int, shared_gpu: str) -> str:
    """Return why torch's kernels over symmetric memory cannot be used, or an empty string if no reason is known."""
    if ranks < 2:
        return "there is only one rank"
    if hosts > 1:
        return f"the ranks are on {hosts} hosts, but these kernels need ranks of one host"
    if shared_gpu and os.environ.get(OVERLAPPING) != "1":
        return f"{shared_gpu}, which torch supports for symmetric memory only with {OVERLAPPING}=1"
    return ""


def wait(work: Any) -> None:
    """Wait for a work handle; None means that the operation is complete."""
    if work is not None:
        work.wait()


def bind_ring_exchange(
    send: Callable[[int], Any],
    receive: Callable[[int], Any],
    output: torch.Tensor,
    input: torch.Tensor,
    asynchronous: bool,
) -> Callable[[], Any]:
    """Return a function in which every rank sends to the next rank and receives from the previous one."""
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def run() -> Any:
        if ranks == 1:
            output.copy_(input)
            return COMPLETED if asynchronous else None
        work = CompositeWork([send((rank + 1) % ranks), receive((rank - 1) % ranks)], [output])
        if asynchronous:
            return work
        work.wait()
        return None

    return run
