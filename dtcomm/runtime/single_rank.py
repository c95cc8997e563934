"""The runtime of a group of one rank: it copies inputs to outputs and sends nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dtcomm.runtime.flight_recorder import FlightEntry, PeerSnapshot
from dtcomm.runtime.types import NO_HOOKS, Buffers, OpHooks, OpSpec
from dtcomm.schedule import Schedule
from dtcomm.work import DoneWork


class SingleRankRuntime:
    """Executes operations of one rank. A codec is not applied: nothing is sent, so nothing is lost."""

    name = "none"
    failure = ""

    def prepare(self, spec: OpSpec, schedule: Schedule) -> OpSpec:
        """The operation itself is the plan."""
        return spec

    def run(self, plan: OpSpec, buffers: Sequence[Buffers], seed: int, hooks: OpHooks | None = None) -> int:
        """Copy every input that is not already its output; returns 0, the bytes sent."""
        hooks = hooks or NO_HOOKS
        for task in hooks.before:
            task()
        for part in buffers:
            if part.input is not None and part.output is not None and part.output is not part.input:
                part.output.copy_(part.input.view_as(part.output))
        for task in hooks.after:
            task()
        return 0

    def submit(
        self,
        plan: OpSpec,
        buffers: Sequence[Buffers],
        outputs: Sequence[torch.Tensor],
        seed: int,
        hooks: OpHooks | None = None,
    ) -> DoneWork:
        """As ``run``: there is nothing to wait for."""
        self.run(plan, buffers, seed, hooks)
        return DoneWork(outputs)

    def set_timeout(self, seconds: float) -> None:
        """Do nothing: no other rank is waited for."""

    def close(self) -> None:
        """Do nothing: nothing is held."""

    def info(self) -> dict[str, Any]:
        """The runtime's name."""
        return {"runtime": self.name}

    def flight_entries(self) -> list[FlightEntry]:
        """An empty list: a single rank records no operations."""
        return []

    def peer_snapshots(self) -> list[PeerSnapshot]:
        """An empty list: there are no peers."""
        return []
