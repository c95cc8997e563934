"""What the operations of a group have in common: who carries them out, and the handle that the caller gets."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dtcomm import collectives
from dtcomm.backend.fallback_backends import Children
from dtcomm.backend.tensor_views import Staging, flat, is_own, movable, put
from dtcomm.backend.work import Finished, Pending
from dtcomm.runtime.work import ChainedWork


class Base(dist.ProcessGroup):
    """A group with children; its subclasses add the operations.

    ``_together`` collects the handles of operations between ``_start_coalescing`` and ``_end_coalescing``.
    """

    _children: Children
    _together: list[dist.Work] | None = None

    @functools.cached_property
    def _staging(self) -> Staging:
        return Staging()

    @functools.cached_property
    def _ranks(self) -> list[int]:
        return dist.get_process_group_ranks(self)

    def _hand(self, what: str, why: str, device: torch.device, call: Callable[[Any], Any]) -> dist.Work:
        """To the child for ``device``, written down by name."""
        return self._children.run(what, why, device, call)

    def _handle(
        self,
        work: collectives.Work | None,
        outputs: Sequence[torch.Tensor],
        limit: timedelta | None = None,
        last: Callable[[], None] | None = None,
    ) -> dist.Work:
        """The caller's handle of an operation that is over (``work`` None) or under way.

        ``last`` is what is to be done with what has arrived, once, before anybody sees it.
        """
        if work is None:
            if last is not None:
                last()
            return Finished(outputs)
        if last is not None:
            work = ChainedWork(work, last, outputs)
        seconds = limit.total_seconds() if limit else None
        pending = Pending(work, outputs, seconds)
        if self._together is not None:
            self._together.append(pending)
        return pending

    def _each(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        move: Callable[..., collectives.Work | None],
        opts: Any,
    ) -> dist.Work:
        """A coalesced operation: ``move`` is one of dtcomm's, on tensors without gaps in dtypes that can be moved."""
        runs = [flat(output) for output in outputs]
        work = move(
            [movable(run) for run in runs],
            [movable(flat(each)) for each in inputs],
            group=self,
            async_op=asynchronous(opts),
        )
        copied = [(output, run) for output, run in zip(outputs, runs) if not is_own(run, output)]

        def last() -> None:
            for output, run in copied:
                put([output], run)

        return self._handle(work, outputs, last=last if copied else None)


def asynchronous(opts: Any) -> bool:
    """Whether the caller goes on before the operation is over; callers without options do."""
    return bool(getattr(opts, "asyncOp", True))


def root_of(opts: Any) -> int:
    """The root in torch's options, or given in their place (``pg.gather(outputs, input, root)``)."""
    return int(getattr(opts, "rootRank", opts) or 0)


def elsewhere(*tensors: torch.Tensor) -> str:
    """Why tensors are none of the engine's business; empty where they are."""
    for tensor in tensors:
        if tensor.device.type != "cpu":
            return f"on {tensor.device.type}"
        if tensor.layout is not torch.strided:
            return f"{str(tensor.layout).removeprefix('torch.')} tensor"
    return ""
