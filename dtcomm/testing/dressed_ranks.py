"""The ranks of a Gloo group as if they had a device each, and NCCL between them: see `dtcomm.testing.dressed`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from dtcomm.runtime import joining_devices
from dtcomm.runtime.on_streams import StreamRuntime
from dtcomm.testing.dressed import device
from dtcomm.testing.letters import Letters
from dtcomm.testing.streams import RecordedStreams


@contextmanager
def devices(streams: RecordedStreams, leave_out: str = "") -> Iterator[None]:
    """Within the block this rank has a device; all ranks enter it, and each judges what it does by its ``streams``."""
    changed: dict[str, Any] = {"backend_of": lambda group, device: "nccl", "describe": lambda device: {}}
    kept = {name: vars(joining_devices)[name] for name in changed}
    kept_below = joining_devices.DeviceJoining._below

    def below(joining: Any, own: Any, backend: str) -> StreamRuntime:
        gloo = joining._private_backend("gloo")

        def post(sends: Sequence[tuple[Any, int]], receives: Sequence[tuple[Any, int]]) -> None:
            works = [gloo.recv([_bare(into)], peer, 0) for into, peer in receives]
            works += [gloo.send([_bare(given)], peer, 0) for given, peer in sends]
            for work in works:
                work.wait()

        return StreamRuntime(Letters(own, joining.rank, post, leave_out), own, joining.rank, lambda: None)

    joining_devices.DeviceJoining._below = below  # type: ignore[assignment]
    vars(joining_devices).update(changed)
    try:
        with device(streams):
            yield
    finally:
        joining_devices.DeviceJoining._below = kept_below  # type: ignore[method-assign]
        vars(joining_devices).update(kept)


def _bare(tensor: torch.Tensor) -> torch.Tensor:
    return getattr(tensor, "host", tensor)
