"""The process group's reductions."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dtcomm import collectives
from dtcomm.backend.process_group_base import (
    DEFAULTS,
    ProcessGroupBase,
    copy_back_of,
    flatten,
    is_async,
    joined,
    plain,
    require_alike,
    root_rank,
    unsupported_reason,
)
from dtcomm.codecs.base import ELEMENT_TYPES

Tensors = Sequence[torch.Tensor]

# The hash of a ReduceOp is that of its kind; this is the fastest way to look it up.
_NATIVE_OPS = {
    hash(dist.ReduceOp.SUM): "sum",
    hash(dist.ReduceOp.AVG): "avg",
    hash(dist.ReduceOp.MIN): "min",
    hash(dist.ReduceOp.MAX): "max",
}


def _reduce_op(opts: Any) -> Any:
    """Return the operator in torch's options, or passed in their place (``pg.allreduce(tensors, op)``)."""
    if opts is None:
        return dist.ReduceOp.SUM
    return getattr(opts, "reduceOp", opts)


def _native_unsupported_reason(op: Any, tensors: Tensors) -> str:
    """Return why the engine cannot reduce these tensors; empty if it can."""
    reason = unsupported_reason(*tensors)
    if reason:
        return reason
    name = _NATIVE_OPS.get(hash(op))
    if name is None:
        return f"op {_op_label(op)}"
    for tensor in tensors:
        if tensor.dtype not in ELEMENT_TYPES or (name == "avg" and not tensor.is_floating_point()):
            return f"{name} of {str(tensor.dtype).removeprefix('torch.')}"
    return ""


def _op_label(op: Any) -> str:
    return str(getattr(op, "op", op)).rpartition(".")[2]


class ReduceOps(ProcessGroupBase):
    """all_reduce, reduce and reduce_scatter in all their forms."""

    def allreduce(
        self, tensors: torch.Tensor | Tensors, opts: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        if isinstance(tensors, torch.Tensor):
            tensors = [tensors]
        if len(tensors) != 1:
            return self.allreduce_coalesced(tensors, opts)
        op = _reduce_op(opts)
        repeated = (self, tensors[0], tensors[0], "all_reduce", _NATIVE_OPS.get(hash(op)), *DEFAULTS, False)
        if (done := self._repeat(repeated, opts, tensors, timeout)) is not None:
            return done
        tensor = plain(tensors[0])
        reason = _native_unsupported_reason(op, [tensor])
        if reason:
            op_or_opts = opts if hasattr(opts, "reduceOp") else op
            return self._fall_back_contiguous(
                "all_reduce",
                reason,
                [tensor],
                [],
                lambda group, outputs, _: group.allreduce(outputs, op_or_opts),
            )
        flat = flatten(tensor)  # strides may differ between ranks: elements are sent in logical order
        work = collectives.all_reduce(flat, _NATIVE_OPS[hash(op)], group=self, async_op=is_async(opts))
        return self._make_work(work, [tensor], timeout, copy_back_of([flat], [tensor]))

    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> dist.Work:
        op = _reduce_op(opts)
        reason = _native_unsupported_reason(op, tensors)
        if reason:
            return self._fall_back_contiguous(
                "all_reduce_coalesced",
                reason,
                tensors,
                [],
                lambda group, outputs, _: group.allreduce_coalesced(outputs, opts),
            )
        flats = [flatten(tensor) for tensor in tensors]
        work = collectives.all_reduce_coalesced(
            flats, _NATIVE_OPS[hash(op)], group=self, async_op=is_async(opts)
        )
        return self._make_work(work, tensors, on_completion=copy_back_of(flats, tensors))

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
            op = _reduce_op(opts)
        tensor, root = tensors[0], root_rank(opts)
        name = _NATIVE_OPS.get(hash(op))
        repeated = (self, tensor, tensor, "reduce", self._ranks[root], name, *DEFAULTS)
        if (done := self._repeat(repeated, opts, tensors, timeout)) is not None:
            return done
        reason = _native_unsupported_reason(op, tensors)
        if reason:
            outputs, inputs = (tensors, ()) if root == self.rank() else ((), tensors)
            return self._fall_back_contiguous(
                "reduce",
                reason,
                outputs,
                inputs,
                lambda group, outputs, inputs: group.reduce(outputs or inputs, opts),
            )
        flat = flatten(tensor)
        work = collectives.reduce(
            flat, self._ranks[root], _NATIVE_OPS[hash(op)], group=self, async_op=is_async(opts)
        )
        copy_back = copy_back_of([flat], [tensor]) if root == self.rank() else None
        return self._make_work(work, tensors, timeout, copy_back)

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
        op = _reduce_op(opts)
        reason = _native_unsupported_reason(op, [output, *inputs])
        if reason:
            return self._fall_back_contiguous(
                "reduce_scatter",
                reason,
                [output],
                inputs,
                lambda group, outputs, inputs: group.reduce_scatter(outputs, [inputs], opts),
            )
        require_alike(inputs, output, self.size(), "reduce_scatter", "input_tensors")
        return self._reduce_scatter_flat(output, joined(inputs), op, opts, timeout)

    def _reduce_scatter_flat(
        self, output: torch.Tensor, whole: torch.Tensor, op: Any, opts: Any, timeout: timedelta | None = None
    ) -> dist.Work:
        flat = flatten(output)
        work = collectives.reduce_scatter(
            flat, whole, _NATIVE_OPS[hash(op)], group=self, async_op=is_async(opts)
        )
        return self._make_work(work, [output], timeout, copy_back_of([flat], [output]))

    def _reduce_scatter_base(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        op = _reduce_op(opts)
        repeated = (self, input, output, "reduce_scatter", _NATIVE_OPS.get(hash(op)), *DEFAULTS)
        if (done := self._repeat(repeated, opts, [output], timeout)) is not None:
            return done
        reason = _native_unsupported_reason(op, [output, input])
        if reason:
            return self._fall_back_contiguous(
                "reduce_scatter_single",
                reason,
                [output],
                [input],
                lambda group, outputs, inputs: group._reduce_scatter_base(outputs[0], inputs[0], opts),
            )
        return self._reduce_scatter_flat(output, flatten(input), op, opts, timeout)

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> dist.Work:
        op = _reduce_op(opts)
        reason = _native_unsupported_reason(op, [*outputs, *inputs])
        if reason:
            return self._fall_back_contiguous(
                "reduce_scatter_single_coalesced",
                reason,
                outputs,
                inputs,
                lambda group, outputs, inputs: group.reduce_scatter_tensor_coalesced(outputs, inputs, opts),
            )
        collective = functools.partial(collectives.reduce_scatter_coalesced, op=_NATIVE_OPS[hash(op)])
        return self._run_coalesced(outputs, inputs, collective, opts)

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
