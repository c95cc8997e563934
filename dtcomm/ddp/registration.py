"""Whether all ranks have registered the hook. A rank without it runs other collectives, and the others would wait."""

from __future__ import annotations

import time

import torch.distributed as dist

from dtcomm.collectives.announcement import Announcement
from dtcomm.ddp.reducer import Reducer, ReducerObserver
from dtcomm.errors import CollectiveMismatch
from dtcomm.streams import Streams

# DDP's constructor has just made the ranks wait for each other, so they register at nearly the same time.
LIMIT_S = 20.0
_POLL_S = 0.05


class RegistrationObserver(ReducerObserver):
    """Announces that this rank has registered the hook, and requires it of all ranks in the first backward pass.

    Args:
        group: The process group of the model.
        reducer: The reducer that it is attached to.
    """

    def __init__(self, group: dist.ProcessGroup, reducer: Reducer) -> None:
        self._reducer = reducer
        self._announcement = Announcement(group, "ddp")

    def begin_pass(self, step: int, streams: Streams) -> None:
        """Wait until all ranks have registered the hook.

        Raises:
            CollectiveMismatch: Some rank has not within `LIMIT_S`.
        """
        deadline = time.monotonic() + LIMIT_S
        while missing := self._announcement.missing():
            if time.monotonic() >= deadline:
                raise CollectiveMismatch(
                    f"dtcomm.ddp: {missing} did not register the hook for this model "
                    f"within {LIMIT_S:g} s of this rank's first backward pass; call dtcomm.ddp.compress on every rank"
                )
            time.sleep(_POLL_S)
        self._reducer.detach(self)
