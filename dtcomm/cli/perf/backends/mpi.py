"""Open MPI beside us: a program of its own that rank 0 starts, and that measures while our ranks wait."""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any, ClassVar

import torch.distributed as dist

from dtcomm.cli.perf.backends.base import Backend, Call, Moved
from dtcomm.cli.perf.collectives import DTYPES
from dtcomm.cli.perf.placement import CPU, Place
from dtcomm.measure import mpi

NAMES = {dtype: name for name, dtype in DTYPES.items()}


class OpenMpi(Backend):
    """Its own processes on this host, which call MPI from C; their results are not checked."""

    measures: ClassVar[bool] = True
    devices: ClassVar[tuple[str, ...]] = (CPU,)

    def __init__(self, timeout: float, place: Place | None = None) -> None:
        super().__init__(timeout, place)
        ranks = dist.get_world_size()
        hosts: list[Any] = [None] * ranks
        dist.all_gather_object(hosts, platform.node())
        if len(set(hosts)) > 1:
            raise ValueError("--compare mpi: Open MPI is started on one host, and these ranks are on several")
        self._started: mpi.MpiRanks | None = None
        trouble: list[Any] = [None]
        if dist.get_rank() == 0:
            try:
                self._started = mpi.MpiRanks("default", ranks, timeout=timeout)
                self._started.measure(numel=1, warm=1, iters=1)
            except mpi.MpiError as error:
                trouble = [str(error)]
        dist.broadcast_object_list(trouble, 0)
        if trouble[0] is not None:
            raise ValueError(f"--compare mpi: {trouble[0]}")

    @classmethod
    def refusal(cls, collective: str, datatype: str, op: str) -> str | None:
        """Types and operators that the program in C knows."""
        if datatype not in mpi.TYPES:
            return f"-d {datatype}: Open MPI is measured with {', '.join(mpi.TYPES)}"
        if op not in (*mpi.OPS, "none"):
            return f"-o {op}: Open MPI is measured with {', '.join(mpi.OPS)}"
        return None

    def times(self, case: Any, iters: int, warmup: int) -> list[list[float]]:
        """Seconds of each call, by rank; all ranks call it."""
        found: list[Any] = [None]
        if self._started is not None:
            found = [
                self._started.measure(
                    collective=case.collective,
                    numel=case.count,
                    datatype=NAMES[case.dtype],
                    op=case.op,
                    root=case.root,
                    warm=warmup,
                    iters=iters,
                    per_call=True,
                )
            ]
        dist.broadcast_object_list(found, 0)
        times: list[list[float]] = found[0]
        return times

    def start(self, call: Call, asynchronous: bool) -> Callable[[], Any]:
        raise TypeError("Open MPI measures itself")

    def moved(self, before: Any) -> Moved:
        return Moved("mpi")

    def describe(self) -> str:
        return "Open MPI's default, called from C"

    def close(self) -> None:
        if self._started is not None:
            self._started.close()
