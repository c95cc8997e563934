"""Who carries out a measured collective. ``BACKENDS`` is the list; ``module:Class`` names one from elsewhere.

A backend is made once on every rank, after torch.distributed is up. ``operation`` is handed the tensors and
returns what the timed loop calls: all decisions that can be made before are made there.
"""

from __future__ import annotations

import abc
import contextlib
import importlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from dtcomm.cli.perf_collectives import COLLECTIVES
from dtcomm.cli.perf_works import Then, ring, wait
from dtcomm.schedule import Schedule


@dataclass(frozen=True, kw_only=True)
class Call:
    """One collective on given tensors. all_reduce, broadcast and reduce work on ``output``; ``input`` is copied into
    it first where that is another tensor, since their API is in place. ``schedule`` stands for the algorithm."""

    collective: str
    output: torch.Tensor
    input: torch.Tensor
    op: str = "none"
    root: int = 0
    codec: str = "none"
    algorithm: str = "auto"
    schedule: Schedule | None = None

    @property
    def copies(self) -> bool:
        return COLLECTIVES[self.collective].whole_in_place and self.output is not self.input


class Backend(abc.ABC):
    """``plain``: it knows neither codecs nor algorithms. ``measures``: it has processes and a clock of its own
    (``times``), and what it computes is not seen."""

    plain: ClassVar[bool] = True
    measures: ClassVar[bool] = False

    def __init__(self, timeout: float) -> None:
        self.group = dist.new_group(timeout=timedelta(seconds=timeout))

    @abc.abstractmethod
    def start(self, call: Call, asynchronous: bool) -> Callable[[], Any]:
        """A function that does the collective, or starts it and returns an object with ``wait()``."""

    def operation(self, call: Call, asynchronous: bool = False) -> Callable[[], Any]:
        """``start``, with the copy that an out-of-place call needs."""
        run = self.start(call, asynchronous)
        if not call.copies:
            return run
        copy, source = call.output.copy_, call.input

        def copied() -> Any:
            copy(source)
            return run()

        return copied

    def times(self, case: Any, iters: int, warmup: int) -> list[list[float]]:
        """Seconds of each call of a ``perf_check.Case``, by rank, where it ``measures``."""
        raise TypeError("abstract")

    def describe(self) -> str:
        """A few words for the header."""
        return ""

    def close(self) -> None:  # noqa: B027 - most start nothing
        """End what it started."""


class TorchDistributed(Backend):
    """torch.distributed's own collectives on its Gloo backend."""

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
                return ring(
                    lambda peer: dist.isend(call.input, peer, group=group),
                    lambda peer: dist.irecv(out, peer, group=group),
                    out,
                    call.input,
                    asynchronous,
                )
        # Gloo has no average: whoever wants one there divides the sum.
        divides = call.op == "avg"
        op = getattr(dist.ReduceOp, "SUM" if divides else call.op.upper())
        if call.collective == "all_reduce":
            run: Callable[[], Any] = lambda: dist.all_reduce(out, op, group=group, async_op=asynchronous)  # noqa: E731
        elif call.collective == "reduce":
            run = lambda: dist.reduce(out, root, op, group=group, async_op=asynchronous)  # noqa: E731
        else:
            scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
            run = lambda: scatter(out, call.input, op, group=group, async_op=asynchronous)  # noqa: E731
        return self._divided(run, out, asynchronous) if divides else run

    def _divided(self, run: Callable[[], Any], out: torch.Tensor, asynchronous: bool) -> Callable[[], Any]:
        ranks = dist.get_world_size(self.group)

        def divided() -> Any:
            work = run()
            if not asynchronous:
                out.div_(ranks)
                return None
            return Then(work, lambda: out.div_(ranks))

        return divided

    def describe(self) -> str:
        return f"torch.distributed {dist.get_backend(self.group)}, torch {torch.__version__}"


class Dtcomm(Backend):
    """dtcomm on one of its runtimes, which is chosen when a communicator is made: each has a group of its own."""

    plain = False
    runtime: ClassVar[str]

    def __init__(self, timeout: float) -> None:
        from dtcomm import collectives

        super().__init__(timeout)
        self._collectives = collectives
        with _environment("DTCOMM_RUNTIME", self.runtime):
            collectives.all_reduce(torch.zeros(1), group=self.group)
            self._info = collectives.info(self.group)

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

    def describe(self) -> str:
        told = {key: self._info[key] for key in ("runtime", "kernels", "why") if self._info.get(key)}
        return ", ".join(f"{key} {value}" for key, value in told.items())


class Native(Dtcomm):
    """dtcomm's engine over shared memory."""

    runtime = "native"


class ProcessGroup(Dtcomm):
    """dtcomm's schedules and codecs over the group's own point-to-point."""

    runtime = "process_group"


BACKENDS: dict[str, type[Backend]] = {
    "native": Native,
    "process_group": ProcessGroup,
    "gloo": TorchDistributed,
}
PEERS = ("gloo", "mpi")
HELP = (
    f"{', '.join(BACKENDS)}, mpi, or module:Class of your own; repeated or a,b compares in one table (native)"
)


def find(name: str) -> type[Backend]:
    """The backend of that name; ValueError lists the valid ones."""
    if name in BACKENDS:
        return BACKENDS[name]
    if name == "mpi":
        from dtcomm.cli.perf_mpi import OpenMpi

        return OpenMpi
    module, colon, attribute = name.partition(":")
    if not colon:
        raise ValueError(f"--backend {name!r} is not one of {', '.join(BACKENDS)}, mpi, module:Class")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"--backend {name!r}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Backend)):
        raise ValueError(f"--backend {name!r} is not a subclass of dtcomm.cli.perf_backends.Backend")
    return found


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
