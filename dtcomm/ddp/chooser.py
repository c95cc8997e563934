"""What chooses the scheme of each parameter: a fixed policy, or the autotuner (`dtcomm.ddp.autotune.tuner`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from dtcomm.compress.guard import Event
from dtcomm.compress.policy import CodecChoice, Policy
from dtcomm.compress.powersgd import PowerSGD
from dtcomm.compress.spec import Scheme


class Chooser(Protocol):
    """Chooses what the gradient of each parameter is compressed with; the same on all ranks."""

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        """All schemes that may ever be chosen."""

    @property
    def revision(self) -> int:
        """Changes whenever a choice may have changed."""

    @property
    def bypass(self) -> bool:
        """Whether buckets are averaged by the group's own backend, uncompressed, as DDP does it without a hook."""

    @property
    def in_stages(self) -> bool:
        """Whether a scheme in force takes several collectives (PowerSGD)."""

    @property
    def decisions(self) -> Sequence[Event]:
        """The decisions so far, for reports."""

    @property
    def rows(self) -> Sequence[dict[str, Any]]:
        """What the last decision compared, for reports."""

    def choose(self, name: str, gradient: torch.Tensor) -> CodecChoice:
        """Return what a parameter is compressed with now."""

    def state_dict(self) -> dict[str, Any]:
        """Return the choices in force as plain values."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the choices of a `state_dict`."""


class FixedPolicy:
    """A `Chooser` that gives the answers of a policy at every step."""

    revision = 0
    bypass = False
    decisions: Sequence[Event] = ()
    rows: Sequence[dict[str, Any]] = ()

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.schemes: tuple[Scheme, ...] = tuple(rule.codec for rule in policy.rules)
        self.in_stages = any(isinstance(scheme, PowerSGD) for scheme in self.schemes)

    def __str__(self) -> str:
        return str(self.policy)

    def choose(self, name: str, gradient: torch.Tensor) -> CodecChoice:
        return self.policy.choose(name, gradient)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...
