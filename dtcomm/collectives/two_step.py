"""The all-reduce of tensor parallelism in two shots to which an owner's contribution goes encoded, as all others do."""

from __future__ import annotations

import torch

from dtcomm import algorithms
from dtcomm.codecs import Codec
from dtcomm.collectives._arguments import Group
from dtcomm.collectives._dispatch import Own
from dtcomm.runtime.communicator import find_for
from dtcomm.runtime.cuda_peer.launch import TWO_STEP, why_not
from dtcomm.runtime.cuda_peer.runtime import PeerRuntime
from dtcomm.runtime.types import Part, Shape


def in_one_kernel(tensor: torch.Tensor, codec: Codec, group: Group = None) -> Own | None:
    """The algorithm for `all_reduce` that sums ``tensor`` so; None where no fused kernel does, on all ranks alike."""
    communicator = find_for(group, tensor, "tensor")
    if not isinstance(communicator.runtime, PeerRuntime):
        return None
    shape = Shape("all_reduce", "sum", (Part(tensor.numel(), tensor.dtype, codec),), TWO_STEP)
    if why_not(shape, communicator.size):
        return None
    # No schedule says it: the kernel is known by its name. Its messages are those of two shots.
    return Own(TWO_STEP, algorithms.build("two_shot", "all_reduce", communicator.size))
