"""The ranks of a group for the tensors of one device, as `dtcomm.tp.AllReduce` uses them."""

from __future__ import annotations

import torch
from torch import Tensor

from dtcomm import planner
from dtcomm.codecs import Codec
from dtcomm.collectives._arguments import Group
from dtcomm.collectives._dispatch import make_plan, start
from dtcomm.collectives.reduce_ops import why_no_fused_kernel
from dtcomm.runtime.communicator import Communicator
from dtcomm.runtime.communicator_cache import get_communicator_for_device
from dtcomm.runtime.types import Buffers


class DeviceGroup:
    """The ranks of a group, connected for tensors of a device.

    All ranks make it together. After `dtcomm.release` its next call connects the ranks again.

    Args:
        group: Process group; None is the default group.
        device: The CPU or a CUDA device.

    Attributes:
        rank: This rank in the group.
        size: Number of ranks.
    """

    def __init__(self, group: Group, device: torch.device) -> None:
        self._group, self._device = group, device
        communicator = self._communicator()
        communicator.connect()
        self.rank, self.size = communicator.rank, communicator.size

    @property
    def runtime(self) -> tuple[str, str]:
        """The name of what executes operations, and why."""
        communicator = self._communicator()
        communicator.connect()
        return communicator.runtime.name, communicator.runtime_reason

    def sum_into(self, out: Tensor, inp: Tensor, codec: Codec, algorithm: str) -> None:
        """Write the sum of all ranks' ``inp`` to ``out``; both are contiguous, and may be one tensor."""
        communicator, numel, dtype = self._communicator(), inp.numel(), inp.dtype
        # The key of dtcomm.all_reduce, whose plans are the same.
        key = ("all_reduce", numel, dtype, "sum", codec, algorithm, None, False)
        plan = communicator.plans.get(key)
        if plan is None:
            plan = make_plan(communicator, key, "all_reduce", [(numel, dtype, codec)], algorithm)
        start(communicator, plan, [Buffers(inp, out)], [out], None, False)

    def why_uncompressed(self, codec: Codec, numel: int, dtype: torch.dtype) -> str:
        """Return the planner's reason not to compress a sum; empty if compressing it pays. Equal on all ranks."""
        communicator = self._communicator()
        communicator.connect()
        verdict = planner.compression_pays(
            codec, numel, dtype, communicator.size, communicator.hosts, communicator.tuning_table
        )
        return "" if verdict.pays else verdict.reason

    def why_no_fused_kernel(self, codec: Codec, numel: int, dtype: torch.dtype, algorithm: str) -> str:
        """Return why fused CUDA kernels do not serve a sum; empty if they do. Equal on all ranks."""
        communicator = self._communicator()
        communicator.connect()
        return why_no_fused_kernel(communicator, numel, dtype, codec, algorithm)

    def _communicator(self) -> Communicator:
        return get_communicator_for_device(self._group, self._device)
