"""Collectives of FSDP modules with parameters that tensor parallelism shards, and others that all of its ranks have.

FSDP sends all parameters of a module as one flat tensor. Were it encoded as one, a block of a codec could hold elements
of a layer's shard beside elements of a norm or a bias. The ranks of tensor parallelism have different shards, so the
block would have another scale on each of them, and each would round the same norm or bias differently: what should be
copies would become different. Here the flat tensor is sent as several parts, each encoded by itself, with residuals,
guard and counters of its own. The part of the replicated parameters has equal inputs, seeds and residuals on all of
these ranks, and so equal results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from dtcomm import torch_compat
from dtcomm.collectives import all_gather, reduce_scatter
from dtcomm.fsdp.collectives import (
    BackwardOverlap,
    CompressedAllGather,
    CompressedReduceScatter,
    ReplicaAllReduce,
    op_name,
)
from dtcomm.fsdp.guard import ROOT
from dtcomm.fsdp.options import UNCOMPRESSED
from dtcomm.fsdp.state import FSDPState
from dtcomm.fsdp.storage import ShardedLayout, layout_of
from dtcomm.streams import record_streams
from dtcomm.tp.sharded_module import shard_groups

UNKNOWN_PLACES = "some parameters have no gradient, so it is unknown which elements tensor parallelism shards"

#: Ranges (begin, end) of elements in each rank's shard of a flat tensor.
Columns = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Part:
    """The parameters of an FSDP module that are sharded over the same groups of tensor parallelism, or over none.

    Attributes:
        name: Its name in the state: that of the module, with an addition.
        parameters: Where they lie in each rank's shard of the flat parameters.
        gradients: Where they lie in each rank's shard of the flat gradient; empty if all are frozen.
        layout: Their layout in the residual; None if it is unknown.
    """

    name: str
    parameters: Columns
    gradients: Columns
    layout: ShardedLayout | None


@dataclass(frozen=True)
class Parts:
    """The parts of an FSDP module, in the order of the parameters.

    The numbers of elements are those of each rank's shard of the flat tensors, if all parameters have gradients.
    """

    parts: tuple[Part, ...]
    parameter_numel: int
    gradient_numel: int


def split_module(name: str, module: FSDPModule, group: Any) -> tuple[list[dist.ProcessGroup], Parts | None]:
    """Return the groups of tensor parallelism of a module's parameters, and its parts if there are several.

    ``group`` is its only parameter group.
    """
    shards = dist.get_process_group_ranks(group.mesh_info.shard_process_group)
    groups: dict[str, dist.ProcessGroup] = {}
    members: dict[tuple[str, ...], list[Any]] = {}
    all_groups = shard_groups(parameter.sharded_param for parameter in group.fsdp_params)
    for parameter, cut_over in zip(group.fsdp_params, all_groups, strict=True):
        # Without the group over which FSDP cuts it; torch may give it as another group of the same ranks.
        own = [other for other in cut_over if dist.get_process_group_ranks(other) != shards]
        groups |= {found.group_name: found for found in own}
        members.setdefault(tuple(found.group_name for found in own), []).append(parameter)
    if len(members) < 2:
        return list(groups.values()), None
    every = group.fsdp_params
    reduced = torch_compat.in_order_of_reduction(every)
    trained = [parameter for parameter in reduced if parameter.sharded_param.requires_grad]
    parts = []
    sharded = 0  # parts that are sharded over some group; the first one keeps the module's name
    for key, own_parameters in members.items():
        if not key:
            part_name = f"{name or ROOT}, replicated"
        else:
            part_name, sharded = f"{name or ROOT}, sharded {sharded}" if sharded else name, sharded + 1
        parts.append(
            Part(
                part_name,
                _columns(every, own_parameters),
                _columns(trained, own_parameters),
                layout_of(name, module, [parameter for parameter in reduced if parameter in own_parameters]),
            )
        )
    return list(groups.values()), Parts(tuple(parts), _numel(every), _numel(trained))


def _numel(parameters: Sequence[Any]) -> int:
    return sum(parameter.padded_sharded_param_size.numel() for parameter in parameters)


def _columns(every: Sequence[Any], own: Sequence[Any]) -> Columns:
    """Return where the parameters ``own`` lie in each rank's shard of the flat tensor of ``every``."""
    chosen = {id(parameter) for parameter in own}
    columns: list[tuple[int, int]] = []
    begin = 0
    for parameter in every:
        end = begin + parameter.padded_sharded_param_size.numel()
        if id(parameter) in chosen and end > begin:
            if columns and columns[-1][1] == begin:
                columns[-1] = (columns[-1][0], end)
            else:
                columns.append((begin, end))
        begin = end
    return tuple(columns)


def _width(columns: Columns) -> int:
    return sum(end - begin for begin, end in columns)


def _take(flat: torch.Tensor, rows: int, columns: Columns, out: torch.Tensor) -> torch.Tensor:
    """Copy columns of ``flat``, which has as many equal rows, into ``out``."""
    by_row = flat.view(rows, -1)
    torch.cat([by_row[:, begin:end] for begin, end in columns], dim=1, out=out.view(rows, -1))
    return out


def _put(part: torch.Tensor, rows: int, columns: Columns, flat: torch.Tensor) -> None:
    """Copy back what `_take` has copied."""
    by_row, begin_in_part = flat.view(rows, -1), 0
    for begin, end in columns:
        end_in_part = begin_in_part + end - begin
        by_row[:, begin:end].copy_(part.view(rows, -1)[:, begin_in_part:end_in_part])
        begin_in_part = end_in_part


