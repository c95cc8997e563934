"""Backend of Open MPI: a C program that rank 0 starts and that measures while the ranks of dtcomm wait."""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any, ClassVar

import torch.distributed as dist

from dtcomm.cli.perf.backends.base import Backend, CollectiveCall, TransportUsed
from dtcomm.cli.perf.collectives import DTYPES
from dtcomm.cli.perf.placement import CPU, Placement
from dtcomm.measure import mpi

NAMES = {dtype: name for name, dtype in DTYPES.items()}


class OpenMpi(Backend):
    """Open MPI ranks on this host, called from C; their results are not checked."""

    measures_itself: ClassVar[bool] = True
    devices: ClassVar[tuple[str, ...]] = (CPU,)

    def __init__(self, timeout: float, place: Placement | None = None) -> None:
        super().__init__(timeout, place)
        ranks = dist.get_world_size()
        hosts: list[Any] = [None] * ranks
        dist.all_gather_object(hosts, platform.node())
        if len(set(hosts)) > 1:
            raise ValueError("--compare mpi: Open MPI is started on one host, but the ranks are on several")
        self._mpi_ranks: mpi.MpiRanks | None = None
        error_text: list[Any] = [None]
        if dist.get_rank() == 0:
            try:
                self._mpi_ranks = mpi.MpiRanks("default", ranks, timeout=timeout)
                self._mpi_ranks.measure(numel=1, warm=1, iters=1)
            except mpi.MpiError as error:
                error_text = [str(error)]
        dist.broadcast_object_list(error_text, 0)
        if error_text[0] is not None:
            raise ValueError(f"--compare mpi: {error_text[0]}")

    @classmethod
    def why_unsupported(cls, collective: str, datatype: str, op: str) -> str | None:
        """Return why a call is not supported: the C program has some types and operators only."""
        if datatype not in mpi.TYPES:
            return f"-d {datatype}: Open MPI is measured with {', '.join(mpi.TYPES)}"
        if op not in (*mpi.OPS, "none"):
            return f"-o {op}: Open MPI is measured with {', '.join(mpi.OPS)}"
        return None

    def measure_calls(self, case: Any, iters: int, warmup: int) -> list[list[float]]:
        """Return the seconds of each call, by rank; all ranks must call it."""
        gathered: list[Any] = [None]
        if self._mpi_ranks is not None:
            gathered = [
                self._mpi_ranks.measure(
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
        dist.broadcast_object_list(gathered, 0)
        times: list[list[float]] = gathered[0]
        return times

    def bind(self, call: CollectiveCall, asynchronous: bool) -> Callable[[], Any]:
        raise TypeError("Open MPI measures itself")

    def transport_used(self, before: Any) -> TransportUsed:
        return TransportUsed("mpi")

    def describe(self) -> str:
        return "Open MPI's default, called from C"

    def close(self) -> None:
        if self._mpi_ranks is not None:
            self._mpi_ranks.close()
