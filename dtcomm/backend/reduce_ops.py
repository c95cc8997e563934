"""The operations of a group that add up."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dtcomm import collectives
from dtcomm.backend.process_group_base import Base, asynchronous, elsewhere, root_of
from dtcomm.backend.tensor_views import flat, is_own, joined, put, require_alike
from dtcomm.backend.work import Finished
from dtcomm.codecs.base import ELEMENT_TYPES

Tensors = Sequence[torch.Tensor]

# A caller that waits in the call only asks its handle whether it is over; making one is half of the backend's time.
OVER = Finished(())

# ReduceOp's hash is that of the kind of operation, and looking it up is what costs least.
_NATIVE = {
    hash(dist.ReduceOp.SUM): "sum",
    hash(dist.ReduceOp.AVG): "avg",
    hash(dist.ReduceOp.MIN): "min",
    hash(dist.ReduceOp.MAX): "max",
}


def _op_of(opts: Any) -> Any:
    """The operator in the options, or given in their place (``pg.allreduce(tensors, op)``)."""
    if opts is None:
        return dist.ReduceOp.SUM
    return getattr(opts, "reduceOp", opts)


def _why_not(op: Any, tensors: Tensors) -> str:
    """What keeps the engine from adding these up; empty where nothing does."""
    why = elsewhere(*tensors)
    if why:
        return why
    name = _NATIVE.get(hash(op))
    if name is None:
        return f"op {_called(op)}"
    for tensor in tensors:
        if tensor.dtype not in ELEMENT_TYPES or (name == "avg" and not tensor.is_floating_point()):
            return f"{name} of {str(tensor.dtype).removeprefix('torch.')}"
    return ""


def _called(op: Any) -> str:
    return str(getattr(op, "op", op)).rpartition(".")[2]


class Reducing(Base):
    """all_reduce, reduce and reduce_scatter in all their forms."""

    def allreduce(
        self, tensors: torch.Tensor | Tensors, opts: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        if isinstance(tensors, torch.Tensor):
            tensors = [tensors]
        if len(tensors) != 1:
            return self.allreduce_coalesced(tensors, opts)
        op = _op_of(opts)
        tensor = tensors[0]
        name = _NATIVE.get(hash(op))
        if (
            name is None
            or not tensor.is_cpu
            or not tensor.is_contiguous()
            or tensor.dtype not in ELEMENT_TYPES
        ):
            return self._allreduce_otherwise(tensor, op, opts, timeout)
        if name == "avg" and not tensor.is_floating_point():
            return self._allreduce_otherwise(tensor, op, opts, timeout)
        if not asynchronous(opts):
            collectives.all_reduce(tensor, name, group=self)
            return OVER
        return self._handle(collectives.all_reduce(tensor, name, group=self, async_op=True), tensors, timeout)

    def _allreduce_otherwise(
        self, tensor: torch.Tensor, op: Any, opts: Any, timeout: timedelta | None
    ) -> dist.Work:
        why = _why_not(op, [tensor])
        if why:
            given = opts if hasattr(opts, "reduceOp") else op
            return self._hand("all_reduce", why, tensor.device, lambda to: to.allreduce([tensor], given))
        run = flat(tensor)  # strides may differ from rank to rank: elements travel in their order
        work = collectives.all_reduce(run, _NATIVE[hash(op)], group=self, async_op=asynchronous(opts))
        return self._handle(work, [tensor], timeout, lambda: put([tensor], run))

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        op = _op_of(opts)
        why = _why_not(op, tensors)
        if why:
            device = tensors[0].device if tensors else torch.device("cpu")
            return self._hand(
                "all_reduce_coalesced", why, device, lambda to: to.allreduce_coalesced(tensors, opts)
            )
        runs = [flat(tensor) for tensor in tensors]
        work = collectives.all_reduce_coalesced(
            runs, _NATIVE[hash(op)], group=self, async_op=asynchronous(opts)
        )
        copied = [(tensor, run) for tensor, run in zip(tensors, runs) if not is_own(run, tensor)]

        def last() -> None:
            for tensor, run in copied:
                put([tensor], run)

        return self._handle(work, tensors, last=last if copied else None)

    def reduce(
        self,
        tensors: torch.Tensor | Tensors,
        opts: Any = None,
        op: Any = dist.ReduceOp.SUM,
        timeout: timedelta | None = None,
    ) -> dist.Work:
        if isinstance(tensors, torch.Tensor):  # (tensor, root, op, timeout)
            tensors = [tensors]
        else:
            op = _op_of(opts)
        tensor, root = tensors[0], root_of(opts)
        why = _why_not(op, tensors)
        if why:
            return self._hand("reduce", why, tensor.device, lambda to: to.reduce(tensors, opts))
        run = flat(tensor)
        work = collectives.reduce(
            run, self._ranks[root], _NATIVE[hash(op)], group=self, async_op=asynchronous(opts)
        )
        back = root == self.rank() and not is_own(run, tensor)
        return self._handle(work, tensors, timeout, (lambda: put([tensor], run)) if back else None)

    def reduce_scatter(
        self,
        output_tensors: torch.Tensor | Tensors,
        input_tensors: Sequence[Any],
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> dist.Work:
        if isinstance(output_tensors, torch.Tensor):
            output_tensors, input_tensors = [output_tensors], [input_tensors]
        output, inputs = output_tensors[0], input_tensors[0]
        op = _op_of(opts)
        why = _why_not(op, [output, *inputs])
        if why:
            return self._hand(
                "reduce_scatter",
                why,
                output.device,
                lambda to: to.reduce_scatter(output_tensors, input_tensors, opts),
            )
        require_alike(inputs, output, self.size(), "reduce_scatter", "input_tensors")
        whole = joined(inputs)
        if whole is None:
            whole = torch.cat([flat(each) for each in inputs])
        return self._scatter_sum(output, whole, op, opts, timeout)

    def _scatter_sum(
        self, output: torch.Tensor, whole: torch.Tensor, op: Any, opts: Any, timeout: timedelta | None = None
    ) -> dist.Work:
        run = flat(output)
        work = collectives.reduce_scatter(
            run, whole, _NATIVE[hash(op)], group=self, async_op=asynchronous(opts)
        )
        back = not is_own(run, output)
        return self._handle(work, [output], timeout, (lambda: put([output], run)) if back else None)

    def _reduce_scatter_base(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        op = _op_of(opts)
        why = _why_not(op, [output, input])
        if why:
            return self._hand(
                "reduce_scatter_single",
                why,
                output.device,
                lambda to: to._reduce_scatter_base(output, input, opts),
            )
        return self._scatter_sum(output, flat(input), op, opts, timeout)

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> dist.Work:
        op = _op_of(opts)
        why = _why_not(op, [*outputs, *inputs])
        if why:
            return self._hand(
                "reduce_scatter_single_coalesced",
                why,
                outputs[0].device,
                lambda to: to.reduce_scatter_tensor_coalesced(outputs, inputs, opts),
            )
        move = functools.partial(collectives.reduce_scatter_coalesced, op=_NATIVE[hash(op)])
        return self._each(outputs, inputs, move, opts)

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
