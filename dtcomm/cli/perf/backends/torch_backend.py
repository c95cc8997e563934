"""torch's own collectives: torch.distributed on Gloo and NCCL, and the all-reduces over symmetric memory."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from dtcomm.cli.perf.backends.base import Backend, Call, Moved, agree
from dtcomm.cli.perf.backends.works import Both, Then, ring
from dtcomm.cli.perf.placement import CUDA, Place

THROUGH_HOST = "Gloo moves bytes through the host's memory, which a graph cannot capture"
OVERLAPPING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


class TorchDistributed(Backend):
    """torch.distributed's own collectives on its Gloo backend."""

    averages: ClassVar[bool] = False  # Gloo has no average: whoever wants one there divides the sum

    def start(self, call: Call, asynchronous: bool) -> Callable[[], Any]:
        out, group, root = call.output, self.group, call.root
        rank, ranks = dist.get_rank(), dist.get_world_size()
        match call.collective:
            case "broadcast":
                return lambda: dist.broadcast(out, root, group=group, async_op=asynchronous)
            case "all_gather":
                gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
                return lambda: gather(out, call.input, group=group, async_op=asynchronous)
            case "gather":
                taken = list(out.chunk(ranks)) if rank == root and out.numel() else None
                taken = [out] * ranks if rank == root and taken is None else taken
                return lambda: dist.gather(call.input, taken, root, group=group, async_op=asynchronous)
            case "scatter":
                given = list(call.input.chunk(ranks)) if rank == root and out.numel() else None
                given = [call.input] * ranks if rank == root and given is None else given
                return lambda: dist.scatter(out, given, root, group=group, async_op=asynchronous)
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

    def _sendrecv(self, call: Call, asynchronous: bool) -> Callable[[], Any]:
        return ring(
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
            return Then(work, lambda: out.div_(ranks))

        return divided

    def why_no_graph(self) -> str:
        return THROUGH_HOST

    def describe(self) -> str:
        return f"torch.distributed {dist.get_backend(self.group)}, torch {torch.__version__}"


class Gloo(TorchDistributed):
    """Its Gloo backend; CUDA tensors go through the host's memory."""

    def moves_with(self) -> str | None:
        return "gloo"


class Nccl(TorchDistributed):
    """Its NCCL backend."""

    devices: ClassVar[tuple[str, ...]] = (CUDA,)
    averages: ClassVar[bool] = True

    def __init__(self, timeout: float, place: Place | None = None) -> None:
        if reason := why_no_nccl(place.shared if place else ""):
            raise ValueError(f"--backend nccl: {reason}")
        super().__init__(timeout, place)

    def moves_with(self) -> str | None:
        return "nccl"

    def _sendrecv(self, call: Call, asynchronous: bool) -> Callable[[], Any]:
        # As one group: a send alone may wait for its receive, which the peer queues behind a send of its own.
        rank, ranks = dist.get_rank(), dist.get_world_size()
        messages = [
            dist.P2POp(dist.isend, call.input, (rank + 1) % ranks, self.group),
            dist.P2POp(dist.irecv, call.output, (rank - 1) % ranks, self.group),
        ]

        def run() -> Any:
            if ranks == 1:
                call.output.copy_(call.input)
                return Both([]) if asynchronous else None
            both = Both(dist.batch_isend_irecv(messages))
            if asynchronous:
                return both
            both.wait()
            return None

        return run

    def why_no_graph(self) -> str:
        return ""

    def describe(self) -> str:
        version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        return f"torch.distributed nccl {version}, torch {torch.__version__}"


class _Symmetric(Backend):
    """torch's all-reduces over symmetric memory: the kernels alone, on tensors that lie in such memory."""

    devices: ClassVar[tuple[str, ...]] = (CUDA,)
    name: ClassVar[str]

    def __init__(self, timeout: float, place: Place | None = None) -> None:
        super().__init__(timeout, place)
        hosts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(hosts, platform.node())
        reason = why_no_symmetric(len(hosts), len(set(hosts)), self.place.shared)
        if reason:
            raise ValueError(f"--backend {self.name}: {reason}")
        trouble = ""
        try:
            self.empty(4, torch.float32)
        except (RuntimeError, ImportError) as error:
            trouble = (str(error).splitlines() or [repr(error)])[0]
        if trouble := agree(trouble):
            raise ValueError(f"--backend {self.name}: torch makes no symmetric memory here: {trouble}")

    @classmethod
    def refusal(cls, collective: str, datatype: str, op: str) -> str | None:
        """It sums floats and bfloat16s."""
        if collective != "all_reduce":
            return f"--backend {cls.name}: torch has all_reduce over symmetric memory, not {collective}"
        if op != "sum":
            return f"-o {op}: {cls.name} takes sum"
        if datatype not in ("float", "bfloat16"):
            return f"-d {datatype}: {cls.name} takes float, bfloat16"
        return None

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        import torch.distributed._symmetric_memory as memory

        made: torch.Tensor = memory.empty(numel, dtype=dtype, device=self.place.device)
        if memory.rendezvous(made, self.group.group_name) is None:
            raise RuntimeError("rendezvous found no memory that all ranks reach")
        return made

    def moved(self, before: Any) -> Moved:
        return Moved("symm_mem")

    def describe(self) -> str:
        return f"torch.ops.symm_mem, torch {torch.__version__}"


class SymmetricOneShot(_Symmetric):
    """``one_shot_all_reduce_out``: every rank reads all of everybody's input. Peers read it, so not in place."""

    name = "symm_one_shot"
    in_place: ClassVar[bool] = False

    def start(self, call: Call, asynchronous: bool) -> Callable[[], Any]:
        do = torch.ops.symm_mem.one_shot_all_reduce_out
        group = self.group.group_name
        return lambda: _done(do(call.input, "sum", group, call.output), asynchronous)

    def operation(self, call: Call, asynchronous: bool = False) -> Callable[[], Any]:
        """It needs no copy: its input and its output are two tensors."""
        return self.start(call, asynchronous)


class SymmetricTwoShot(_Symmetric):
    """``two_shot_all_reduce_``: every rank sums a part and hands it to all, in place."""

    name = "symm_two_shot"

    def start(self, call: Call, asynchronous: bool) -> Callable[[], Any]:
        do = torch.ops.symm_mem.two_shot_all_reduce_
        group = self.group.group_name
        return lambda: _done(do(call.output, "sum", group), asynchronous)


def _done(result: Any, asynchronous: bool) -> Any:
    """What is queued on the current stream needs no wait."""
    return Both([]) if asynchronous else None


def why_no_nccl(shared: str) -> str:
    """Why NCCL cannot move the ranks' tensors; ``shared`` says which ranks share a GPU. Empty where it can."""
    if not dist.is_nccl_available():
        return f"torch {torch.__version__} was built without NCCL"
    if shared:
        return f"{shared}, and NCCL wants one for each rank; valid here: dtcomm, process_group, gloo"
    return ""


def why_no_symmetric(ranks: int, hosts: int, shared: str) -> str:
    """Why torch's kernels over symmetric memory cannot serve the ranks; empty where nothing is known against it."""
    if ranks < 2:
        return "one rank has no peer"
    if hosts > 1:
        return f"the ranks are on {hosts} hosts, and these kernels read each other's memory"
    if shared and os.environ.get(OVERLAPPING) != "1":
        return f"{shared}, which torch takes for symmetric memory only with {OVERLAPPING}=1"
    return ""
