"""Rank processes of the programs: each holds named steps and measures them, perhaps in a network namespace."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.common import netns
from bench.common.harness import Measure
from bench.common.pool import Pool, pin

SETTLING_CALLS = 400  # after which the first trials of an operation are over
SETTLING_SECONDS = 2.0
#: Returns the step of a contestant, given the rank and the case; it raises if the result of the step is wrong.
Factory = Callable[..., Callable[[], object]]


class Rank:
    """One rank of a Gloo group (or of another backend), with steps by name.

    Args:
        rank: The rank.
        ranks: Number of ranks.
        store_file: A file through which the ranks connect.
        namespaces: The network namespace of each rank; empty: all ranks on this host.
        pinned: Bind the calling thread to a core; threads of Gloo are not bound.
        backend: torch.distributed's backend.
        env: Environment variables, such as ``DTCOMM_EMULATE_LINK``.
    """

    def __init__(
        self,
        rank: int,
        ranks: int,
        store_file: str,
        namespaces: list[str] | None = None,
        pinned: bool = True,
        backend: str = "gloo",
        env: Mapping[str, str] | None = None,
    ) -> None:
        os.environ.update(env or {})
        torch.set_num_threads(1)
        self.rank, self.ranks = rank, ranks
        if namespaces:
            if "UCX_NET_DEVICES" in os.environ:
                netns.enter_namespace(namespaces[rank])
                netns.mount_own_sysfs()
            netns.init_process_group(rank, ranks, store_file, namespaces)
        else:
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"
            dist.init_process_group(
                backend,
                init_method=f"file://{store_file}",
                rank=rank,
                world_size=ranks,
                timeout=timedelta(seconds=120),
            )
            dist.barrier()
            if pinned:
                pin(rank)
        self._steps: dict[str, Callable[[], object]] = {}

    def build(self, name: str, factory: Factory, settle: bool, case: dict[str, Any]) -> None:
        """Make a step; ``settle``: repeat it until its first trials are over, so that it is what a long run does."""
        step = self._steps[name] = factory(self.rank, self.ranks, name, **case)
        start = time.monotonic()
        for _ in range(0, SETTLING_CALLS if settle else 0, 20):
            for _ in range(20):
                step()
            late = torch.tensor([time.monotonic() - start > SETTLING_SECONDS])
            dist.broadcast(late, 0)  # all ranks stop after the same call
            if late:
                return

    def measure(self, name: str, calls: int) -> float:
        """Return the seconds of a call on this rank; a first call aligns the ranks."""
        step = self._steps[name]
        dist.barrier()
        step()
        start = time.perf_counter()
        for _ in range(calls):
            step()
        return (time.perf_counter() - start) / calls

    def run(self, function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
        """Return the function's result on this rank."""
        return function(self.rank, self.ranks, **arguments)

    def forget(self) -> None:
        """Drop all steps and their tensors."""
        self._steps.clear()

    def close(self) -> None:
        """Destroy the process group."""
        self._steps.clear()
        dist.destroy_process_group()


@contextmanager
def rank_pool(ranks: int = 2, timeout: float = 300, **options: Any) -> Iterator[Pool]:
    """Start ranks; the options are those of `Rank`. A rank imports only what its steps need."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="dtcomm-bench-") as folder:
        with Pool(Rank, ranks, timeout=timeout, store_file=str(Path(folder) / "store"), **options) as pool:
            yield pool


def contestant(pool: Pool, name: str, factory: Factory, *, settle: bool = False, **case: Any) -> Measure:
    """Build a step on all ranks; return the function that measures it on the slowest one."""
    pool.call("build", name=name, factory=factory, settle=settle, case=case)
    return partial(_slowest, pool, name)


def _slowest(pool: Pool, name: str, calls: int) -> float:
    return max(pool.call("measure", name=name, calls=calls))
