"""The operations of a group that hand on what is there."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from dtcomm import collectives
from dtcomm.backend.process_group_base import Base, asynchronous, elsewhere, root_of
from dtcomm.backend.tensor_views import flat, is_own, joined, movable, put, require_alike
from dtcomm.codecs.base import ELEMENT_TYPES

Tensors = Sequence[torch.Tensor]


class Gathering(Base):
    """broadcast, all_gather, gather, scatter and all_to_all in all their forms, for every dtype there is."""

    def broadcast(
        self, tensors: torch.Tensor | Tensors, opts: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        if isinstance(tensors, torch.Tensor):  # (tensor, root, timeout)
            tensors = [tensors]
        tensor, root = tensors[0], root_of(opts)
        why = elsewhere(tensor)
        if why:
            return self._hand("broadcast", why, tensor.device, lambda to: to.broadcast(tensors, opts))
        run = flat(tensor)
        work = collectives.broadcast(movable(run), self._ranks[root], group=self, async_op=asynchronous(opts))
        back = root != self.rank() and not is_own(run, tensor)
        return self._handle(work, tensors, timeout, (lambda: put([tensor], run)) if back else None)

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
        why = elsewhere(tensor)
        if why:
            return self._hand(
                "all_gather", why, tensor.device, lambda to: to.allgather(output_tensors, input_tensors, opts)
            )
        require_alike(outputs, tensor, self.size(), "all_gather", "output_tensors")
        run, later = flat(tensor), asynchronous(opts)
        whole = joined(outputs)
        if whole is not None:
            work = collectives.all_gather(movable(whole), movable(run), group=self, async_op=later)
            return self._handle(work, outputs, timeout)
        return self._through(
            outputs,
            run.numel() * self.size(),
            lambda staged: collectives.all_gather(movable(staged), movable(run), group=self, async_op=later),
            timeout,
        )

    def _through(
        self, outputs: Tensors, numel: int, move: Any, timeout: timedelta | None = None
    ) -> dist.Work:
        """An operation whose outputs, in their order, are one run of memory to the engine."""
        dtype = outputs[0].dtype
        memory = self._staging.take(numel * dtype.itemsize)
        staged = memory[: numel * dtype.itemsize].view(dtype)
        work = move(staged)

        def last() -> None:
            put(outputs, staged)
            self._staging.give(memory)

        return self._handle(work, outputs, timeout, last)

    def _allgather_base(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        why = elsewhere(output, input)
        if why:
            return self._hand(
                "all_gather_single", why, output.device, lambda to: to._allgather_base(output, input, opts)
            )
        run = flat(output)
        work = collectives.all_gather(
            movable(run), movable(flat(input)), group=self, async_op=asynchronous(opts)
        )
        back = not is_own(run, output)
        return self._handle(work, [output], timeout, (lambda: put([output], run)) if back else None)

    all_gather_single = _allgather_base

    def allgather_into_tensor_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> dist.Work:
        why = elsewhere(*outputs, *inputs)
        if why:
            return self._hand(
                "all_gather_single_coalesced",
                why,
                outputs[0].device,
                lambda to: to.allgather_into_tensor_coalesced(outputs, inputs, opts),
            )
        return self._each(outputs, inputs, collectives.all_gather_coalesced, opts)

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def allgather_coalesced(
        self, output_lists: Sequence[Tensors], inputs: Tensors, opts: Any = None
    ) -> dist.Work:
        """``output_lists[rank][i]`` takes input i of a rank; inputs may differ in size and dtype."""
        why = elsewhere(*inputs)
        if why:
            return self._hand(
                "all_gather_coalesced",
                why,
                inputs[0].device,
                lambda to: to.allgather_coalesced(output_lists, inputs, opts),
            )
        outputs = [tensor for listed in output_lists for tensor in listed]
        counts = [each.numel() for each in inputs]
        for rank, listed in enumerate(output_lists):
            if [each.numel() for each in listed] != counts:
                raise ValueError(
                    f"all_gather_coalesced: output_tensor_lists[{rank}] has tensors of "
                    f"{[each.numel() for each in listed]} elements, expected {counts}"
                )
        staged = [torch.empty(each.numel() * self.size(), dtype=each.dtype) for each in inputs]
        work = collectives.all_gather_coalesced(
            [movable(each) for each in staged],
            [movable(flat(each)) for each in inputs],
            group=self,
            async_op=asynchronous(opts),
        )

        def last() -> None:
            for at, whole in enumerate(staged):
                put([listed[at] for listed in output_lists], whole)

        return self._handle(work, outputs, last=last)

    def gather(
        self,
        output_tensors: Sequence[Any],
        input_tensors: torch.Tensor | Tensors,
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> dist.Work:
        if isinstance(input_tensors, torch.Tensor):  # (output_tensors, input_tensor, root, timeout)
            output_tensors, input_tensors = [output_tensors], [input_tensors]
        tensor, root = input_tensors[0], root_of(opts)
        why = elsewhere(tensor)
        if why:
            return self._hand(
                "gather", why, tensor.device, lambda to: to.gather(output_tensors, input_tensors, opts)
            )
        run, later, dst = movable(flat(tensor)), asynchronous(opts), self._ranks[root]
        if self.rank() != root:
            return self._handle(collectives.gather(run, None, dst, group=self, async_op=later), (), timeout)
        outputs = output_tensors[0]
        require_alike(outputs, tensor, self.size(), "gather", "output_tensors")
        whole = joined(outputs)
        if whole is not None:
            work = collectives.gather(run, movable(whole), dst, group=self, async_op=later)
            return self._handle(work, outputs, timeout)
        return self._through(
            outputs,
            tensor.numel() * self.size(),
            lambda staged: collectives.gather(run, movable(staged), dst, group=self, async_op=later),
            timeout,
        )

    def scatter(
        self,
        output_tensors: torch.Tensor | Tensors,
        input_tensors: Sequence[Any],
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> dist.Work:
        if isinstance(output_tensors, torch.Tensor):  # (output_tensor, input_tensors, root, timeout)
            output_tensors, input_tensors = [output_tensors], [input_tensors]
        output, root = output_tensors[0], root_of(opts)
        why = elsewhere(output)
        if why:
            return self._hand(
                "scatter", why, output.device, lambda to: to.scatter(output_tensors, input_tensors, opts)
            )
        whole = None
        if self.rank() == root:
            inputs = input_tensors[0]
            require_alike(inputs, output, self.size(), "scatter", "input_tensors")
            whole = joined(inputs)
            whole = movable(torch.cat([flat(each) for each in inputs]) if whole is None else whole)
        run = flat(output)
        work = collectives.scatter(
            movable(run), whole, self._ranks[root], group=self, async_op=asynchronous(opts)
        )
        back = not is_own(run, output)
        return self._handle(work, [output], timeout, (lambda: put([output], run)) if back else None)

    def alltoall_base(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> dist.Work:
        why = elsewhere(output, input)
        if why:
            return self._hand(
                "all_to_all_single",
                why,
                output.device,
                lambda to: to.alltoall_base(output, input, output_split_sizes, input_split_sizes, opts),
            )
        run, source = flat(output), flat(input)
        shaped, given = run.view(output.shape), source.view(input.shape)
        if output.dtype not in ELEMENT_TYPES:
            shaped, given = _rows_of_bytes(shaped), _rows_of_bytes(given)
        work = collectives.all_to_all(
            shaped,
            given,
            list(output_split_sizes) or None,
            list(input_split_sizes) or None,
            group=self,
            async_op=asynchronous(opts),
        )
        back = not is_own(run, output)
        return self._handle(work, [output], timeout, (lambda: put([output], run)) if back else None)

    all_to_all_single = alltoall_base

    def alltoall(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None, timeout: timedelta | None = None
    ) -> dist.Work:
        """One tensor for every rank, of any size."""
        why = elsewhere(*outputs, *inputs)
        if why:
            return self._hand(
                "all_to_all", why, outputs[0].device, lambda to: to.alltoall(outputs, inputs, opts)
            )
        for argument, listed in (("output_tensors", outputs), ("input_tensors", inputs)):
            if len(listed) != self.size():
                raise ValueError(
                    f"all_to_all: {argument} has {len(listed)} tensors, the group {self.size()} ranks"
                )
        scale = 1 if outputs[0].dtype in ELEMENT_TYPES else outputs[0].element_size()
        source = joined(inputs)
        source = movable(torch.cat([flat(each) for each in inputs]) if source is None else source)
        sent = [each.numel() * scale for each in inputs]
        received = [each.numel() * scale for each in outputs]
        later = asynchronous(opts)

        def move(run: torch.Tensor) -> collectives.Work | None:
            return collectives.all_to_all(movable(run), source, received, sent, group=self, async_op=later)

        whole = joined(outputs)
        if whole is not None:
            return self._handle(move(whole), outputs, timeout)
        return self._through(outputs, sum(each.numel() for each in outputs), move, timeout)


def _rows_of_bytes(tensor: torch.Tensor) -> torch.Tensor:
    rows = tensor.shape[0] if tensor.dim() else 1
    return tensor.view(torch.uint8) if tensor.dim() > 1 else tensor.view(rows, -1).view(torch.uint8)
