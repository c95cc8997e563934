"""A policy with the face of a `Tuner`: what it says holds for good, and nothing is measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from dtcomm.compress.guard import Event
from dtcomm.compress.policy import CodecChoice, Policy
from dtcomm.compress.powersgd import PowerSGD
from dtcomm.compress.spec import Scheme
from dtcomm.ddp.autotune.measure import BucketTiming
from dtcomm.ddp.autotune.tuner import Tuner


class FixedPolicy:
    """The same answers at every step."""

    revision = 0
    own = False
    decisions: Sequence[Event] = ()
    rows: Sequence[dict[str, Any]] = ()

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.schemes: tuple[Scheme, ...] = tuple(rule.codec for rule in policy.rules)
        self.in_stages = any(isinstance(each, PowerSGD) for each in self.schemes)

    def __str__(self) -> str:
        return str(self.policy)

    def choose(self, name: str, gradient: torch.Tensor) -> CodecChoice:
        return self.policy.choose(name, gradient)

    timed = False

    def on(self, device: torch.device) -> None: ...

    def decides(self, step: int) -> bool:
        return False

    def begin(self, step: int) -> None: ...

    def wants(self, step: int) -> bool:
        return False

    def look(self, index: int, names: Sequence[str], gradients: Sequence[torch.Tensor]) -> None: ...

    def end(self, step: int, seconds: float, buckets: Sequence[BucketTiming]) -> None: ...

    def pop_changes(self) -> list[str]:
        return []

    def pop_uncompressed(self) -> list[str]:
        return []

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


Chooser = FixedPolicy | Tuner
