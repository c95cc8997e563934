"""Backends with deliberate faults, for ``--backend tests.ranks.cli.backends:Name``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from dtcomm.cli.perf.backend import CollectiveCall
from dtcomm.cli.perf.libraries import Native, ProcessGroup, TorchDistributed
from dtcomm.work import COMPLETED


def followed_by(step: Callable[[], None], run: Callable[[], Any]) -> Callable[[], Any]:
    """Return a call of ``run`` with ``step`` behind it."""

    def run_both() -> Any:
        work = run()
        step()
        return work

    return run_both


class OffByOne(TorchDistributed):
    """One element of rank 1's results is wrong."""

    def bind(self, call: CollectiveCall, asynchronous: bool) -> Callable[[], Any]:
        def corrupt() -> None:
            if dist.get_rank() == 1:
                call.output[-1] += 1

        return followed_by(corrupt, super().bind(call, asynchronous))


class LosesRank1(Native):
    """With a lossy codec: the contribution of rank 1 is lost."""

    def bind(self, call: CollectiveCall, asynchronous: bool) -> Callable[[], Any]:
        run = super().bind(call, asynchronous)

        def run_and_corrupt() -> Any:
            if dist.get_rank() == 1:
                call.output.zero_()
            return run()

        return run_and_corrupt


class DiffersByABit(Native):
    """With a lossy codec: the results are within its bound, but differ between ranks."""

    def bind(self, call: CollectiveCall, asynchronous: bool) -> Callable[[], Any]:
        def corrupt() -> None:
            if dist.get_rank() == 1:
                call.output[0] *= 1.0001

        return followed_by(corrupt, super().bind(call, asynchronous))


class Raises(TorchDistributed):
    """Rank 1 fails."""

    def bind(self, call: CollectiveCall, asynchronous: bool) -> Callable[[], Any]:
        if dist.get_rank() == 1:
            raise OSError("the cable is out")
        return super().bind(call, asynchronous)


class StaysFinite(TorchDistributed):
    """Raises if a result has overflowed."""

    def bind(self, call: CollectiveCall, asynchronous: bool) -> Callable[[], Any]:
        run = super().bind(call, False)

        def run_and_check() -> Any:
            run()
            if not call.output.isfinite().all():
                raise OverflowError("a sum has overflowed")
            return COMPLETED if asynchronous else None

        return run_and_check


class CopiesToHost(ProcessGroup):
    """Copies one value of every result to the host."""

    def bind(self, call: CollectiveCall, asynchronous: bool) -> Callable[[], Any]:
        return followed_by(lambda: call.output[0].item(), super().bind(call, asynchronous))
