"""Overlap of reduce-scatters with the backward pass on CPUs, where torch itself would wait for each one.

After a reduce-scatter FSDP slices the reduced gradient into views and sets them as the parameters' ``grad``. It reads
the values only if it has to divide, cast, accumulate or move them, or if the parameter has hooks. If it only slices,
nothing reads the gradient before the end of the backward pass, so the reduce-scatter may complete later. Besides the
one that has just started, `MAX_PENDING` may be in progress, which bounds the memory.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo

MAX_PENDING = 1


class Overlap:
    """The reduce-scatters in progress in the current backward pass."""

    def __init__(self) -> None:
        self._pending: list[dist.Work] = []
        self._graph_task = -1  # identifies the backward pass

    def add(self, work: dist.Work) -> None:
        """Add one that has started. Waits for older ones beyond `MAX_PENDING`; the end of backward waits for all."""
        graph_task = torch._C._current_graph_task_id()
        if graph_task != self._graph_task:
            self.finish()  # a nested backward pass (checkpointing), or one after a pass that failed
            self._graph_task = graph_task
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)
        self._pending.append(work)
        while len(self._pending) > MAX_PENDING + 1:
            self._pending.pop(0).wait()

    def finish(self) -> None:
        """Wait for all. After an error the remaining ones are dropped, so that it is raised only once."""
        try:
            while self._pending:
                self._pending.pop(0).wait()
        except BaseException:
            self._pending.clear()
            raise


def result_is_only_sliced(module: FSDPModule, gradient: torch.Tensor, op: str) -> bool:
    """Return whether FSDP only slices the reduced ``gradient``, and a backward pass is running."""
    group = module._get_fsdp_state()._fsdp_param_group
    if group is None or gradient.device.type != "cpu" or torch._C._current_graph_task_id() == -1:
        return False
    if op != "avg" or group._all_reduce_hook is not None or isinstance(group.mesh_info, DDPMeshInfo):
        return False
    return all(_is_only_sliced(parameter, gradient.dtype) for parameter in group.fsdp_params)


def _is_only_sliced(parameter: Any, reduced_dtype: torch.dtype) -> bool:
    sharded = parameter.sharded_param
    return (
        sharded.grad is None
        and parameter.orig_dtype == reduced_dtype
        and not parameter.offload_to_cpu
        and not getattr(sharded, "_post_accumulate_grad_hooks", None)
    )
