"""Torch's own 16-bit communication hooks for DDP, for ranks that are simulated in one process.

`torch.distributed.algorithms.ddp_comm_hooks.default_hooks` converts a bucket to 16 bits, divides it by the number of
ranks, sums it in 16 bits and converts it back. Ranks are added here in their order; Gloo adds in an order that depends
on the size and the number of ranks, so that only runs of two ranks are the same to the last bit (a test compares them).
"""

# DDP compares the annotations of a hook with these types, so they must not be strings.
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C._distributed_c10d import GradBucket  # dist.GradBucket, where type checkers find it
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

HOOKS = {"fp16": torch.float16, "bf16": torch.bfloat16}


class SimulatedHook:
    """Averages the gradients of ``ranks`` simulated ranks as a 16-bit hook does.

    Args:
        name: ``fp16`` or ``bf16``.
        ranks: Number of simulated ranks.

    Attributes:
        payload_bytes: Bytes of a rank's gradients in 16 bits, over all steps.
    """

    def __init__(self, name: str, ranks: int) -> None:
        self.dtype, self.ranks, self.payload_bytes = HOOKS[name], ranks, 0

    def average(self, gradients: Sequence[Sequence[torch.Tensor]]) -> list[torch.Tensor]:
        """Return the mean gradients; ``gradients[rank]`` lists a rank's."""
        means = []
        for of_ranks in zip(*gradients, strict=True):
            total = of_ranks[0].to(self.dtype).div_(self.ranks)
            for gradient in of_ranks[1:]:
                total += gradient.to(self.dtype).div_(self.ranks)
            means.append(total.to(of_ranks[0].dtype))
            self.payload_bytes += total.numel() * total.element_size()
        return means


def ddp_hook(name: str) -> Callable[[Any, GradBucket], torch.futures.Future[torch.Tensor]]:
    """Return torch's hook for ``DistributedDataParallel.register_comm_hook``, on any backend.

    DDP accepts ``bf16_compress_hook`` only with NCCL and XCCL, by its name, although Gloo sums bf16 as well. This is
    what the hook itself calls.
    """

    def compress_hook(group: Any, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        return default_hooks._compress_hook(HOOKS[name], group, bucket)

    return compress_hook
