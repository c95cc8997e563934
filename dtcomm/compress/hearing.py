"""What ranks told each other, on its way from a device to the host: nobody waits for the device meanwhile."""

from __future__ import annotations

import torch


class Hearing:
    """``told``, which is complete by the current stream; a copy of it is queued, and looked at a step later."""

    def __init__(self, told: torch.Tensor) -> None:
        self._host, self._copied = told, None
        if not told.is_cpu:
            self._host = torch.empty(told.shape, dtype=told.dtype, pin_memory=True)
            self._host.copy_(told, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def get(self) -> torch.Tensor:
        """On the CPU. Waits for the copy alone, not for what the device was given after it."""
        if self._copied is not None and not self._copied.query():  # type: ignore[no-untyped-call]
            self._copied.synchronize()
        return self._host