class _PartsWork(dist.Work):
    """The handle of the collectives of all parts: the first ``wait`` waits for each, and finishes the result."""

    def __init__(self, works: Sequence[dist.Work], finish: Callable[[], None]) -> None:
        super().__init__()
        self._works, self._finish = works, finish
        self._waited = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        for work in self._works:
            work.wait() if timeout is None else work.wait(timeout)
        if not self._waited:
            self._waited = True
            self._finish()
            self._works, self._finish = (), lambda: None  # they keep tensors alive
        return True

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


class SplitAllGather(CompressedAllGather):
    """The all-gather of a module's parameters, part by part."""

    def __init__(self, state: FSDPState, module: str, parts: Parts) -> None:
        super().__init__(state, module)
        self._parts = parts
        self._gathers = [CompressedAllGather(state, part.name) for part in parts.parts]

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        ranks = group.size()
        if ranks != self.state.num_shards or self.state.parameters.is_none:
            return super().__call__(output_tensor, input_tensor, group, async_op)
        if input_tensor.numel() != self._parts.parameter_numel:
            return self._gather_uncompressed(output_tensor, input_tensor, group)
        works: list[dist.Work] = []
        outputs = []
        for part, gather in zip(self._parts.parts, self._gathers, strict=True):
            width = _width(part.parameters)
            output = self.allocate((ranks * width,), dtype=output_tensor.dtype, device=output_tensor.device)
            own = output.view(ranks, width)[group.rank()]
            work = gather(output, _take(input_tensor, 1, part.parameters, own), group, async_op)
            assert work is not None  # it returns a handle in any case
            works.append(work)
            outputs.append(output)

        def join() -> None:
            record_streams(output_tensor, *outputs)  # FSDP waits on another stream than it gathers on
            for part, output in zip(self._parts.parts, outputs, strict=True):
                _put(output, ranks, part.parameters, output_tensor)

        return _PartsWork(works, join)

    def _gather_uncompressed(
        self, output: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup
    ) -> dist.Work:
        """Gather parameters of another size than that of their shards, which extensions of torch's may have."""
        work = all_gather(output, shard, group=group, async_op=True)
        traffic = self.state.traffic(self.module, "parameters", UNCOMPRESSED)
        traffic.codec, traffic.fallback = "none", True
        traffic.reason = "it is unknown which elements tensor parallelism shards"
        self.state.note_choice(self.module, traffic)
        return self.pending("parameters", work, traffic, shard.nbytes * (group.size() - 1))


class SplitReduceScatter(CompressedReduceScatter):
    """The reduce-scatter of a module's gradients, part by part."""

    def __init__(
        self, state: FSDPState, name: str, module: FSDPModule, overlap: BackwardOverlap, parts: Parts
    ) -> None:
        super().__init__(state, name, module, overlap)
        self._gradient_numel = parts.gradient_numel
        self._parts = [part for part in parts.parts if part.gradients]
        self._reductions = [
            CompressedReduceScatter(state, part.name, module, overlap) for part in self._parts
        ]

    def start(
        self, output: torch.Tensor, gradient: torch.Tensor, group: dist.ProcessGroup, op: Any
    ) -> dist.Work:
        ranks = group.size()
        if self.state.gradients.is_none:
            return super().start(output, gradient, group, op)
        if output.numel() != self._gradient_numel:
            work = reduce_scatter(output, gradient, op_name(op), group=group, async_op=True)
            traffic = _uncompressed(self.state, self.module, "gradients")
            return self.pending("gradients", work, traffic, gradient.nbytes * (ranks - 1) // ranks)
        works, shards = [], []
        for part, reduction in zip(self._parts, self._reductions, strict=True):
            width = _width(part.gradients)
            whole, shard = (
                self.allocate((numel,), dtype=gradient.dtype, device=gradient.device)
                for numel in (ranks * width, width)
            )
            works.append(reduction.start(shard, _take(gradient, ranks, part.gradients, whole), group, op))
            shards.append(shard)

        def join() -> None:
            record_streams(output, *shards)  # FSDP waits on another stream than it reduces on
            for part, shard in zip(self._parts, shards, strict=True):
                _put(shard, 1, part.gradients, output)

        return _PartsWork(works, join)


class SplitReplicaAllReduce(ReplicaAllReduce):
    """The all-reduce of a module's gradient shards between replicas, part by part."""

    def __init__(self, state: FSDPState, module: str, group: dist.ProcessGroup, parts: Parts) -> None:
        super().__init__(state, module, group)
        self._gradient_numel = parts.gradient_numel
        self._parts = [part for part in parts.parts if part.gradients]
        self._reductions = [ReplicaAllReduce(state, part.name, group) for part in self._parts]

    def __call__(self, shard: torch.Tensor) -> None:
        if self.state.gradients.is_none:
            super().__call__(shard)
            return
        if shard.numel() != self._gradient_numel:
            work = self.reduce_uncompressed(shard)
            traffic = _uncompressed(self.state, self.module, "replicas")
            self.pending("replicas", work, traffic, self.plain_bytes(shard)).wait()
            return
        for part, reduction in zip(self._parts, self._reductions, strict=True):
            own = _take(shard, 1, part.gradients, shard.new_empty(_width(part.gradients)))
            reduction(own)
            _put(own, 1, part.gradients, shard)


def _uncompressed(state: FSDPState, module: str, kind: str) -> Any:
    """Return the counters of gradients that are sent uncompressed because it is unknown what lies where in them."""
    state.note_reduction()
    traffic = state.traffic(module, kind, UNCOMPRESSED)
    traffic.codec, traffic.reason, traffic.fallback = "none", UNKNOWN_PLACES, True
    state.note_choice(module, traffic)
    return traffic
