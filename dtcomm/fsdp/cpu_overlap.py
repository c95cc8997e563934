"""Reduce-scatters that backward goes on behind, on CPUs, where torch would stand still for each.

FSDP cuts a reduced gradient into views and sets them as the parameters' `grad`, unless it has to divide, cast, add or
move it, or somebody has asked to be called. Where it only cuts, nobody reads the gradient before the end of backward,
and it may arrive after FSDP has gone on. One module's may be under way beside the one that has just started, so that
memory stays bounded.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo

MOST = 1


class Overlap:
    """What is under way in this backward pass."""

    def __init__(self) -> None:
        self._under_way: list[dist.Work] = []
        self._pass = -1

    def add(self, work: dist.Work) -> None:
        """A reduce-scatter has started; backward waits for those before it, but for `MOST`, and at its end for all."""
        now = torch._C._current_graph_task_id()
        if now != self._pass:
            self.finish()  # a pass within another one, as checkpoints may need, or after one that an error cut short
            self._pass = now
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)
        self._under_way.append(work)
        while len(self._under_way) > MOST + 1:
            self._under_way.pop(0).wait()

    def finish(self) -> None:
        """Wait for all. Errors of theirs are raised once, and leave nothing behind."""
        try:
            while self._under_way:
                self._under_way.pop(0).wait()
        except BaseException:
            self._under_way.clear()
            raise


def only_cuts(module: FSDPModule, given: torch.Tensor, op: str) -> bool:
    """Whether FSDP does no more with what is reduced of ``given`` than to cut it, and in a backward pass."""
    group = module._get_fsdp_state()._fsdp_param_group
    if group is None or given.device.type != "cpu" or torch._C._current_graph_task_id() == -1:
        return False
    if op != "avg" or group._all_reduce_hook is not None or isinstance(group.mesh_info, DDPMeshInfo):
        return False
    return all(_is_left_alone(each, given.dtype) for each in group.fsdp_params)


def _is_left_alone(parameter: Any, reduced: torch.dtype) -> bool:
    sharded = parameter.sharded_param
    return (
        sharded.grad is None
        and parameter.orig_dtype == reduced
        and not parameter.offload_to_cpu
        and not getattr(sharded, "_post_accumulate_grad_hooks", None)
    )
