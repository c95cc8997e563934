"""The face of a guard's `Watch` where nobody watches: whoever tells it something need not ask whether anybody does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from dtcomm.compress.error_sample import Sample
from dtcomm.compress.guard import Event, Guard, Watch
from dtcomm.compress.spec import Scheme


class Unwatched:
    """Sees, says and changes nothing."""

    events: Sequence[Event] = ()
    revision = 0

    def observe(self, loss: float | torch.Tensor) -> None: ...

    def sampled(self, name: str, scheme: Scheme) -> None: ...

    def measured(self, sample: Sample, lost: torch.Tensor) -> None: ...

    def arrived(self, mean: torch.Tensor) -> None: ...

    def bad(self, there: torch.Tensor | None = None) -> None: ...

    def vector(self, device: torch.device | None = None) -> None:
        """Nothing to tell the other ranks."""

    def judge(self, step: int, mean: torch.Tensor) -> None: ...

    def begin(self, step: int) -> None: ...

    def scheme(self, name: str, chosen: Scheme, step: int) -> Scheme:
        return chosen

    def take_resets(self) -> list[str]:
        return []

    def take_changes(self) -> list[str]:
        return []

    def state_dict(self) -> dict[str, object]:
        return {}

    def load_state_dict(self, state: Mapping[str, object]) -> None: ...


Watcher = Watch | Unwatched


def watcher(guard: Guard | None) -> Watcher:
    """Of a guard, or of none."""
    return Unwatched() if guard is None else Watch(guard)
