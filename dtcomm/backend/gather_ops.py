"""The process group's operations that move data without arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dtcomm import collectives
from dtcomm.backend.process_group_base import (
    DEFAULTS,
    ProcessGroupBase,
    as_sendable,
    copy_back_of,
    copy_to_tensors,
    flatten,
    is_async,
    joined,
    joined_view,
    require_alike,
    root_rank,
    unsupported_reason,
)
from dtcomm.codecs.base import ELEMENT_TYPES
from dtcomm.work import Work

Tensors = Sequence[torch.Tensor]


class GatherOps(ProcessGroupBase):
    """broadcast, all_gather, gather, scatter and all_to_all in all their forms, for all dtypes."""

    def broadcast(
        self, tensors: torch.Tensor | Tensors, opts: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        if isinstance(tensors, torch.Tensor):  # (tensor, root, timeout)
            tensors = [tensors]
        tensor, root = tensors[0], root_rank(opts)
        repeated = (self, tensor, tensor, "broadcast", self._ranks[root], *DEFAULTS)
        if (done := self._repeat(repeated, opts, tensors, timeout)) is not None:
            return done
        reason = unsupported_reason(tensor)
        if reason:
            return self._fall_back("broadcast", reason, tensor.device, "broadcast", tensors, opts)
        flat = flatten(tensor)
        work = collectives.broadcast(
            as_sendable(flat), self._ranks[root], group=self, async_op=is_async(opts)
        )
        copy_back = None if root == self.rank() else copy_back_of([flat], [tensor])
        return self._make_work(work, tensors, timeout, copy_back)

    def allgather(
        self,
        output_tensors: Sequence[Any],
        input_tensors: torch.Tensor | Tensors,
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> dist.Work:
        if isinstance(input_tensors, torch.Tensor):  # (output_tensors, input_tensor, timeout)
            output_tensors, input_tensors = [output_tensors], [input_tensors]
        outputs, tensor = output_tensors[0], input_tensors[0]
        reason = unsupported_reason(tensor)
        if reason:
            return self._fall_back(
                "all_gather", reason, tensor.device, "allgather", output_tensors, input_tensors, opts
            )
        require_alike(outputs, tensor, self.size(), "all_gather", "output_tensors")
        flat, async_op = as_sendable(flatten(tensor)), is_async(opts)

        def collective(whole: torch.Tensor) -> Work | None:
            return collectives.all_gather(whole, flat, group=self, async_op=async_op)

        return self._into(outputs, collective, timeout)

    def _into(
        self,
        outputs: Tensors,
        collective: Callable[[torch.Tensor], Work | None],
        timeout: timedelta | None,
    ) -> dist.Work:
        """Run ``collective`` on one tensor with the memory of all outputs, or on a staging buffer that is copied."""
        whole = joined_view(outputs)
        if whole is not None:
            return self._make_work(collective(as_sendable(whole)), outputs, timeout)
        dtype, numel = outputs[0].dtype, sum(tensor.numel() for tensor in outputs)
        buffer = self._staging.take(numel * dtype.itemsize)
        staging = buffer[: numel * dtype.itemsize].view(dtype)
        work = collective(as_sendable(staging))

        def copy_back() -> None:
            copy_to_tensors(outputs, staging)
            self._staging.put_back(buffer)

        return self._make_work(work, outputs, timeout, copy_back)

    def _allgather_base(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        repeated = (self, input, output, "all_gather", *DEFAULTS)
        if (done := self._repeat(repeated, opts, [output], timeout)) is not None:
            return done
        reason = unsupported_reason(output, input)
        if reason:
            return self._fall_back(
                "all_gather_single", reason, output.device, "_allgather_base", output, input, opts
            )
        flat = flatten(output)
        work = collectives.all_gather(
            as_sendable(flat), as_sendable(flatten(input)), group=self, async_op=is_async(opts)
        )
        return self._make_work(work, [output], timeout, copy_back_of([flat], [output]))

    all_gather_single = _allgather_base

    def allgather_into_tensor_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> dist.Work:
        reason = unsupported_reason(*outputs, *inputs)
        if reason:
            method = "allgather_into_tensor_coalesced"
            return self._fall_back(
                "all_gather_single_coalesced", reason, outputs[0].device, method, outputs, inputs, opts
            )
        return self._run_coalesced(outputs, inputs, collectives.all_gather_coalesced, opts)

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def allgather_coalesced(
        self, output_lists: Sequence[Tensors], inputs: Tensors, opts: Any = None
    ) -> dist.Work:
        """Gather input i of each rank into ``output_lists[rank][i]``; inputs may differ in size and dtype."""
        reason = unsupported_reason(*inputs)
        if reason:
            method = "allgather_coalesced"
            return self._fall_back(
                "all_gather_coalesced", reason, inputs[0].device, method, output_lists, inputs, opts
            )
        outputs = [tensor for tensors_of_rank in output_lists for tensor in tensors_of_rank]
        counts = [tensor.numel() for tensor in inputs]
        for rank, tensors_of_rank in enumerate(output_lists):
            if [tensor.numel() for tensor in tensors_of_rank] != counts:
                raise ValueError(
                    f"all_gather_coalesced: output_tensor_lists[{rank}] has tensors of "
                    f"{[tensor.numel() for tensor in tensors_of_rank]} elements, expected {counts}"
                )
        staging = [torch.empty(tensor.numel() * self.size(), dtype=tensor.dtype) for tensor in inputs]
        work = collectives.all_gather_coalesced(
            [as_sendable(buffer) for buffer in staging],
            [as_sendable(flatten(tensor)) for tensor in inputs],
            group=self,
            async_op=is_async(opts),
        )

        def copy_back() -> None:
            for index, gathered in enumerate(staging):
                copy_to_tensors([tensors_of_rank[index] for tensors_of_rank in output_lists], gathered)

        return self._make_work(work, outputs, on_completion=copy_back)

    def gather(
        self,
        output_tensors: Sequence[Any],
        input_tensors: torch.Tensor | Tensors,
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> dist.Work:
        if isinstance(input_tensors, torch.Tensor):  # (output_tensors, input_tensor, root, timeout)
            output_tensors, input_tensors = [output_tensors], [input_tensors]
        tensor, root = input_tensors[0], root_rank(opts)
        reason = unsupported_reason(tensor)
        if reason:
            return self._fall_back(
                "gather", reason, tensor.device, "gather", output_tensors, input_tensors, opts
            )
        flat, async_op, dst = as_sendable(flatten(tensor)), is_async(opts), self._ranks[root]

        def collective(whole: torch.Tensor | None) -> Work | None:
            return collectives.gather(flat, whole, dst, group=self, async_op=async_op)

        if self.rank() != root:
            return self._make_work(collective(None), (), timeout)
        outputs = output_tensors[0]
        require_alike(outputs, tensor, self.size(), "gather", "output_tensors")
        return self._into(outputs, collective, timeout)

    def scatter(
        self,
        output_tensors: torch.Tensor | Tensors,
        input_tensors: Sequence[Any],
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> dist.Work:
        if isinstance(output_tensors, torch.Tensor):  # (output_tensor, input_tensors, root, timeout)
            output_tensors, input_tensors = [output_tensors], [input_tensors]
        output, root = output_tensors[0], root_rank(opts)
        reason = unsupported_reason(output)
        if reason:
            return self._fall_back(
                "scatter", reason, output.device, "scatter", output_tensors, input_tensors, opts
            )
        source = None
        if self.rank() == root:
            inputs = input_tensors[0]
            require_alike(inputs, output, self.size(), "scatter", "input_tensors")
            source = as_sendable(joined(inputs))
        flat = flatten(output)
        work = collectives.scatter(
            as_sendable(flat), source, self._ranks[root], group=self, async_op=is_async(opts)
        )
        return self._make_work(work, [output], timeout, copy_back_of([flat], [output]))

    def alltoall_base(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> dist.Work:
        if not output_split_sizes and not input_split_sizes:
            repeated = (self, input, output, "all_to_all", *DEFAULTS)
            if (done := self._repeat(repeated, opts, [output], timeout)) is not None:
                return done
        reason = unsupported_reason(output, input)
        if reason:
            arguments = (output, input, output_split_sizes, input_split_sizes, opts)
            return self._fall_back("all_to_all_single", reason, output.device, "alltoall_base", *arguments)
        flat, source = flatten(output), flatten(input)
        output_rows, input_rows = flat.view(output.shape), source.view(input.shape)
        if output.dtype not in ELEMENT_TYPES:
            output_rows, input_rows = _rows_of_bytes(output_rows), _rows_of_bytes(input_rows)
        work = collectives.all_to_all(
            output_rows,
            input_rows,
            list(output_split_sizes) or None,
            list(input_split_sizes) or None,
            group=self,
            async_op=is_async(opts),
        )
        return self._make_work(work, [output], timeout, copy_back_of([flat], [output]))

    all_to_all_single = alltoall_base

    def alltoall(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        """Exchange one tensor with every rank; sizes may differ."""
        reason = unsupported_reason(*outputs, *inputs)
        if reason:
            return self._fall_back("all_to_all", reason, outputs[0].device, "alltoall", outputs, inputs, opts)
        for argument, tensors in (("output_tensors", outputs), ("input_tensors", inputs)):
            if len(tensors) != self.size():
                raise ValueError(
                    f"all_to_all: {argument} has {len(tensors)} tensors, the group {self.size()} ranks"
                )
        scale = 1 if outputs[0].dtype in ELEMENT_TYPES else outputs[0].element_size()
        source, async_op = as_sendable(joined(inputs)), is_async(opts)
        sent = [tensor.numel() * scale for tensor in inputs]
        received = [tensor.numel() * scale for tensor in outputs]

        def collective(whole: torch.Tensor) -> Work | None:
            return collectives.all_to_all(whole, source, received, sent, group=self, async_op=async_op)

        return self._into(outputs, collective, timeout)


def _rows_of_bytes(tensor: torch.Tensor) -> torch.Tensor:
    rows = tensor.shape[0] if tensor.dim() else 1
    return tensor.view(torch.uint8) if tensor.dim() > 1 else tensor.view(rows, -1).view(torch.uint8)
