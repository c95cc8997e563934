"""The handles that DDP's ``join`` gives to torch's reducer.

With ``join(divide_by_initial_world_size=False)`` every forward pass starts an all_reduce that counts the ranks which
still have inputs, and gives its handle to the reducer, which waits for it in the backward pass. The reducer is written
in C++ and keeps the C++ part of a handle only: had the Python part been deleted meanwhile, it would wait for ever. And
once it has waited it expects the handle's future to be complete, which dtcomm's is a little later.
"""

from __future__ import annotations

import functools
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]

from dtcomm.backend.fallback_backends import FallbackWork
from dtcomm.work import TorchWork


def install() -> None:
    """Make torch's reducer wait for the future of a handle of dtcomm instead of for the handle."""
    reducer: Any = dist.Reducer  # type: ignore[attr-defined]
    original = reducer._set_forward_pass_work_handle
    if hasattr(original, "dtcomm"):
        return

    @functools.wraps(original)
    def set_forward_pass_work_handle(self: Any, work: dist.Work, *args: Any, **kwargs: Any) -> None:
        if isinstance(work, TorchWork | FallbackWork):
            work = _create_work_from_future(work.get_future())
        original(self, work, *args, **kwargs)

    set_forward_pass_work_handle.dtcomm = True  # type: ignore[attr-defined]
    reducer._set_forward_pass_work_handle = set_forward_pass_work_handle
